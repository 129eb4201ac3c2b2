// A ring of stages between a producer and its consumers.
#pragma once

#include "tessera/ptx/synchronization.cuh"

namespace tessera {

struct alignas(8) Barrier {
  unsigned long long state;
  TESSERA_DEVICE uint32 address() const { return shared_address(&state); }
};

// A position in a ring of stages: the next stage, and the parity of its barrier's phase.
template <int kStages>
struct RingPosition {
  static constexpr int kStep = sizeof(Barrier), kEnd = kStages * kStep;
  int offset = 0;  // bytes from the first stage's barrier to this one's; saves an instruction over the stage's index
  int parity = 0;

  TESSERA_DEVICE int stage() const { return static_cast<int>(static_cast<uint32>(offset) / kStep); }

  TESSERA_DEVICE void advance() {
    if constexpr (kStages == 1) {
      parity ^= 1;
    } else if constexpr (kStages == 2) {
      parity ^= stage();
      offset ^= kStep;
    } else if ((offset += kStep) == kEnd) {
      offset = 0, parity ^= 1;
    }
  }
  // Advances by several stages, at most kStages.
  TESSERA_DEVICE void advance(int stages) {
    offset += stages * kStep;
    if (offset >= kEnd) offset -= kEnd, parity ^= 1;
  }
};

// full: the producers' arrivals and the bytes of the copies. empty: one arrival of each consumer warp.
//
// With kBlocks == 2 the blocks of a cluster hold the same tiles in the same stages. Each producer copies its part of a
// tile to both blocks, and a stage is empty once the consumers of both have released it. The other producer's part may
// arrive before this producer expects it, but not before its phase: it is issued after this block's consumers have
// released the stage, hence after the last phase of `full`, and the next phase cannot complete without this producer's
// arrival (until then, the byte count may be below 0).
template <int kStages, int kBlocks = 1>
struct Ring {
  static_assert(kBlocks == 1 || kBlocks == 2);
  Barrier full[kStages], empty[kStages];

  TESSERA_DEVICE static uint32 address(const Barrier (&barriers)[kStages], const RingPosition<kStages>& at) {
    return barriers[0].address() + at.offset;
  }

  TESSERA_DEVICE void init(int consumer_warps, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full[stage].address(), producers);
      ptx::mbarrier_init(empty[stage].address(), consumer_warps * kBlocks);
    }
  }
  // Producer: waits until the stage is free and announces its bytes. In the first round every stage is free.
  TESSERA_DEVICE void acquire(const RingPosition<kStages>& at, int bytes) {
    wait_empty(at);
    expect(at, bytes);
  }
  // The second half of acquire(), for a producer that has already waited.
  TESSERA_DEVICE void expect(const RingPosition<kStages>& at, int bytes) {
    ptx::mbarrier_arrive_expect_tx(address(full, at), bytes);
  }
  TESSERA_DEVICE void wait_empty(const RingPosition<kStages>& at) {
    ptx::mbarrier_wait_parity(address(empty, at), at.parity ^ 1);
  }
  TESSERA_DEVICE void wait_full(const RingPosition<kStages>& at) {
    ptx::mbarrier_wait_parity(address(full, at), at.parity);
  }
  // Consumer: this thread releases the stage on behalf of its warp.
  TESSERA_DEVICE void release_alone(const RingPosition<kStages>& at) { ptx::mbarrier_arrive(address(empty, at)); }
  // Consumer: the warp releases the stage.
  TESSERA_DEVICE void release(const RingPosition<kStages>& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      const uint32 barrier = address(empty, at);
      ptx::mbarrier_arrive(barrier);
      if constexpr (kBlocks > 1) ptx::mbarrier_arrive_shared_cluster(ptx::mapa(barrier, ptx::cluster_ctarank() ^ 1));
    }
  }
};

}  // namespace tessera
