// What a persistent block of fwd_sm80_persistent and fwd_sm80_pairs works on.
#pragma once

#include "tessera/attention/work_order.hpp"
#include "tessera/fwd_sm80/block.cuh"

namespace tessera {

// The works of a persistent block, one after another.
template <FwdConfig kCfg>
struct PersistentScheduler {
  BlockTiles works;
  TileCoord place;
  bool more;  // there is one at `place`

  TESSERA_DEVICE explicit PersistentScheduler(const FwdParams& p)
      : works(p.order, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)) {
    find(p);
  }
  // Every block has one at most.
  TESSERA_DEVICE static bool one_each(const FwdParams& p) {
    return p.order.paired_heads == 0 && static_cast<int>(gridDim.x) >= work_tiles(p.order);
  }
  TESSERA_DEVICE void advance(const FwdParams& p) {
    step(p);
    find(p);
  }
  // The block's share of the rows that belong to no sequence. Before its first work.
  TESSERA_DEVICE void clear_unowned(const FwdParams& p) const {
    if (kCfg.split || !p.cu_seqlens_q) return;
    if (one_each(p)) {
      if (!more) clear_unowned_outputs_at<kCfg>(p, place, p.order.heads);
    } else if (blockIdx.y == 0) {
      clear_unowned_outputs<kCfg.dtype>(p, static_cast<int64>(blockIdx.x) * kCfg.warps + threadIdx.x / 32,
                                        static_cast<int64>(gridDim.x) * kCfg.warps);
    }
  }

 private:
  TESSERA_DEVICE void step(const FwdParams& p) {
    works.advance(p.order, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
  // From here on the first that is one: a packed batch has slots without rows.
  TESSERA_DEVICE void find(const FwdParams& p) {
    for (; works.index < work_tiles(p.order); step(p)) {
      place = tile_coord(p.order, works.index);
      more = !p.cu_seqlens_q || FwdBlock<kCfg>(p, place).work.tile >= 0;
      if (more) return;
    }
    more = false;
  }
};

}  // namespace tessera
