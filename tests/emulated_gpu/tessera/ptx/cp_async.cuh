#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void cp_async_cg_16(uint32 shared, const void* global, int source_bytes) {
  char bytes[16] = {};
  if (source_bytes > 0) std::memcpy(bytes, global, static_cast<size_t>(source_bytes));
  std::memcpy(shared_memory + shared, bytes, sizeof bytes);
}
inline void cp_async_cg_16_l2_128b(uint32 shared, const void* global, int source_bytes) {
  cp_async_cg_16(shared, global, source_bytes);
}
inline void cp_async_commit_group() {}
template <int kPending>
void cp_async_wait_group() {}
inline void cp_async_wait_all() {}

}  // namespace tessera::ptx
