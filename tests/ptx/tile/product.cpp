#include "device_test.hpp"

namespace tessera::testing {
namespace {

struct Type {
  std::string name, dtype;
  bool float32, bfloat16;
  std::vector<uint32_t> words(const Matrix& m) const { return float32 ? float_words(m) : pair_words(m, bfloat16); }
  std::string body(const std::string& text) const { return "constexpr Dtype kType = Dtype::" + dtype + ";\n" + text; }
};
const std::vector<Type> kTypes = {
    {"f16", "kFloat16", false, false}, {"bf16", "kBFloat16", false, true}, {"f32", "kFloat32", true, false}};

Matrix doubled(Matrix m) {
  for (float& x : m.x) x *= 2;
  return m;
}

// acc = A B^T, twice: the second product adds.
DeviceTest abt(const Type& type) {
  const Matrix a = small_numbers(32, 32, 1), b = small_numbers(16, 32, 2);
  return {.name = "product_abt_" + type.name,
          .header = "tessera/tile/product.cuh",
          .in = type.words(a) + type.words(b),
          .expected = float_words(doubled(product(a, transposed(b)))),
          .body = type.body(R"(
  __shared__ SharedTile<kType, 32, 32> sA;
  __shared__ SharedTile<kType, 16, 32> sB;
  fill_tile(sA, in), fill_tile(sB, in + sA.kRows * sA.kCols * sA.kElemBytes / 4);
  float acc[2][2][4];
  clear(acc);
  product_abt(acc, sA, 0, sB, 0);
  product_abt(acc, sA, 0, sB, 0);
  put_accumulator(out, 16, acc);)")};
}

// acc = P B: P, a product's accumulator, is I P.
DeviceTest pb(const Type& type, bool packed) {
  const Matrix p = small_numbers(16, 16, 3), b = small_numbers(16, 16, 4);
  Matrix identity{16, 16, {}};
  for (int i = 0; i < 256; ++i) identity.x.push_back(i / 16 == i % 16 ? 1.0f : 0.0f);
  return {.name = std::string(packed ? "product_packed_pb_" : "product_pb_") + type.name,
          .header = "tessera/tile/product.cuh",
          .in = type.words(p) + type.words(identity) + type.words(b),
          .expected = float_words(product(p, b)),
          .body = type.body(std::string(R"(
  __shared__ SharedTile<kType, 16, 16> sP, sI, sB;
  constexpr int kWords = sP.kRows * sP.kCols * sP.kElemBytes / 4;
  fill_tile(sP, in), fill_tile(sI, in + kWords), fill_tile(sB, in + 2 * kWords);
  float p[1][2][4], acc[1][2][4];
  clear(p), clear(acc);
  product_abt(p, sP, 0, sI, 0);)") +
                            (packed ? R"(
  uint32 rP[1][1][4];
  pack_rows<kType>(rP, p);
  product_pb(acc, rP, sB);)"
                                    : R"(
  product_pb(acc, p, sB, 0);)") +
                            R"(
  put_accumulator(out, 16, acc);)")};
}

// acc = A B and acc = A^T B, then rounded to a tile.
DeviceTest shared(const Type& type, bool transpose) {
  const Matrix a = small_numbers(32, 32, 5), b = small_numbers(32, 16, 6);
  return {.name = std::string(transpose ? "product_atb_" : "product_ab_") + type.name,
          .header = "tessera/tile/product.cuh",
          .in = type.words(a) + type.words(b),
          .expected = type.words(product(transpose ? transposed(a) : a, b)),
          .body = type.body(std::string(R"(
  __shared__ SharedTile<kType, 32, 32> sA;
  __shared__ SharedTile<kType, 32, 16> sB, sC;
  fill_tile(sA, in), fill_tile(sB, in + sA.kRows * sA.kCols * sA.kElemBytes / 4);
  float acc[2][2][4];
  clear(acc);)") + (transpose ? "product_atb<1>(acc, sA, 0, sB, 0);" : "product_ab<1>(acc, sA, 0, sB, 0);") +
                            R"(
  for (auto& m : acc)
    for (auto& n : m)
      for (float& x : n) x *= 0.5f;
  store_accumulator<1>(sC, acc, 0, 0, 2.0f);
  __syncwarp();
  put_tile(out, sC);)")};
}

const DeviceTests kTests([] {
  std::vector<DeviceTest> tests;
  for (const Type& type : kTypes) {
    tests.push_back(abt(type)), tests.push_back(pb(type, false));
    if (!type.float32) tests.push_back(pb(type, true));
    tests.push_back(shared(type, false)), tests.push_back(shared(type, true));
  }
  // x = high + low to 21 bits, and an infinity in one place alone.
  tests.push_back({.name = "split_tf32",
                   .header = "tessera/tile/product.cuh",
                   .in = {word(1.2345678f), 0x7f800000},
                   .expected = {word(1.2345678f), 0x7f800000, 0, 0},
                   .tolerance = 0x1p-21,
                   .body = R"(
  if (t == 0) {
    const Tf32Pair x = split_tf32(__uint_as_float(in[0])), inf = split_tf32(__uint_as_float(in[1]));
    out[0] = __float_as_uint(__uint_as_float(x.finite_high & 0xffffe000u) + __uint_as_float(x.low & 0xffffe000u));
    out[1] = inf.high, out[2] = inf.finite_high, out[3] = inf.low;
  })"});
  return tests;
}());

}  // namespace
}  // namespace tessera::testing
