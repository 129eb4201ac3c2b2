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

// acc = A B^T, twice: the second product adds. Each 16 columns of A are stored as pairs 0 2 4 6 1 3 5 7.
DeviceTest abt(const Codes& codes) {
  const Matrix a = small_numbers(16, 64, 1), b = small_numbers(16, 64, 2);
  Matrix stored = a;
  for (int row = 0; row < 16; ++row)
    for (int col = 0; col < 64; ++col) {
      constexpr int kPlaces[] = {0, 4, 1, 5, 2, 6, 3, 7};
      stored.x[static_cast<size_t>(row * 64 + col / 16 * 16 + kPlaces[col / 2 % 8] * 2 + col % 2)] = a.at(row, col);
    }
  Matrix expected = product(a, transposed(b));
  for (float& x : expected.x) x *= 2;
  return {.name = "product_abt_" + codes.name,
          .header = "tessera/tile/product_codes.cuh",
          .archs = Archs::kHopperOn,
          .in = pair_words(stored, false) + codes.words_of(b),
          .expected = float_words(expected),
          .body = codes.body(R"(
  __shared__ SharedTile<Dtype::kFloat16, 16, 64> sA;
  __shared__ SharedTile<Dtype::kFloat16, 16, 32> sB;  // two codes an element
  fill_tile(sA, in), fill_tile(sB, in + 16 * 64 / 2);
  float acc[1][2][4];
  clear(acc);
  product_abt_codes<kCodes>(acc, sA, sB);
  product_abt_codes<kCodes>(acc, sA, sB);
  put_accumulator(out, 16, acc);)")};
}

// acc = P B: P, a product's accumulator, is I P. A lane writes its four neighbouring columns of each 16.
DeviceTest pb(const Codes& codes) {
  const Matrix p = small_numbers(16, 16, 3), b = small_numbers(16, 64, 4);
  Matrix identity{16, 16, {}};
  for (int i = 0; i < 256; ++i) identity.x.push_back(i / 16 == i % 16 ? 1.0f : 0.0f);
  return {.name = "product_pb_" + codes.name,
          .header = "tessera/tile/product_codes.cuh",
          .archs = Archs::kHopperOn,
          .in = pair_words(p, false) + pair_words(identity, false) + codes.words_of(b),
          .expected = float_words(product(p, b)),
          .body = codes.body(R"(
  __shared__ SharedTile<Dtype::kFloat16, 16, 16> sP, sI;
  __shared__ SharedTile<Dtype::kFloat16, 16, 32> sB;  // two codes an element
  fill_tile(sP, in), fill_tile(sI, in + 128), fill_tile(sB, in + 256);
  float p[1][2][4], acc[1][8][4];
  clear(p), clear(acc);
  product_abt(p, sP, 0, sI, 0);
  product_pb_codes<kCodes>(acc, p, sB);
  const auto put = [&](int row, int i, float4 x) {
    const float columns[] = {x.x, x.y, x.z, x.w};
    for (int n = 0; n < 4; ++n) out[row * 64 + i * 16 + lane % 4 * 4 + n] = __float_as_uint(columns[n]);
  };
  for (int i = 0; i < 4; ++i) {
    put(static_cast<int>(lane) / 4, i, code_columns<0>(acc, i));
    put(static_cast<int>(lane) / 4 + 8, i, code_columns<1>(acc, i));
  })")};
}

const DeviceTests kTests([] {
  std::vector<DeviceTest> tests;
  for (const Codes& codes : kCodes) tests.push_back(abt(codes)), tests.push_back(pb(codes));
  return tests;
}());

}  // namespace
}  // namespace tessera::testing
