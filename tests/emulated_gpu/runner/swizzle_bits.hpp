// The swizzle over 128 bytes (CU_TENSOR_MAP_SWIZZLE_128B), as bits of an address in shared memory.
#pragma once

#include <cstdint>

namespace tessera::emulated {

constexpr uint32_t swizzled_128b(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

}  // namespace tessera::emulated
