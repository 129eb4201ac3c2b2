// Makes a list's entry for a tile of rows and a block of columns.
#pragma once

#include "tessera/attention/sequence.cuh"
#include "tessera/block_lists/config.hpp"

namespace tessera {

// True if the mask and the positions let some of the queries q0 ... q1 see some of the keys k0 ... k1. All of them lie
// in one block of the mask.
template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE bool sees_some(const ProblemParams& p, const Sequence& s, const char* mask, int q0, int q1, int k0,
                              int k1) {
  q1 = min(q1, s.sq - 1), k1 = min(k1, s.sk - 1);
  if (q0 > q1 || k0 > k1) return false;
  const KeyRange keys = visible_keys<kScore>(p, s, q0, q1).some;
  return keys.low <= k1 && k0 <= keys.high &&
         mask[p.block_mask.row * (q0 / p.mask_block_q) + p.block_mask.col * (k0 / p.mask_block_k)] != 0;
}

// Makes the entry of a tile's block. Returns false if no row sees any of it.
template <BlockListsConfig kCfg>
TESSERA_DEVICE bool list_entry(const BlockListsParams& p, const Sequence& s, const char* mask, int tile, int block,
                               int& entry) {
  constexpr int kRows = kCfg.rows / kListHalves;
  const int col0 = block * kCfg.cols, col1 = col0 + kCfg.cols - 1;
  entry = block << kListHalves;
  bool seen = false;
  for (int half = 0; half < kListHalves; ++half) {
    const int row0 = tile * kCfg.rows + half * kRows, row1 = row0 + kRows - 1;
    const bool sees =
        kCfg.transposed ? sees_some(p, s, mask, col0, col1, row0, row1) : sees_some(p, s, mask, row0, row1, col0, col1);
    if (!sees) entry |= 1 << half;
    seen |= sees;
  }
  return seen;
}

}  // namespace tessera
