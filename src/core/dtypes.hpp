// Kinds of dtypes.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

constexpr bool is_float8(int32_t dtype) { return dtype == TESSERA_FLOAT8_E4M3 || dtype == TESSERA_FLOAT8_E5M2; }

// The formats of 8 bits that tensors may have, int8 included.
constexpr bool is_8bit(int32_t dtype) { return is_float8(dtype) || dtype == TESSERA_INT8; }

}  // namespace tessera::core
