// In the place of the device's own: the instructions' results, exactly rounded.
#pragma once

#include <limits>

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}

inline float rcp_approx_ftz(float x) { return 1.0f / x; }

}  // namespace tessera::ptx
