// A warp's ring of tiles of K and V: filled by the warp itself, `stages` tiles ahead of its products and across the works of
// its block's share, so that no barrier and no merge stops the reading. What a page's entry says is asked for one tile before
// its rows are.
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
  int page_entry;  // paged: of key `tile` * block_n + lane % block_n

  TESSERA_DEVICE void init(const DecodeSm90Params& p, const ShareWalk<kCfg>& from, int warp) {
    walk = from;
    segment.end = tile = 0;
    more = true;
    find(p, warp);
  }

  // The warp's next tile into a stage; once there is none, nothing.
  TESSERA_DEVICE void load(DecodeStage<kCfg>& stage, const DecodeSm90Params& p, uint32 barrier, int warp) {
    if (more) {
      const int first = tile * kCfg.block_n, count = min(segment.s.sk - first, kCfg.block_n);
      if constexpr (kCfg.bulk) {
        load_bulk(stage, p, barrier, first);
      } else {
        load_async(stage, p, first, count);
      }
      tile += kCfg.warps;
      find(p, warp);
    }
    if constexpr (!kCfg.bulk) ptx::cp_async_commit_group();  // an empty one, too: the count stays
  }

 private:
  // The first tile of this warp from `tile` on.
  TESSERA_DEVICE void find(const DecodeSm90Params& p, int warp) {
    while (tile >= segment.end) {
      more = walk.next(p, segment);
      if (!more) return;
      tile = segment.begin + warp;
    }
    if constexpr (kCfg.paged) {
      const int key = min(tile * kCfg.block_n + lane_id() % kCfg.block_n, max(segment.s.sk - 1, 0));
      page_entry = pages_of(p, segment.s, segment.batch)[p.page_table_col * (key / p.page_size)];
    }
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

  TESSERA_DEVICE void load_async(DecodeStage<kCfg>& stage, const DecodeSm90Params& p, int first, int count) {
    load_rows(stage.sK, p.k, p, first, count, p.head_dim * kBytes);
    load_rows(stage.sV, p.v, p, first, count, p.head_dim_v * kBytes);
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
  TESSERA_DEVICE void load_bulk(DecodeStage<kCfg>& stage, const DecodeSm90Params& p, uint32 barrier, int first) {
    if (lane_id() != 0) return;
    using Tile = typename DecodeStage<kCfg>::Tile;
    int row, batch;
    if constexpr (kCfg.paged) {
      row = first % p.page_size, batch = clamp(page_entry, 0, p.pages - 1);
    } else {
      row = segment.s.k_begin + first, batch = p.cu_seqlens_k ? 0 : segment.batch;
    }
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * Tile::kBytes);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const int offset = chunk * Tile::kChunkBytes;
      ptx::cp_async_bulk_tensor_4d(shared_address(stage.sK.data) + offset, &p.k_map, barrier, chunk * kChunkCols, row,
                                   segment.head_kv, batch);
      ptx::cp_async_bulk_tensor_4d(shared_address(stage.sV.data) + offset, &p.v_map, barrier, chunk * kChunkCols, row,
                                   segment.head_kv, batch);
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
