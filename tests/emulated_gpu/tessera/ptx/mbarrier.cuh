#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// In the barrier's 8 bytes. A phase ends when all arrivals and all bytes are there.
struct EmulatedBarrier {
  signed char arrivals, left;
  unsigned short phase;
  int bytes;

  static EmulatedBarrier& at(uint32 shared) { return *reinterpret_cast<EmulatedBarrier*>(shared_memory + shared); }
  void end_phase() {
    if (left == 0 && bytes == 0) left = arrivals, ++phase;
  }
};
static_assert(sizeof(EmulatedBarrier) == 8);

inline void mbarrier_init(uint32 barrier, int arrivals) {
  const auto count = static_cast<signed char>(arrivals);
  EmulatedBarrier::at(barrier) = {count, count, 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32 barrier) {
  --EmulatedBarrier::at(barrier).left;
  EmulatedBarrier::at(barrier).end_phase();
}
inline void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  EmulatedBarrier::at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}
inline void mbarrier_expect_tx(uint32 barrier, int bytes) { EmulatedBarrier::at(barrier).bytes += bytes; }
inline void mbarrier_wait_parity(uint32 barrier, int parity) {
  while (EmulatedBarrier::at(barrier).phase % 2 == parity) emulated::Block::current()->yield();
}
inline void mbarrier_arrive_shared_cluster(uint32 barrier) { mbarrier_arrive(barrier); }

}  // namespace tessera::ptx
