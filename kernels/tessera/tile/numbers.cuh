// Named constants; NVRTC lacks <numbers>.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

TESSERA_DEVICE float infinity() { return __int_as_float(0x7f800000); }

}  // namespace tessera
