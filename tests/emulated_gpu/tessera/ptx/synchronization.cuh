#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void barrier_sync(int barrier, int threads) {
  emulated::here().named_barrier("bar.sync", barrier, threads, true);
}
inline void barrier_arrive(int barrier, int threads) {
  emulated::here().named_barrier("bar.arrive", barrier, threads, false);
}

inline void mbarrier_init(uint32 barrier, int arrivals) {
  emulated::Block& block = emulated::here();
  if (arrivals < 1 || arrivals > emulated::Mbarrier::kMostArrivals)
    block.fail("mbarrier.init of %d arrivals", arrivals);
  const emulated::Mbarrier fresh(arrivals);
  std::memcpy(block.own_shared(barrier, sizeof fresh, sizeof fresh), &fresh, sizeof fresh);
}
inline void fence_mbarrier_init() {}

// Fails with the error and the barrier's state.
inline void emulated_check(uint32 barrier, const emulated::Mbarrier& at, const char* wrong) {
  if (*wrong) emulated::here().fail("mbarrier 0x%x (%s): %s", barrier, at.text().c_str(), wrong);
}
inline void reconverge_warp() { __syncwarp(); }
inline void mbarrier_arrive(uint32 barrier) {
  emulated::Mbarrier& at = emulated::here().own_mbarrier(barrier);
  emulated_check(barrier, at, at.arrive());
  emulated::here().thread().tried = nullptr;
  emulated::here().may_yield();
}
inline void mbarrier_arrive_shared_cluster(uint32 barrier) {
  emulated::Mbarrier& at = emulated::here().cluster_mbarrier(barrier);
  emulated_check(barrier, at, at.arrive());
  emulated::here().may_yield();
}
inline void mbarrier_expect_tx(uint32 barrier, int bytes) {
  emulated::Mbarrier& at = emulated::here().own_mbarrier(barrier);
  emulated_check(barrier, at, at.expect(bytes));
}
inline void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  mbarrier_expect_tx(barrier, bytes);
  mbarrier_arrive(barrier);
}
inline void mbarrier_wait_parity(uint32 barrier, int parity) {
  const emulated::Mbarrier& at = emulated::here().own_mbarrier(barrier);
  emulated::Wait wait{.kind = emulated::Wait::Kind::kMbarrier, .number = barrier, .value = parity, .mbarrier = &at};
  // Two phases may have completed before the thread runs again: a GPU might then wait for ever.
  do {
    emulated::here().wait(wait);
  } while (!wait.over());
}
// A thread that tests a known state again waits until it has changed.
inline bool mbarrier_try_wait_parity(uint32 barrier, int parity) {
  const emulated::Mbarrier& at = emulated::here().own_mbarrier(barrier);
  emulated::Block::Thread& thread = emulated::here().thread();
  if (at.parity() == parity && thread.tried == &at) mbarrier_wait_parity(barrier, parity);
  const bool done = at.parity() != parity;
  thread.tried = done ? nullptr : &at;
  return done;
}

inline uint32 cluster_ctarank() { return static_cast<uint32>(emulated::here().rank()); }
inline uint32 mapa(uint32 shared, uint32 rank) {
  if (shared >> emulated::kRankShift != 0) emulated::here().fail("mapa of 0x%x, which is of the cluster", shared);
  if (rank >= emulated::here().cluster().blocks.size()) emulated::here().fail("mapa of rank %u", rank);
  return emulated::in_block(shared, static_cast<int>(rank));
}
inline void st_shared_cluster_s32(uint32 cluster_address, int x) {
  std::memcpy(emulated::here().cluster_shared(cluster_address, sizeof x, sizeof x), &x, sizeof x);
}
template <class T>
T emulated_ld_shared_cluster(uint32 cluster_address) {
  T x;
  std::memcpy(static_cast<void*>(&x), emulated::here().cluster_shared(cluster_address, sizeof x, sizeof x), sizeof x);
  return x;
}
inline float2 ld_shared_cluster_f32x2(uint32 cluster_address) {
  return emulated_ld_shared_cluster<float2>(cluster_address);
}
inline float4 ld_shared_cluster_f32x4(uint32 cluster_address) {
  return emulated_ld_shared_cluster<float4>(cluster_address);
}

// Executed by a warp together.
inline void barrier_cluster_arrive() {
  emulated::Block& block = emulated::here();
  block.sync_warp("barrier.cluster.arrive");
  block.thread().cluster_phase = block.cluster().phase;
  block.cluster().arrive();
}
inline void fence_release_shared_cluster() {}
inline void barrier_cluster_arrive_relaxed() { barrier_cluster_arrive(); }
inline void barrier_cluster_wait() {
  emulated::Block& block = emulated::here();
  block.wait({.kind = emulated::Wait::Kind::kCluster,
              .value = static_cast<int64>(block.thread().cluster_phase),
              .counter = &block.cluster().phase});
  block.sync_warp("barrier.cluster.wait");
}

inline void griddepcontrol_wait() {
  if (!emulated_dependency) return;
  emulated::here().wait({.kind = emulated::Wait::Kind::kMemory, .value = 1, .word = emulated_dependency()});
}
inline void griddepcontrol_launch_dependents() {}

// One thread runs at a time, so these functions only need to let other threads run in between.

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
