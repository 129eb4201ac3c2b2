// What changes a score between the product q . k and its exponential.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// What is done to a score beside scale and causal, window and length, which every kernel has.
struct ScoreConfig {
  bool softcap;
  bool bias;
  Dtype bias_dtype;
  bool alibi;
  bool mask;
  bool block_mask;
  bool dropout;
  bool
      dropout_state;  // its seed and offset are read when the kernel runs, so that each replay of a CUDA graph draws anew
  bool scale_first;  // scale <= 0: the largest product is not the largest score
  bool causal_seqs;  // causal is each sequence's own: attention/mask
  bool tree_mask;    // attention/tree_mask

  TESSERA_HOST_DEVICE constexpr bool any() const {
    return softcap || bias || alibi || mask || block_mask || dropout || scale_first;
  }
  // A tensor has a value for each score, or for each block of them.
  TESSERA_HOST_DEVICE constexpr bool bias_or_mask() const { return bias || mask || block_mask; }
  // Whether entries of a tile of `keys` keys are read as eight neighbours, for which the keys stand in lane order
  // (tile/shared_tile.cuh). A call of Philox has the keys of the other order.
  TESSERA_HOST_DEVICE constexpr bool lane_order(int keys) const {
    return bias_or_mask() && !block_mask && !dropout && keys % 32 == 0;
  }
  // Whether a tile may be exponentiated against the max of the tiles before (attention/softmax): slopes, biases and masks may raise a
  // row's scores from tile to tile, so that each tile would be done twice.
  TESSERA_HOST_DEVICE constexpr bool stale_max() const { return !alibi && !bias_or_mask(); }
  // Something is added to a score.
  TESSERA_HOST_DEVICE constexpr bool adds() const { return bias || alibi; }
  // Scores are changed before they are exponentiated, not scaled by the same instruction.
  TESSERA_HOST_DEVICE constexpr bool scaled() const { return softcap || adds() || scale_first; }
};
TESSERA_CONFIG_FIELDS(ScoreConfig, softcap, bias, bias_dtype, alibi, mask, block_mask, dropout, dropout_state,
                      scale_first, causal_seqs, tree_mask)

}  // namespace tessera
