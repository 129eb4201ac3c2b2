// Which head and sequence a block works on.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera {

struct SequenceHead {
  int batch, head;
};

// Which of the batch's heads comes at `index`; packed: which head. Of one sequence they share a mask, as a rule, and keys.
// But where all sequences share a bias (or mask) of which every head has its own, one head of all of them comes first: its
// bias comes from memory once, and for the other sequences' tiles they are in the L2 cache.
template <ScoreConfig kScore, class Heads>
TESSERA_DEVICE SequenceHead sequence_head(const ProblemParams& p, int index, const Heads& heads) {
  if (kScore.bias_or_mask() && p.head_by_head) return {index % p.batch, index / p.batch};
  return {index / heads, index % heads};
}

}  // namespace tessera
