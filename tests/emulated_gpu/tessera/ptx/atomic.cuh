#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void red_add_f32(float* global, float x) { *global += x; }
inline void red_release_add_s32(int* global, int x) { *global += x; }
inline int ld_acquire_s32(const int* global) { return *global; }
inline unsigned long long atom_acq_rel_add_u64(unsigned long long* global, unsigned long long x) {
  const unsigned long long before = *global;
  *global += x;
  return before;
}
inline unsigned long long atom_acq_rel_cas_u64(unsigned long long* global, unsigned long long expected,
                                               unsigned long long desired) {
  const unsigned long long before = *global;
  if (before == expected) *global = desired;
  return before;
}

}  // namespace tessera::ptx
