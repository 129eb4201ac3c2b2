// The widths N of wgmma that kernels use, for the host and for ptx/wgmma.cuh: N, and the numbers of the seven operands
// after the N / 2 accumulators of an asm statement.
#pragma once

// clang-format off
#define TESSERA_WGMMA_WIDTHS(X)              \
  X(32, 16, 17, 18, 19, 20, 21, 22)          \
  X(48, 24, 25, 26, 27, 28, 29, 30)          \
  X(64, 32, 33, 34, 35, 36, 37, 38)          \
  X(80, 40, 41, 42, 43, 44, 45, 46)          \
  X(96, 48, 49, 50, 51, 52, 53, 54)          \
  X(112, 56, 57, 58, 59, 60, 61, 62)         \
  X(128, 64, 65, 66, 67, 68, 69, 70)         \
  X(160, 80, 81, 82, 83, 84, 85, 86)         \
  X(176, 88, 89, 90, 91, 92, 93, 94)         \
  X(192, 96, 97, 98, 99, 100, 101, 102)      \
  X(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

namespace tessera {

#define TESSERA_WIDTH(n, ...) n,
inline constexpr int kWgmmaWidths[] = {TESSERA_WGMMA_WIDTHS(TESSERA_WIDTH)};
#undef TESSERA_WIDTH

}  // namespace tessera
