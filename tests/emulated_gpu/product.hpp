// A product by wgmma, and a thread's position in its warpgroup.
#pragma once

#include <cstdint>

namespace tessera::emulated {

inline constexpr int kWarpgroupThreads = 128, kProductRows = 64, kMostProductInner = 32, kMostProductCols = 256;

// The operands, equal for all threads of the warpgroup.
struct Product {
  uint64_t a = 0, b = 0;  // descriptors; a: if A is in shared memory
  int cols = 0;
  bool a_in_registers = false, b_transposed = false, bfloat16 = false, accumulate = false;
  bool e4m3 = false;  // 8-bit elements; otherwise of 16 bits
  int inner() const { return e4m3 ? 32 : 16; }
  bool operator==(const Product&) const = default;
};

// A thread's position: the number of products that it has issued, and had issued when it committed its newest groups.
struct ProductPosition {
  uint64_t issued = 0, committed[8] = {};
  unsigned groups = 0;
};

}  // namespace tessera::emulated
