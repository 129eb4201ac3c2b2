#include "core/float8.hpp"
#include "device_test.hpp"

namespace tessera::testing {
namespace {

struct Codes {
  std::string name, dtype;
  const core::Float8Format& format;
  std::string body(const std::string& text) const { return "constexpr Dtype kCodes = Dtype::" + dtype + ";\n" + text; }
  // Row after row, four codes a word.
  std::vector<uint32_t> words_of(const Matrix& m) const {
    return words(static_cast<int>(m.x.size()) / 4, [&](int i) {
      uint32_t codes = 0;
      for (int n = 3; n >= 0; --n) codes = codes << 8 | float_to_float8(format, m.x[static_cast<size_t>(4 * i + n)]);
      return codes;
    });
  }
};
const std::vector<Codes> kCodes = {{"e4m3", "kFloat8E4M3", core::kE4M3}, {"e5m2", "kFloat8E5M2", core::kE5M2}};

// acc = A B^T, twice: the second product adds. Each 16 columns of A are stored as pairs 0 2 4 6 1 3 5 7. A has 8, 16 or
// 32 rows.
DeviceTest abt(const Codes& codes, int rows) {
  const Matrix a = small_numbers(rows, 64, 1), b = small_numbers(16, 64, 2);
  Matrix stored = a;
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < 64; ++col) {
      constexpr int kPlaces[] = {0, 4, 1, 5, 2, 6, 3, 7};
      stored.x[static_cast<size_t>(row * 64 + col / 16 * 16 + kPlaces[col / 2 % 8] * 2 + col % 2)] = a.at(row, col);
    }
  Matrix expected = product(a, transposed(b));
  for (float& x : expected.x) x *= 2;
  const std::string count = std::to_string(rows);
  return {.name = "product_abt_" + codes.name + "_" + count,
          .header = "tessera/tile/product_codes.cuh",
          .archs = Archs::kHopperOn,
          .in = pair_words(stored, false) + codes.words_of(b),
          .expected = float_words(expected),
          .body = codes.body("constexpr int kRows = " + count + R"(;
  __shared__ SharedTile<Dtype::kFloat16, kRows, 64> sA;
  __shared__ SharedTile<Dtype::kFloat16, 16, 32> sB;  // two codes an element
  fill_tile(sA, in), fill_tile(sB, in + kRows * 64 / 2);
  float acc[(kRows + 15) / 16][2][4];
  clear(acc);
  const auto of_a = [&](uint32(&a)[(kRows + 15) / 16][4], int k) { load_a_codes(a, sA, k); };
  product_abt_codes<kCodes>(acc, of_a, sB);
  product_abt_codes<kCodes>(acc, of_a, sB);
  for (int m = 0; m < (kRows + 15) / 16; ++m)
    for (int n = 0; n < 2; ++n)
      for (int e = 0; e < (kRows == 8 ? 2 : 4); ++e) {
        const int row = m * 16 + e / 2 * 8 + static_cast<int>(lane) / 4;
        out[row * 16 + n * 8 + static_cast<int>(lane) % 4 * 2 + e % 2] = __float_as_uint(acc[m][n][e]);
      })")};
}

// acc = B^T P^T: P, the accumulator of a product P I, has 32 rows, of which the first `rows` are multiplied. A lane
// writes its two neighbouring columns of each 16.
DeviceTest btpt(const Codes& codes, int rows) {
  const Matrix p = small_numbers(32, 16, 3), b = small_numbers(16, 64, 4);
  Matrix identity{16, 16, {}};
  for (int i = 0; i < 256; ++i) identity.x.push_back(i / 16 == i % 16 ? 1.0f : 0.0f);
  Matrix expected = product(p, b);
  expected.x.resize(static_cast<size_t>(rows) * 64);
  const std::string count = std::to_string(rows);
  return {.name = "product_btpt_" + codes.name + "_" + count,
          .header = "tessera/tile/product_codes.cuh",
          .archs = Archs::kHopperOn,
          .in = pair_words(p, false) + pair_words(identity, false) + codes.words_of(b),
          .expected = float_words(expected),
          .body = codes.body("constexpr int kTiles = " + count + R"( / 8, kM = (kTiles + 1) / 2;
  __shared__ SharedTile<Dtype::kFloat16, 32, 16> sP;
  __shared__ SharedTile<Dtype::kFloat16, 16, 16> sI;
  __shared__ SharedTile<Dtype::kFloat16, 16, 32> sB;  // two codes an element
  fill_tile(sP, in), fill_tile(sI, in + 256), fill_tile(sB, in + 384);
  float p[kM][2][4], acc[kTiles][4][4];
  clear(p), clear(acc);
  product_abt(p, sP, 0, sI, 0);
  product_btpt_codes<kCodes>(acc, p, sB);
  const auto put = [&](int row, int col, float2 x) {
    out[row * 64 + col] = __float_as_uint(x.x), out[row * 64 + col + 1] = __float_as_uint(x.y);
  };
  for (int t = 0; t < kTiles; ++t)
    for (int n = 0; n < 4; ++n) {
      const int row = t * 8 + static_cast<int>(lane) % 4 * 2, col = n * 16 + static_cast<int>(lane) / 4 * 2;
      put(row, col, code_columns<0>(acc[t][n])), put(row + 1, col, code_columns<1>(acc[t][n]));
    })")};
}

// Row g is lane 4 g's and its neighbours', and lane 4 g + c is to have rows 2 c and the next.
DeviceTest across_rows() {
  return {.name = "across_rows",
          .header = "tessera/tile/product_codes.cuh",
          .archs = Archs::kHopperOn,
          .expected = words(64, [](int i) { return static_cast<uint32_t>(100 + i / 2 % 4 * 2 + i % 2); }),
          .body = R"(
  const float2 rows = across_rows(static_cast<float>(100 + lane / 4));
  out[2 * t] = static_cast<uint32>(rows.x), out[2 * t + 1] = static_cast<uint32>(rows.y);)"};
}

const DeviceTests kTests([] {
  std::vector<DeviceTest> tests = {across_rows()};
  for (const Codes& codes : kCodes)
    for (const int rows : {8, 16, 32}) tests.push_back(abt(codes, rows)), tests.push_back(btpt(codes, rows));
  return tests;
}());

}  // namespace
}  // namespace tessera::testing
