#include "device_test.hpp"

namespace tessera::testing {
namespace {

// The descriptors (inner_major, outer_major) are tested with their products, in ptx/wgmma.cpp, and SwizzledTile's
// swizzle with TMA's, in ptx/cp_async_bulk.cpp. Here: a warp's product of swizzled tiles by mma, rows 16 ... 31 of A.
DeviceTest warp_product(bool bfloat16) {
  const Matrix a = small_numbers(64, 64, 1), b = small_numbers(16, 64, 2);
  Matrix rows{16, 64, {a.x.begin() + 16 * 64, a.x.begin() + 32 * 64}};
  return {.name = std::string("warp_product_abt_") + (bfloat16 ? "bf16" : "f16"),
          .header = "tessera/tile/wgmma_tile.cuh",
          .in = pair_words(a, bfloat16) + pair_words(b, bfloat16),
          .expected = float_words(product(rows, transposed(b))),
          .body = "constexpr Dtype kType = Dtype::" + std::string(bfloat16 ? "kBFloat16" : "kFloat16") + R"(;
  using A = SwizzledTile<64, 64>;
  using B = SwizzledTile<16, 64>;
  __shared__ A sA;
  __shared__ B sB;
  fill_swizzled(sA, in), fill_swizzled(sB, in + 64 * 32);
  float acc[1][2][4];
  warp_product_abt<kType, A, B>(acc, shared_address(sA.data), 16, shared_address(sB.data));
  put_accumulator(out, 16, acc);)"};
}

const DeviceTests kTests({
    warp_product(false),
    warp_product(true),
    // The flat array is the accumulator's memory.
    {.name = "flat",
     .header = "tessera/tile/wgmma_tile.cuh",
     .expected = words(12, [](int i) { return word(static_cast<float>(i)); }),
     .body = R"(
  float acc[1][3][4];
  for (int i = 0; i < 12; ++i) flat(acc)[i] = i;
  if (t == 0)
    for (int i = 0; i < 12; ++i) out[i] = __float_as_uint(acc[0][i / 4][i % 4]);)"},
});

}  // namespace
}  // namespace tessera::testing
