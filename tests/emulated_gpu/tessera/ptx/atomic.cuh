// One thread runs at a time, so these functions only need to let other threads run in between.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void red_add_f32(float* global, float x) { *global += x; }
inline void red_add_u64(unsigned long long* global, unsigned long long x) { *global += x; }
inline void red_or_b32(uint32* global, uint32 x) { *global |= x; }
inline void red_add_v4_f32(float* global, const float (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) emulated::here().fail("red.v4 at %p", static_cast<void*>(global));
  for (int n = 0; n < 4; ++n) global[n] += x[n];
}
inline void red_release_add_s32(int* global, int x) {
  *global += x;
  emulated::here().may_yield_block();
}
// A thread that reads a known value again waits until it has changed.
inline int ld_acquire_s32(const int* global) {
  emulated::Block::Thread& thread = emulated::here().thread();
  if (thread.acquired == global && thread.acquired_value == *global) {
    emulated::here().wait({.kind = emulated::Wait::Kind::kMemory, .value = *global, .word = global});
  }
  thread.acquired = global;
  return thread.acquired_value = *global;
}
inline unsigned long long atom_acq_rel_add_u64(unsigned long long* global, unsigned long long x) {
  emulated::here().may_yield_block();
  const unsigned long long before = *global;
  *global += x;
  return before;
}
inline unsigned long long atom_acq_rel_cas_u64(unsigned long long* global, unsigned long long expected,
                                               unsigned long long desired) {
  emulated::here().may_yield_block();
  const unsigned long long before = *global;
  if (before == expected) *global = desired;
  return before;
}

}  // namespace tessera::ptx
