// Q's stages of one consumer. Each has its own, the first ones one more where they do not come out even. Of a stage that went from
// consumer to consumer, the next one might wait for its own phase while the last one's Q has not arrived: two phases ahead of the
// barrier, whose parity then answers at once.
#pragma once

#include "tessera/fwd_sm90/config.hpp"
#include "tessera/tile/ring_position.cuh"

namespace tessera {

template <FwdSm90Config kCfg>
struct QStages {
  using Position = RingPosition<kCfg.q_stages>;
  static constexpr int kFew = kCfg.q_stages / kCfg.consumers, kWithMore = kCfg.q_stages % kCfg.consumers;
  static_assert(kFew > 0, "a stage for each consumer");

  int first, count;

  TESSERA_DEVICE explicit QStages(int consumer)
      : first(consumer * kFew + min(consumer, kWithMore)), count(kFew + (consumer < kWithMore ? 1 : 0)) {}

  // That of the n-th work tile of this block.
  TESSERA_DEVICE Position of(int n) const {
    Position at;
    at.offset = (first + n % count) * Position::kStep, at.parity = n / count % 2;
    return at;
  }
  TESSERA_DEVICE void advance(Position& at) const {
    at.offset += Position::kStep;
    if (at.offset == (first + count) * Position::kStep) at.offset = first * Position::kStep, at.parity ^= 1;
  }
};

}  // namespace tessera
