#pragma once

#include "tessera/ptx/synchronization.cuh"

namespace tessera::ptx {

inline void cp_async_cg_16(uint32 shared, const void* global, int source_bytes) {
  emulated::here().copy_elements(shared, global, source_bytes, 16);
}
inline void cp_async_ca_4(uint32 shared, const void* global) { emulated::here().copy_elements(shared, global, 4, 4); }
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

// copies.hpp implements the copies.

inline emulated::AsyncCopy emulated_box(emulated::AsyncCopy::Kind kind, const TensorMap* map, int c0, int c1, int c2,
                                        int c3) {
  emulated::AsyncCopy copy{.kind = kind, .at = {c0, c1, c2, c3}};
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) {
    emulated::here().fail("a tensor map at %p", static_cast<const void*>(map));
  }
  std::memcpy(static_cast<void*>(&copy.map), map, sizeof copy.map);
  return copy;
}
// Sizes and addresses must be multiples of 16.
inline emulated::AsyncCopy emulated_bytes(emulated::AsyncCopy::Kind kind, const void* global, int bytes) {
  if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulated::here().fail("a bulk copy of %d bytes at %p", bytes, global);
  }
  return {.kind = kind, .global = const_cast<void*>(global), .bytes = bytes};
}

inline void cp_async_bulk_tensor_4d(uint32 shared, const TensorMap* map, uint32 barrier, int c0, int c1, int c2,
                                    int c3) {
  emulated::AsyncCopy copy = emulated_box(emulated::AsyncCopy::Kind::kLoadBox, map, c0, c1, c2, c3);
  copy.to = shared, copy.barrier = barrier;
  emulated::here().start_load(copy);
}
inline void cp_async_bulk_tensor_4d_multicast(uint32 shared, const TensorMap* map, uint32 barrier, int c0, int c1,
                                              int c2, int c3, unsigned short blocks) {
  emulated::AsyncCopy copy = emulated_box(emulated::AsyncCopy::Kind::kLoadBox, map, c0, c1, c2, c3);
  copy.to = shared, copy.barrier = barrier, copy.blocks = blocks;
  emulated::here().start_load(copy);
}
inline void cp_async_bulk_tensor_store_4d(const TensorMap* map, uint32 shared, int c0, int c1, int c2, int c3) {
  emulated::AsyncCopy copy = emulated_box(emulated::AsyncCopy::Kind::kStoreBox, map, c0, c1, c2, c3);
  copy.from = shared;
  emulated::here().start_store(copy);
}
inline void cp_async_bulk_load(uint32 shared, const void* global, int bytes, uint32 barrier) {
  emulated::AsyncCopy copy = emulated_bytes(emulated::AsyncCopy::Kind::kLoad, global, bytes);
  copy.to = shared, copy.barrier = barrier;
  emulated::here().start_load(copy);
}
inline void cp_async_bulk_store(float* global, uint32 shared, int bytes) {
  emulated::AsyncCopy copy = emulated_bytes(emulated::AsyncCopy::Kind::kStore, global, bytes);
  copy.from = shared;
  emulated::here().start_store(copy);
}
inline void cp_reduce_async_bulk_add_f32(float* global, uint32 shared, int bytes) {
  emulated::AsyncCopy copy = emulated_bytes(emulated::AsyncCopy::Kind::kAddFloats, global, bytes);
  copy.from = shared;
  emulated::here().start_store(copy);
}
inline void cp_async_bulk_commit_group() { emulated::here().commit_stores(); }
inline void cp_async_bulk_wait_group_read() { emulated::here().wait_stores(true); }
inline void cp_async_bulk_wait_group() { emulated::here().wait_stores(false); }
inline void prefetch_tensormap(const TensorMap*) {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}

inline void emulated_same_block(uint32 to, uint32 barrier) {
  if (to >> emulated::kRankShift != barrier >> emulated::kRankShift) {
    emulated::here().fail("data for 0x%x, a barrier at 0x%x: of two blocks", to, barrier);
  }
}
inline void st_async_v4_b32(uint32 shared, const uint32 (&x)[4], uint32 barrier) {
  emulated_same_block(shared, barrier);
  emulated::AsyncCopy copy{
      .kind = emulated::AsyncCopy::Kind::kSendWords, .to = shared, .barrier = barrier, .bytes = 16};
  std::memcpy(copy.words, x, sizeof copy.words);
  emulated::here().start_load(copy);
}
inline void cp_async_bulk_shared_cluster(uint32 to, uint32 from, int bytes, uint32 barrier) {
  emulated_same_block(to, barrier);
  emulated::AsyncCopy copy = emulated_bytes(emulated::AsyncCopy::Kind::kSendShared, nullptr, bytes);
  copy.to = to, copy.from = from, copy.barrier = barrier;
  emulated::here().start_load(copy);
}

}  // namespace tessera::ptx
