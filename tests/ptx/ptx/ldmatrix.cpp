#include "device_test.hpp"

namespace tessera::testing {
namespace {

// Element (row, col) of the 8 x 8 matrix m of numbered 16-bit elements.
uint32_t element(int m, int row, int col) { return static_cast<uint32_t>(m * 64 + row * 8 + col); }
uint32_t pair_of(uint32_t low, uint32_t high) { return low | high << 16; }

// The four matrices row after row, as words of memory.
std::vector<uint32_t> memory() {
  return words(128, [](int i) {
    return pair_of(element(i / 32, i / 4 % 8, i % 4 * 2), element(i / 32, i / 4 % 8, i % 4 * 2 + 1));
  });
}
// What lane l holds of matrix m, at 4 l + m; transposed: of the matrix's transpose.
std::vector<uint32_t> fragments(bool transposed) {
  return words(128, [transposed](int i) {
    const int m = i % 4, row = i / 4 / 4, col = i / 4 % 4 * 2;
    return transposed ? pair_of(element(m, col, row), element(m, col + 1, row))
                      : pair_of(element(m, row, col), element(m, row, col + 1));
  });
}

const std::string kLoad = R"(
  alignas(16) __shared__ uint32 s[128];
  for (int i = 0; i < 4; ++i) s[t * 4 + i] = in[t * 4 + i];
  __syncwarp();
  uint32 r[4];
  ptx::ldmatrix_x4%(r, shared_address(s + t * 4));
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = r[i];)";
const std::string kStore = R"(
  alignas(16) __shared__ uint32 s[128];
  const uint32 r[4] = {in[t * 4], in[t * 4 + 1], in[t * 4 + 2], in[t * 4 + 3]};
  ptx::stmatrix_x4%(shared_address(s + t * 4), r);
  __syncwarp();
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = s[t * 4 + i];)";
std::string with(std::string body, const std::string& suffix) { return body.replace(body.find('%'), 1, suffix); }

const DeviceTests kTests({
    {.name = "ldmatrix_x4",
     .header = "tessera/ptx/mma.cuh",
     .in = memory(),
     .expected = fragments(false),
     .body = with(kLoad, "")},
    {.name = "ldmatrix_x4_trans",
     .header = "tessera/ptx/mma.cuh",
     .in = memory(),
     .expected = fragments(true),
     .body = with(kLoad, "_trans")},
    {.name = "stmatrix_x4",
     .header = "tessera/ptx/mma.cuh",
     .archs = Archs::kHopperOn,
     .in = fragments(false),
     .expected = memory(),
     .body = with(kStore, "")},
    {.name = "stmatrix_x4_trans",
     .header = "tessera/ptx/mma.cuh",
     .archs = Archs::kHopperOn,
     .in = fragments(true),
     .expected = memory(),
     .body = with(kStore, "_trans")},
    {.name = "movmatrix_trans",
     .header = "tessera/ptx/mma.cuh",
     .in = words(32, [](int l) { return pair_of(element(0, l / 4, l % 4 * 2), element(0, l / 4, l % 4 * 2 + 1)); }),
     .expected = words(32,
                       [](int l) { return pair_of(element(0, l % 4 * 2, l / 4), element(0, l % 4 * 2 + 1, l / 4)); }),
     .body = "out[t] = ptx::movmatrix_trans(in[t]);"},
    {.name = "shared_words",
     .header = "tessera/ptx/mma.cuh",
     .expected = {1, 2, 3, 4, 5, word(2.5f), word(3.5f), word(1.5f), word(3.5f), 0, 0, 0, 0},
     .body = R"(
  alignas(16) __shared__ uint32 s[12];
  if (t == 0) {
    ptx::st_shared_s32x2(shared_address(s), 1, 2);
    ptx::st_shared_s32x2(shared_address(s + 2), 3, 4);
    const uint4 x = ptx::ld_shared_16(shared_address(s));
    out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
    ptx::st_shared_s32(shared_address(s + 3), 5);
    out[4] = ptx::ld_shared_s32(shared_address(s + 3));
    ptx::st_shared_f32x4(shared_address(s + 4), 1.5f, 2.0f, 2.5f, 3.5f);
    const float2 y = ptx::ld_shared_f32x2(shared_address(s + 6));
    out[5] = __float_as_uint(y.x), out[6] = __float_as_uint(y.y);
    const float4 z = ptx::ld_shared_f32x4(shared_address(s + 4));
    out[7] = __float_as_uint(z.x), out[8] = __float_as_uint(z.w);
    ptx::st_shared_zero_16(shared_address(s + 4));
    for (int i = 0; i < 4; ++i) out[9 + i] = s[4 + i];
  })"},
});

}  // namespace
}  // namespace tessera::testing
