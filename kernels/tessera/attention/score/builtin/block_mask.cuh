// A block mask: s = -inf where block_mask[b, h, i / block_q, j / block_k] is 0. Kernels that use lists of blocks
// (block_lists/kernel.cuh) skip the hidden blocks instead.
#pragma once

#include "tessera/attention/score/element.cuh"

namespace tessera {

template <ScoreConfig kCfg>
struct BlockMask : ScoreOptionDefaults<BlockMask<kCfg>, kBlockMaskFacts> {
  static constexpr bool kGiven = kCfg.block_mask;

  struct Row {
    const char* block_mask;  // of key 0

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& place) {
      block_mask = static_cast<const char*>(p.block_mask.data) + p.block_mask.batch * place.batch +
                   p.block_mask.head * place.head + p.block_mask.row * (place.query / p.mask_block_q);
    }
  };

  template <class ScoreEntry>
  TESSERA_DEVICE static void load_entry(ScoreEntry& entry, const ProblemParams& p, const Row& row, int key) {
    entry.visible &= row.block_mask[p.block_mask.col * (key / p.mask_block_k)] != 0;
  }
};

}  // namespace tessera
