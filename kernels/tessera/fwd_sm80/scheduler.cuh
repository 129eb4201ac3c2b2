// The tile schedulers: a thread block for each work tile, or persistent blocks, which process one work tile after
// another.
#pragma once

#include "tessera/attention/work_order.hpp"
#include "tessera/fwd_sm80/shared.cuh"

namespace tessera {

// A thread block's only work tile. Tiles of one head are neighbours, so that its keys and values are in the L2 cache;
// the last tile of a sequence comes first, because under a causal mask it sees the most keys.
TESSERA_DEVICE TileCoord single_tile(const FwdSm80Params& p) {
  const int index = static_cast<int>(blockIdx.x);
  return {index / p.tiles, index % p.tiles};
}

// The work tiles of a persistent block.
template <FwdSm80Config kCfg>
struct PersistentScheduler {
  BlockTiles tiles;
  TileCoord place;
  bool more;  // whether there is a work tile, at `place`

  TESSERA_DEVICE explicit PersistentScheduler(const FwdSm80Params& p)
      : tiles(p.order, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)) {
    find(p);
  }
  // Whether every block has at most one work tile.
  TESSERA_DEVICE static bool one_each(const FwdSm80Params& p) {
    return p.order.paired_heads == 0 && static_cast<int>(gridDim.x) >= work_tiles(p.order);
  }
  TESSERA_DEVICE void advance(const FwdSm80Params& p) {
    step(p);
    find(p);
  }
  // Clears the block's part of the rows that belong to no sequence, before its first work tile.
  TESSERA_DEVICE void clear_unowned(const FwdSm80Params& p) const {
    if (kCfg.split || !p.cu_seqlens_q) return;
    if (one_each(p)) {
      if (!more) clear_unowned_outputs_at<kCfg>(p, place, p.order.heads);
    } else if (blockIdx.y == 0) {
      clear_unowned_outputs<kCfg.dtype>(p, static_cast<int64>(blockIdx.x) * kCfg.warps + threadIdx.x / 32,
                                        static_cast<int64>(gridDim.x) * kCfg.warps);
    }
  }

 private:
  TESSERA_DEVICE void step(const FwdSm80Params& p) {
    tiles.advance(p.order, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
  // Finds the first index from here on that has rows: a packed batch has padded tile indices without rows.
  TESSERA_DEVICE void find(const FwdSm80Params& p) {
    for (; tiles.index < work_tiles(p.order); step(p)) {
      place = tile_coord(p.order, tiles.index);
      more = !p.cu_seqlens_q || FwdBlock<kCfg>(p, place).work.tile >= 0;
      if (more) return;
    }
    more = false;
  }
};

}  // namespace tessera
