#include "core/float8.hpp"
#include "device_test.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera::testing {
namespace {

// Row after row, four codes a word.
std::vector<uint32_t> code_words(const Matrix& m) {
  return words(static_cast<int>(m.x.size()) / 4, [&](int i) {
    uint32_t four = 0;
    for (int n = 0; n < 4; ++n) {
      four |= uint32_t{core::float_to_float8(core::kE4M3, m.x[static_cast<size_t>(4 * i + n)])} << 8 * n;
    }
    return four;
  });
}

// D = 2 A B: A from shared memory and from registers. The numbers and their sums have few bits, so that no accumulator
// rounds them. The first product does not add to the previous contents of the registers.
DeviceTest product_of(int width) {
  const Matrix a = small_numbers(64, 128, 3), b = small_numbers(128, width, width + 1);
  Matrix d = product(a, b);
  for (float& x : d.x) x *= 2;
  const std::string n = std::to_string(width);
  return {.name = "wgmma_e4m3_" + n,
          .header = "tessera/ptx/wgmma_e4m3.cuh",
          .archs = Archs::kHopperAlone,
          .threads = 128,
          .in = code_words(a) + code_words(transposed(b)),
          .expected = float_words(d),
          .body = "multiply_by_wgmma_e4m3<" + n + ">(out, in);"};
}

const DeviceTests kTests([] {
  std::vector<DeviceTest> tests;
  for (const int width : kWgmmaWidths) tests.push_back(product_of(width));
  return tests;
}());

}  // namespace
}  // namespace tessera::testing
