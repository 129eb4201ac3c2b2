// In the place of the device's own: how functions are declared, and what NVRTC declares without a header.
#pragma once

#include <bit>
#include <cmath>

#include "tessera/types.hpp"
#include "warp.hpp"

#define TESSERA_DEVICE inline

inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
