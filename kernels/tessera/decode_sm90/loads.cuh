// A warp's ring of tiles of K and V: filled by the warp itself, `stages` tiles ahead of its products and across the work tiles of
// its block's share, so that no barrier and no merge stops the reading. A tile of K and one of V are groups of copies of their
// own: K's place is filled again as soon as the scores are there. A page's entry is loaded one tile before its rows are.
#pragma once

#include "tessera/decode_sm90/schedule.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/product.cuh"
#include "tessera/tile/shared_tile.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// As TMA fills it.
template <Dtype kDtype, int kTileRows, int kTileCols>
struct DecodeTmaTile : SwizzledTile<kTileRows, kTileCols> {
  static constexpr Dtype kType = kDtype;
  static constexpr int kElemBytes = dtype_bytes(kDtype);
  TESSERA_DEVICE uint32 at(int row, int col) const {
    return SwizzledTile<kTileRows, kTileCols>::at(shared_address(this->data), row, col);
  }
};

template <DecodeSm90Config kCfg, bool kBulk = kCfg.bulk>
struct DecodeStage {
  using Tile = SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim>;
  Tile sK, sV;
};
template <DecodeSm90Config kCfg>
struct DecodeStage<kCfg, true> {
  using Tile = DecodeTmaTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim>;
  Tile sK, sV;
};

template <DecodeSm90Config kCfg>
struct DecodeLoader {
  static constexpr int kBytes = dtype_bytes(kCfg.dtype);
  ShareWalk<kCfg> walk;
  Segment segment;
  int tile;  // the next to load
  bool more;
  // paged: of key `tile` * block_n + lane % block_n. Bulk copies, a page for a tile: of the warp's next tiles, a lane each, from
  // number 32 (tile_number / 32) of the segment's on, and of the 32 after them.
  int page_entry, next_page_entry, tile_number;

  TESSERA_DEVICE void init(const DecodeSm90Params& p, const ShareWalk<kCfg>& from, int warp) {
    walk = from;
    segment.end = tile = 0;
    more = true;
    find(p, warp);
  }

  // The warp's next tile of K into a stage, then the same of V; once there is none, nothing.
  TESSERA_DEVICE void load_k(DecodeStage<kCfg>& stage, const DecodeSm90Params& p, uint32 barrier) {
    load<true>(stage.sK, p, barrier);
  }
  TESSERA_DEVICE void load_v(DecodeStage<kCfg>& stage, const DecodeSm90Params& p, uint32 barrier, int warp) {
    load<false>(stage.sV, p, barrier);
    if (!more) return;
    tile += kCfg.warps;
    if constexpr (kCfg.paged && kCfg.bulk) advance_entries(p);
    find(p, warp);
  }

 private:
  // The first tile of this warp from `tile` on.
  TESSERA_DEVICE void find(const DecodeSm90Params& p, int warp) {
    while (tile >= segment.end) {
      more = walk.next(p, segment);
      if (!more) return;
      tile = segment.begin + warp;
      if constexpr (kCfg.paged && kCfg.bulk) {
        tile_number = 0;
        page_entry = entry_of_tile(p, tile + lane_id() * kCfg.warps);
        next_page_entry = entry_of_tile(p, tile + (32 + lane_id()) * kCfg.warps);
      }
    }
    if constexpr (kCfg.paged && !kCfg.bulk) {
      page_entry = entry_of_key(p, min(tile * kCfg.block_n + lane_id() % kCfg.block_n, segment.s.sk - 1));
    }
  }

  // A sequence without keys may have no entry, and none at all may come after its place in a CSR page table.
  TESSERA_DEVICE int entry_of_key(const DecodeSm90Params& p, int key) const {
    return key >= 0 ? pages_of(p, segment.s, segment.batch)[p.page_table_col * (key / p.page_size)] : 0;
  }
  TESSERA_DEVICE int entry_of_tile(const DecodeSm90Params& p, int of) const {
    return entry_of_key(p, of < segment.end ? min(of * kCfg.block_n, segment.s.sk - 1) : -1);
  }
  // To the warp's next tile of the segment.
  TESSERA_DEVICE void advance_entries(const DecodeSm90Params& p) {
    if (++tile_number % 32 != 0) return;
    page_entry = next_page_entry;
    next_page_entry = entry_of_tile(p, tile + (32 + lane_id()) * kCfg.warps);
  }

  // Where the row of this lane, key first + lane % block_n, lies, in bytes.
  TESSERA_DEVICE int64 place(const DecodeSm90Params& p, const RowTensor& tensor, int first) const {
    const int key = max(min(first + lane_id() % kCfg.block_n, segment.s.sk - 1), 0);
    if constexpr (kCfg.paged) {
      return (tensor.batch * clamp(page_entry, 0, p.pages - 1) + tensor.row * (key % p.page_size) +
              tensor.head * segment.head_kv) *
             kBytes;
    } else {
      return (tensor.batch * segment.batch + tensor.row * (static_cast<int64>(segment.s.k_begin) + key) +
              tensor.head * segment.head_kv) *
             kBytes;
    }
  }

  template <bool kKeys, class Tile>
  TESSERA_DEVICE void load(Tile& to, const DecodeSm90Params& p, uint32 barrier) {
    if (more) {
      const int first = tile * kCfg.block_n, count = min(segment.s.sk - first, kCfg.block_n);
      if constexpr (kCfg.bulk) {
        load_bulk(to, kKeys ? p.k_map : p.v_map, p, barrier, first);
      } else {
        load_rows(to, kKeys ? p.k : p.v, p, first, count, (kKeys ? p.head_dim : p.head_dim_v) * kBytes);
      }
    }
    if constexpr (!kCfg.bulk) ptx::cp_async_commit_group();  // an empty one, too: the count stays
  }

  // Rows of K or V; those from `count` on, and columns beyond row_bytes, become zero. Rows in pages lie anywhere: each lane knows
  // the place of one, and hands it to the lanes that load it.
  template <class Tile>
  TESSERA_DEVICE void load_rows(Tile& sTile, const RowTensor& tensor, const DecodeSm90Params& p, int first, int count,
                                int row_bytes) {
    constexpr int kRowBytes = Tile::kCols * kBytes, kLoads = kRowBytes / kLoadBytes, kLanes = lanes_of(kLoads);
    constexpr int kRowsAPass = 32 / kLanes;
    const int64 mine = place(p, tensor, first), row_stride = tensor.row * kBytes;
    const int lane = lane_id();
    const char* const base = static_cast<const char*>(tensor.data);
    const char* const gRow0 = base + uniform(mine) + lane / kLanes * row_stride;
    // Written out, but where wide heads leave no registers for it.
#pragma unroll(kCfg.head_dim > 192 ? 4 : 16)
    for (int row0 = 0; row0 < kCfg.block_n; row0 += kRowsAPass) {
      const int row = row0 + lane / kLanes;
      const char* from;
      if constexpr (kCfg.paged) {
        from = base + __shfl_sync(0xffffffff, mine, row % 32);
      } else {
        from = gRow0 + row0 * row_stride;
      }
#pragma unroll
      for (int part = 0; part < kLoads; part += kLanes) {
        const int offset = (part + lane % kLanes) * kLoadBytes;
        if (offset >= kRowBytes) continue;
        const int wanted = row < count ? min(max(row_bytes - offset, 0), kLoadBytes) : 0;
        ptx::cp_async_cg_16_l2_128b(sTile.at(row, 0) + offset, wanted > 0 ? from + offset : base, wanted);
      }
    }
  }

  // By TMA, a copy for 64 columns. All of a tile's keys are in one page. What comes after a sequence's end the warp clears.
  template <class Tile>
  TESSERA_DEVICE void load_bulk(Tile& to, const TensorMap& map, const DecodeSm90Params& p, uint32 barrier, int first) {
    int row, batch;
    if constexpr (kCfg.paged) {
      row = first % p.page_size;
      batch = clamp(__shfl_sync(0xffffffff, page_entry, tile_number % 32), 0, p.pages - 1);
    } else {
      row = segment.s.k_begin + first, batch = p.cu_seqlens_k ? 0 : segment.batch;
    }
    if (lane_id() != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(shared_address(to.data) + chunk * Tile::kChunkBytes, &map, barrier,
                                   chunk * kChunkCols, row, segment.head_kv, batch);
    }
  }
};

// Rows of V that lie past a sequence's end, where memory holds anything, meet probabilities of zero: they become zero.
template <DecodeSm90Config kCfg, class Tile>
TESSERA_DEVICE void clear_rows_from(Tile& sV, int count) {
  if (count >= kCfg.block_n) return;
  constexpr int kWords = kCfg.head_dim / 8;
#pragma unroll 1
  for (int i = lane_id(); i < kCfg.block_n * kWords; i += 32) {
    if (i / kWords >= count) ptx::st_shared_zero_16(sV.at(i / kWords, i % kWords * 8));
  }
  ptx::fence_proxy_async();  // before TMA writes there again
  __syncwarp();
}

}  // namespace tessera
