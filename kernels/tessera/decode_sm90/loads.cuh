// A warp's ring of tiles of K and V: filled by the warp itself, `stages` tiles ahead of its products and across the works of
// its block's share, so that no barrier and no merge stops the reading. What a page's entry says is asked for one tile before
// its rows are.
#pragma once

#include "tessera/decode_sm90/schedule.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

template <DecodeSm90Config kCfg>
struct DecodeStage {
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim> sK, sV;
};

template <DecodeSm90Config kCfg>
struct DecodeLoader {
  static constexpr int kBytes = dtype_bytes(kCfg.dtype);
  ShareWalk<kCfg> walk;
  Segment segment;
  int tile;        // the next to load
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
        load_bulk(stage, p, barrier, first, count);
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
      page_entry = p.page_table[p.page_table_batch * segment.batch + p.page_table_col * (key / p.page_size)];
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
    if constexpr (kCfg.paged) {
      scatter(stage.sK, p.k, p, first, count, p.head_dim * kBytes);
      scatter(stage.sV, p.v, p, first, count, p.head_dim_v * kBytes);
    } else {
      const auto rows = [&](const RowTensor& tensor) {
        return static_cast<const char*>(tensor.data) +
               (tensor.batch * segment.batch + tensor.row * (static_cast<int64>(segment.s.k_begin) + first) +
                tensor.head * segment.head_kv) *
                   kBytes;
      };
      load_tile_strided<true, 32>(stage.sK, count, p.head_dim * kBytes, rows(p.k), p.k.row * kBytes, lane_id());
      load_tile_strided<true, 32>(stage.sV, count, p.head_dim_v * kBytes, rows(p.v), p.v.row * kBytes, lane_id());
    }
  }

  // Rows that lie anywhere: each lane knows the place of one, and hands it to the lanes that load the row.
  template <class Tile>
  TESSERA_DEVICE void scatter(Tile& sTile, const RowTensor& tensor, const DecodeSm90Params& p, int first, int count,
                              int row_bytes) {
    constexpr int kRowBytes = Tile::kCols * kBytes, kLoads = kRowBytes / kLoadBytes, kLanes = lanes_of(kLoads);
    constexpr int kRowsAPass = 32 / kLanes;
    const int64 mine = place(p, tensor, first);
    const int lane = lane_id();
#pragma unroll
    for (int row0 = 0; row0 < kCfg.block_n; row0 += kRowsAPass) {
      const int row = row0 + lane / kLanes;
      const char* from = static_cast<const char*>(tensor.data) + __shfl_sync(0xffffffff, mine, row % 32);
#pragma unroll
      for (int part = 0; part < kLoads; part += kLanes) {
        const int offset = (part + lane % kLanes) * kLoadBytes;
        if (offset >= kRowBytes) continue;
        const int wanted = row < count ? min(max(row_bytes - offset, 0), kLoadBytes) : 0;
        load_part<true>(sTile, row, offset, from + (wanted > 0 ? offset : 0), wanted);
      }
    }
  }

  // A copy a row, by one lane each: the padding of shared memory's rows costs nothing. Rows past the end of V become zero, since
  // they meet probabilities of zero.
  TESSERA_DEVICE void load_bulk(DecodeStage<kCfg>& stage, const DecodeSm90Params& p, uint32 barrier, int first,
                                int count) {
    const int lane = lane_id(), row_bytes = p.head_dim * kBytes, row_bytes_v = p.head_dim_v * kBytes;
    if (count < kCfg.block_n) [[unlikely]] {
      for (int i = lane; i < kCfg.block_n * kCfg.head_dim / 8; i += 32) {
        const int row = i / (kCfg.head_dim / 8), col = i % (kCfg.head_dim / 8) * 8;
        if (row >= count) ptx::st_shared_zero_16(stage.sV.at(row, col));
      }
      ptx::fence_proxy_async();
      count = max(count, 0);
    }
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, count * (row_bytes + row_bytes_v));
    __syncwarp();
    if constexpr (kCfg.block_n == 16) {  // lanes 0 ... 15 have K's rows, the others V's
      const bool of_k = lane < 16;
      const RowTensor& tensor = of_k ? p.k : p.v;
      if (lane % 16 < count) {
        const uint32 to = of_k ? stage.sK.at(lane % 16, 0) : stage.sV.at(lane % 16, 0);
        ptx::cp_async_bulk_load(to, static_cast<const char*>(tensor.data) + place(p, tensor, first),
                                of_k ? row_bytes : row_bytes_v, barrier);
      }
    } else {
      static_assert(kCfg.block_n == 32);
      if (lane < count) {
        ptx::cp_async_bulk_load(stage.sK.at(lane, 0), static_cast<const char*>(p.k.data) + place(p, p.k, first),
                                row_bytes, barrier);
        ptx::cp_async_bulk_load(stage.sV.at(lane, 0), static_cast<const char*>(p.v.data) + place(p, p.v, first),
                                row_bytes_v, barrier);
      }
    }
  }
};

}  // namespace tessera
