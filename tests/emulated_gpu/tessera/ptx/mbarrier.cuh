#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

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

}  // namespace tessera::ptx
