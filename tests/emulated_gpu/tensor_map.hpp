// The emulated GPU's content of the 128 bytes of a tensor map (CUtensorMap): the arguments of cuTensorMapEncodeTiled.
#pragma once

#include <cstdint>

struct alignas(64) EmulatedTensorMap {
  static constexpr uint32_t kMagic = 0x544d4150;
  static constexpr int kMaxRank = 5;

  uint32_t magic;
  int32_t type, swizzle;       // CUtensorMapDataType, CUtensorMapSwizzle
  uint32_t rank;               // 1 ... 5
  uint64_t address;            // of element 0
  uint32_t extents[kMaxRank];  // elements, the innermost dimension first; 1 beyond the rank
  uint16_t box[kMaxRank];      // elements, likewise; at most 256
  uint16_t element_bytes;
  uint64_t strides[kMaxRank - 1];  // in bytes, from the second dimension on
  uint8_t unused[128 - 88];
};
static_assert(sizeof(EmulatedTensorMap) == 128);
