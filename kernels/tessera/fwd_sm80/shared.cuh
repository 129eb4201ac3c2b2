// A work tile of the forward kernels by mma.sync: some query rows of one head, or with packed GQA of all query heads of
// a KV head, and the tiles of keys that they see; and a block's shared memory.
#pragma once

#include "tessera/attention/score/options.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/fwd_sm80/config.hpp"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

struct WorkTileIndex {
  int batch, head, split;
  int tile;  // index within the sequence; -1: none, because there are fewer tiles than blocks
};

// Decodes a work tile's index: place -> (batch, head, split, tile of block_m rows); place.head counts (batch, head,
// split).
template <int kBlockM, bool kSplit, ScoreConfig kScore>
TESSERA_DEVICE WorkTileIndex query_tile(const FwdSm80Params& p, TileCoord place, const Divisor& heads,
                                        int rows_a_query) {
  WorkTileIndex w;
  int rest = place.head;
  w.split = 0;
  if constexpr (kSplit) w.split = rest % p.num_splits, rest /= p.num_splits;
  const SequenceHead of = sequence_head<kScore>(p, rest, heads);
  w.batch = of.batch, w.head = of.head;
  const int slot = place.slot;
  int tile = slot;
  if (p.cu_seqlens_q) {
    w.batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows_a_query, slot);
    tile = tile_at_slot<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows_a_query, slot, w.batch);
  }
  const Sequence s = load_sequence(p, w.batch);
  const int tiles = static_cast<int>((static_cast<int64>(s.sq) * rows_a_query + kBlockM - 1) / kBlockM);
  w.tile = tiles - 1 - tile;
  return w;
}

// Clears rows of no sequence (attention/unowned_rows.cuh), in a grid with a block for each padded tile index. The
// blocks whose indices come after the last sequence's do it; there is always one. If keys are split, the kernel that
// merges the splits does it instead.
template <FwdSm80Config kCfg>
TESSERA_DEVICE void clear_unowned_outputs_at(const FwdSm80Params& p, TileCoord place, int heads) {
  if (kCfg.split || !p.cu_seqlens_q || blockIdx.y != 0) return;
  const int first = slot_begin<kCfg.block_m>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q,
                                             kCfg.pack_gqa ? p.group : 1, p.batch);
  const int slots = p.tiles - first;
  if (place.slot < first) return;
  const int64 block = static_cast<int64>(place.head) * slots + place.slot - first;
  clear_unowned_outputs<kCfg.dtype>(p, block * kCfg.warps + static_cast<int>(threadIdx.x) / 32,
                                    static_cast<int64>(heads) * slots * kCfg.warps);
}

// Row r of a sequence: query r of the block's head or, with packed GQA, query r / group of head r % group of the KV
// head's query heads, so that a tile's queries are neighbours and see nearly the same keys.
template <FwdSm80Config kCfg>
struct QueryRows {
  int rows;  // of the sequence
  int group, head0;

  TESSERA_DEVICE QueryRows(const ProblemParams& p, const Sequence& s, int head_slot)
      : rows(kCfg.pack_gqa ? s.sq * p.group : s.sq),
        group(p.group),
        head0(kCfg.pack_gqa ? head_slot * p.group : head_slot) {}
  TESSERA_DEVICE int query(int row) const { return kCfg.pack_gqa ? row / group : row; }
  TESSERA_DEVICE int head(int row) const { return kCfg.pack_gqa ? head0 + row % group : head0; }
};

// A block's tile of query rows, and the tiles of keys that they see.
template <FwdSm80Config kCfg>
struct FwdBlock {
  static constexpr bool kPersistent = persistent(kCfg);  // keeps this struct in shared memory
  WorkTileIndex work;                                    // work.tile < 0: no work tile, and no other member is valid
  Sequence s;
  QueryRows<kCfg> map;
  int head_kv;
  int row0, count;    // rows of the sequence
  TileRange visible;  // keys
  int first, last;    // [first, last), tiles of block_n keys
  // Columns of V: if registers cannot hold all columns, each slice of them has a block of its own.
  int dv_begin, dv_count;

  TESSERA_DEVICE FwdBlock(const FwdSm80Params& p, TileCoord place)
      : work(query_tile<kCfg.block_m, kCfg.split, kCfg.score>(p, place, kCfg.pack_gqa ? p.heads_kv : p.heads_q,
                                                              kCfg.pack_gqa ? p.group : 1)),
        s(kPersistent ? load_sequence<true, kCfg.paged, kCfg.score>(p, work.batch)
                      : uniform<kCfg.score>(load_sequence<true, kCfg.paged, kCfg.score>(p, work.batch))),
        map(p, s, work.head),
        head_kv(kCfg.pack_gqa ? work.head : work.head / p.group),
        row0(work.tile * kCfg.block_m),
        count(min(map.rows - row0, kCfg.block_m)),
        visible(ScoreOptions<kCfg.score>::range(p, s, map.query(row0), map.query(row0 + count - 1))),
        dv_begin(static_cast<int>(blockIdx.y) * kCfg.head_dim_v),
        dv_count(min(p.head_dim_v - dv_begin, kCfg.head_dim_v)) {
    const int begin = max(max(visible.some.low, 0), kCfg.split ? work.split * p.split_keys : 0);
    const int end = min(visible.some.high + 1, kCfg.split ? (work.split + 1) * p.split_keys : s.sk);
    first = begin / kCfg.block_n, last = (end + kCfg.block_n - 1) / kCfg.block_n;
    // A window may end before this split's keys or begin after them. The kernels process one tile all the same; this
    // must be one that no row sees.
    if (kCfg.split && last <= first) first = last = (s.sk + kCfg.block_n - 1) / kCfg.block_n;
  }

  // The keys that rows first ... of the block see; a row past the last counts as the last.
  TESSERA_DEVICE TileRange seen_by(const FwdSm80Params& p, int first, int rows) const {
    const auto query = [&](int row) { return map.query(row0 + min(row, count - 1)); };
    return ScoreOptions<kCfg.score>::range(p, s, query(first), query(first + rows - 1));
  }
};

// The tiles of keys that a block visits, in order: number first ... last - 1. With the lists of a program's mask, the
// tiles of the work tile's list; otherwise all that are visible by position.
template <FwdSm80Config kCfg>
struct KeyTiles {
  int first, last;
  TESSERA_DEVICE KeyTiles(const FwdSm80Params&, const FwdBlock<kCfg>& b) : first(b.first), last(b.last) {}
  TESSERA_DEVICE static constexpr int tile(int n) { return n; }
  TESSERA_DEVICE static constexpr bool is_full(int) { return false; }
};
template <FwdSm80Config kCfg>
requires(kCfg.score.program) struct KeyTiles<kCfg> {
  int first, last;
  const int* entries = nullptr;  // NULL: tile n is number n
  TESSERA_DEVICE KeyTiles(const FwdSm80Params& p, const FwdBlock<kCfg>& b) : first(b.first), last(b.last) {
    if (!p.lists.words) return;
    int tile = b.work.tile;
    if (p.cu_seqlens_q) {
      tile += slot_begin<kCfg.block_m>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, b.work.batch);
    }
    const ListHead list = list_head<true>(p.lists, p.lists.at(b.work.batch, b.work.head, tile));
    if (list.count == kListNotMade) return;
    first = 0, last = list.count, entries = list.entries;
  }
  TESSERA_DEVICE int tile(int n) const { return entries ? list_block<true>(entries[n]) : n; }
  // Whether the program's mask shows all rows all keys of the tile.
  TESSERA_DEVICE bool is_full(int n) const {
    return entries && list_is_full(entries[n], 0) && list_is_full(entries[n], 1);
  }
};

template <FwdSm80Config kCfg>
struct FwdSharedMemory {
  union {
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ;
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sO;  // valid once the last product with Q is done
  };
  static constexpr bool kLaneOrder = kCfg.score.lane_order(kCfg.block_n);
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim, kLaneOrder> sK[kCfg.stages];
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v, kLaneOrder> sV[kCfg.stages];
};

// Members follow one another without padding, so their sizes give their offsets.
template <FwdSm80Config kCfg, class Shared>
TESSERA_DEVICE constexpr bool has_fwd_layout() {
  constexpr FwdSm80Layout kAt = fwd_sm80_layout(kCfg);
  return sizeof(Shared) == kAt.bytes && sizeof(Shared::sQ) <= kAt.k;
}

}  // namespace tessera
