#include "device_test.hpp"

namespace tessera::testing {
namespace {

// A [16][k], B [k][8] stored transposed, D [16][8] to which the product is added.
const Matrix kA16 = small_numbers(16, 16, 1), kB16 = small_numbers(16, 8, 2), kA8 = small_numbers(16, 8, 3),
             kB8 = small_numbers(8, 8, 4), kD = small_numbers(16, 8, 5);
std::vector<uint32_t> sum(const Matrix& a, const Matrix& b) {
  Matrix c = product(a, b);
  for (size_t i = 0; i < c.x.size(); ++i) c.x[i] += kD.x[i];
  return float_words(c);
}

const std::string kBody = R"(
  const int g = lane / 4, c = lane % 4;
  const uint32 *A = in, *B = in + 128, *D = in + 192;
  const uint32 a[4] = {A[g * 8 + c], A[(g + 8) * 8 + c], A[g * 8 + c + 4], A[(g + 8) * 8 + c + 4]};
  float d[4];
  for (int e = 0; e < 4; ++e) d[e] = __uint_as_float(D[(g + e / 2 * 8) * 8 + 2 * c + e % 2]);
  ptx::CALL(d, a, B[g * 8 + c], B[g * 8 + c + 4]);
  for (int e = 0; e < 4; ++e) out[(g + e / 2 * 8) * 8 + 2 * c + e % 2] = __float_as_uint(d[e]);)";
std::string with(const std::string& call) {
  std::string body = kBody;
  return body.replace(body.find("CALL"), 4, call);
}
std::vector<uint32_t> halves(bool bfloat16) {
  return pair_words(kA16, bfloat16) + pair_words(transposed(kB16), bfloat16) + float_words(kD);
}

const DeviceTests kTests({
    {.name = "mma_m16n8k16_f16",
     .header = "tessera/ptx/mma.cuh",
     .in = halves(false),
     .expected = sum(kA16, kB16),
     .body = with("mma_m16n8k16_f16")},
    {.name = "mma_m16n8k16_bf16",
     .header = "tessera/ptx/mma.cuh",
     .in = halves(true),
     .expected = sum(kA16, kB16),
     .body = with("mma_m16n8k16_bf16")},
    {.name = "mma_m16n8k8_tf32",
     .header = "tessera/ptx/mma.cuh",
     .in = float_words(kA8) + float_words(transposed(kB8)) + float_words(kD),
     .expected = sum(kA8, kB8),
     .body = with("mma_m16n8k8_tf32")},
});

}  // namespace
}  // namespace tessera::testing
