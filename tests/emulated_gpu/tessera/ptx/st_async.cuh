#pragma once

#include "tessera/ptx/cp_async_bulk.cuh"

namespace tessera::ptx {

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
