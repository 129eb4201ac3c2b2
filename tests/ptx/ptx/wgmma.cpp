#include "device_test.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera::testing {
namespace {

// D = 4 A B, for each width and type: A from shared memory and from registers, B as stored and transposed. The first
// product does not add to the previous contents of the registers.
DeviceTest product_of(int width, bool bfloat16) {
  const Matrix a = small_numbers(64, 64, 1), b = small_numbers(64, width, width);
  Matrix d = product(a, b);
  for (float& x : d.x) x *= 4;
  const std::string n = std::to_string(width);
  return {.name = std::string("wgmma_") + (bfloat16 ? "bf16_" : "f16_") + n,
          .header = "tessera/ptx/wgmma.cuh",
          .archs = Archs::kHopperAlone,
          .threads = 128,
          .in = pair_words(a, bfloat16) + pair_words(transposed(b), bfloat16) + pair_words(b, bfloat16),
          .expected = float_words(d),
          .body = "multiply_by_wgmma<" + std::string(bfloat16 ? "Dtype::kBFloat16" : "Dtype::kFloat16") + ", " + n +
                  ">(out, in);"};
}

const DeviceTests kTests([] {
  std::vector<DeviceTest> tests;
  for (const int width : kWgmmaWidths)
    for (const bool bfloat16 : {false, true}) tests.push_back(product_of(width, bfloat16));
  return tests;
}());

}  // namespace
}  // namespace tessera::testing
