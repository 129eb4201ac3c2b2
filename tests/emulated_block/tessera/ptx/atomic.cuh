#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void red_add_f32(float* global, float x) { *global += x; }
inline void red_release_add_s32(int* global, int x) { *global += x; }
inline int ld_acquire_s32(const int* global) { return *global; }

}  // namespace tessera::ptx
