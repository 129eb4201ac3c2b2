// A place in a ring of stages: which stage is next, and the parity of its barrier's phase.
#pragma once

#include "tessera/ptx/mbarrier.cuh"

namespace tessera {

struct alignas(8) Barrier {
  unsigned long long state;
  TESSERA_DEVICE uint32 address() const { return shared_address(&state); }
};

template <int kStages>
struct RingPosition {
  static constexpr int kStep = sizeof(Barrier), kEnd = kStages * kStep;
  int offset = 0;  // bytes from the first stage's barrier to this one's, one instruction less than its number
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
  // By several, at most kStages.
  TESSERA_DEVICE void advance(int stages) {
    offset += stages * kStep;
    if (offset >= kEnd) offset -= kEnd, parity ^= 1;
  }
};

}  // namespace tessera
