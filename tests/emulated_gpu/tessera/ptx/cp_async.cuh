#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void cp_async_cg_16(uint32 shared, const void* global, int source_bytes) {
  emulated::here().copy_elements(shared, global, source_bytes);
}
inline void cp_async_cg_16_l2_128b(uint32 shared, const void* global, int source_bytes) {
  cp_async_cg_16(shared, global, source_bytes);
}
inline void cp_async_cg_16_l2_128b(uint32 shared, const void* global) { cp_async_cg_16(shared, global, 16); }
inline void cp_async_commit_group() { emulated::here().commit_elements(); }
template <int kPending>
void cp_async_wait_group() {
  emulated::here().wait_elements(kPending);
}
inline void cp_async_wait_all() { emulated::here().wait_all_elements(); }

}  // namespace tessera::ptx
