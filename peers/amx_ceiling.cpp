// A loop of AMX's bfloat16 products, 2 x 2 accumulators, in assembly: a separate copy, so that a fault in the kernels'
// tile layer does not affect their ceiling.
#include <array>
#include <cstdint>

#include "peers/loops.hpp"

namespace tessera::peers {

#if defined(__x86_64__)
namespace {

struct TileConfig {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

constexpr std::int64_t kTile_bytes = 1024, kStep_bytes = 4 * kTile_bytes;  // two tiles of A, two of B
constexpr std::int64_t kSteps = 4;                                         // 16 KiB: in the first cache

// Zeros, or numbers between -1 and 1 whose mantissas are all different.
template <bool kZeros>
const std::uint16_t* operands() {
  alignas(64) static std::array<std::uint16_t, kSteps* kStep_bytes / 2> values = [] {
    std::array<std::uint16_t, kSteps * kStep_bytes / 2> filled{};
    std::uint64_t state = 1;
    for (std::uint16_t& value : filled) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      const auto random = static_cast<std::uint16_t>(state >> 48);
      if (!kZeros) value = static_cast<std::uint16_t>((random & 0x81ffU) | 0x3e00U);
    }
    return filled;
  }();
  return values.data();
}

}  // namespace

void amx_products(std::int64_t iterations, bool zeros) {
  static constexpr TileConfig kConfig = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  const auto* data = reinterpret_cast<const char*>(zeros ? operands<true>() : operands<false>());
  asm volatile(
      "ldtilecfg %0\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::"m"(kConfig));
  for (std::int64_t i = 0; i < iterations; ++i) {
    const char* at = data + i % kSteps * kStep_bytes;
    asm volatile(
        "tileloadd (%0,%4,1), %%tmm4\n\ttileloadd (%1,%4,1), %%tmm6\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
        "tileloadd (%2,%4,1), %%tmm7\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tileloadd (%3,%4,1), %%tmm5\n\ttdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::"r"(at),
        "r"(at + kTile_bytes), "r"(at + 2 * kTile_bytes), "r"(at + 3 * kTile_bytes), "r"(std::int64_t{64})
        : "memory");
  }
  asm volatile("tilerelease");
}
#else
void amx_products(std::int64_t, bool) {}
#endif

}  // namespace tessera::peers
