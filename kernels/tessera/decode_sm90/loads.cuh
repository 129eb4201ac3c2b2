// A warp's ring of tiles of K and V: filled by the warp itself, `stages` tiles ahead of its products and across the segments of
// its block's share, so that no barrier and no merge stops the reading. A tile of K and one of V are groups of copies of their
// own: K's place is filled again as soon as the scores are there. Pages' entries are loaded before their rows are: one tile, or, where a
// tile has one page, 32 tiles, those of the next segment too.
#pragma once

#include "tessera/decode_sm90/schedule.cuh"
#include "tessera/ptx/cp_async.cuh"
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

inline constexpr int kDecodeStageBarrierBytes = 16;  // of a stage: K's barrier, then V's

template <DecodeSm90Config kCfg>
class DecodeLoader {
 public:
  using Stage = DecodeStage<kCfg>;

  // barriers: of the warp's stages, kDecodeStageBarrierBytes each.
  TESSERA_DEVICE DecodeLoader(const DecodeSm90Params& params, const ShareSegments<kCfg>& all,
                              Stage (&ring)[kCfg.stages], uint32 ring_barriers, int of_warp)
      : p(params), segments(all), stages(ring), barriers(ring_barriers), warp(of_warp) {}

  // The warp's first tile of segment 0, which alone is known: its page's entry is under way.
  TESSERA_DEVICE void start() {
    const Segment& first = segments[0];
    tile = first.begin + warp, end = first.end;
    found = tile < end;
    if constexpr (kPageATile) {
      page_entry = entry_of_tile(first, tile + lane_id() * kCfg.warps);
      ahead = tile + 32 * kCfg.warps < end;
      if (ahead) load_ahead(0);
    }
    if constexpr (kCfg.paged && !kCfg.bulk) page_entry = entry_of_lane(first);
  }
  // The first tiles of segment 0 into all stages. Not by fill(), since what a short call waits for is its code, too.
  TESSERA_DEVICE void fill_first() {
#pragma unroll 1
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      empty_stages -= found;
      load_k(stage);
      load<false>(stages[stage].sV, v_barrier(stage));
      if (!found) continue;
      tile += kCfg.warps, ++tile_number;
      found = tile < end;
      if constexpr (kCfg.paged && !kCfg.bulk) page_entry = entry_of_lane(segments[0]);
    }
  }
  // The stages that are empty, as far as segments are known: numbers up to `last`. `stage`: the next that the warp waits for.
  TESSERA_DEVICE void fill(int stage, int last) {
    if (!found) find(last);
#pragma unroll 1
    for (int count = empty_stages; count > 0; --count) {
      const int at = (stage + kCfg.stages - count) % kCfg.stages;
      empty_stages -= found;
      load_k(at);
      load_v(at, last);
    }
  }
  // Segments up to number `last` are known: the warp's next tile is found, and, a page a tile, the entries after the next 32 tiles', if
  // they were not.
  TESSERA_DEVICE void look_ahead(int last) {
    if (!found && empty_stages == 0) find(last);
    if constexpr (kPageATile) {
      if (!ahead && found) load_ahead(last);
    }
  }

  // The warp's next tile of K into a stage that is read, then the same of V; where none is known, nothing.
  TESSERA_DEVICE void refill_k(int stage) {
    empty_stages += !found;
    load_k(stage);
  }
  TESSERA_DEVICE void refill_v(int stage, int last) { load_v(stage, last); }

 private:
  static constexpr int kBytes = dtype_bytes(kCfg.dtype);
  static constexpr bool kPageATile = kCfg.paged && kCfg.bulk;  // all keys of a tile are in one page
  // By cp.async: lanes that load a row, 16 bytes each, until they are through; a pass is as many rows as a warp has such lanes for.
  static constexpr int kRowBytes = kCfg.head_dim * kBytes, kLoads = kRowBytes / kLoadBytes;
  static constexpr int kLanes = kLoads < 8 ? lanes_of(kLoads) : 8, kPasses = kCfg.block_n * kLanes / 32;

  const DecodeSm90Params& p;
  const ShareSegments<kCfg>& segments;
  Stage (&stages)[kCfg.stages];
  const uint32 barriers;
  const int warp;

  int number = 0;         // the segment that has the warp's next tile
  int tile = 0, end = 0;  // the next tile, if it is found, and where the segment ends
  bool found = false;
  int empty_stages = kCfg.stages;
  // paged: of key `tile` * block_n + lane % block_n. A page a tile: of the warp's next tiles, a lane each, from
  // number 32 (tile_number / 32) of the segment's on; and (`ahead`) of the 32 after these, once they are known.
  int page_entry = 0, entry_ahead = 0, tile_number = 0;
  bool ahead = false;
  int row = 0, page = 0;  // find_row
  int64 places[kPasses];  // place_rows

  TESSERA_DEVICE uint32 k_barrier(int stage) const { return barriers + stage * kDecodeStageBarrierBytes; }
  TESSERA_DEVICE uint32 v_barrier(int stage) const { return k_barrier(stage) + 8; }

  TESSERA_DEVICE void load_k(int stage) { load<true>(stages[stage].sK, k_barrier(stage)); }
  TESSERA_DEVICE void load_v(int stage, int last) {
    load<false>(stages[stage].sV, v_barrier(stage));
    if (!found) return;
    tile += kCfg.warps;
    if constexpr (kPageATile) {
      if (++tile_number % 32 == 0 && tile < end) take_ahead(last);
    }
    find(last);
  }

  // The first tile of this warp from `tile` on.
  TESSERA_DEVICE void find(int last) {
    while (tile >= end) {
      found = number < last && segments[number + 1].rows > 0;
      if (!found) return;
      const Segment& segment = segments[++number];
      tile = segment.begin + warp, end = segment.end, tile_number = 0;
      if constexpr (kPageATile) {
        if (!ahead) entry_ahead = entry_of_tile(segment, tile + lane_id() * kCfg.warps);
        take_ahead(last);
      }
    }
    if constexpr (kCfg.paged && !kCfg.bulk) page_entry = entry_of_lane(segments[number]);
  }

  // A sequence without keys may have no entry, and none at all may come after its place in a CSR page table.
  TESSERA_DEVICE int entry_of_key(const Segment& segment, int key) const {
    return key >= 0 ? pages_of(p, segment.s, segment.batch)[p.page_table_col * (key / p.page)] : 0;
  }
  TESSERA_DEVICE int entry_of_tile(const Segment& segment, int of) const {
    return entry_of_key(segment, of < segment.end ? min(of * kCfg.block_n, segment.s.sk - 1) : -1);
  }
  TESSERA_DEVICE int entry_of_lane(const Segment& segment) const {
    return entry_of_key(segment, min(tile * kCfg.block_n + lane_id() % kCfg.block_n, segment.s.sk - 1));
  }
  TESSERA_DEVICE void take_ahead(int last) {
    page_entry = entry_ahead;
    load_ahead(last);
  }
  // Of the 32 tiles after those of page_entry: of the segment, or, where it has no more, of the next one.
  TESSERA_DEVICE void load_ahead(int last) {
    const int next = tile + (32 - tile_number % 32) * kCfg.warps;
    const bool here = next < end;
    ahead = here || (number < last && segments[number + 1].rows > 0);
    if (!ahead) return;
    const Segment& segment = segments[number + !here];
    entry_ahead = entry_of_tile(segment, (here ? next : segment.begin + warp) + lane_id() * kCfg.warps);
  }

  // By cp.async: which row of which page, or of which sequence, this lane's key is, first + lane % block_n. The same for K and V.
  TESSERA_DEVICE void find_row(const Segment& segment, int first) {
    const int key = max(min(first + lane_id() % kCfg.block_n, segment.s.sk - 1), 0);
    if constexpr (kCfg.paged) {
      const int of_sequence = key / p.page;
      row = key - of_sequence * p.page.value, page = clamp(page_entry, 0, p.pages - 1);
    } else {
      row = segment.s.k_begin + key, page = segment.batch;
    }
  }

  template <bool kKeys, class Tile>
  TESSERA_DEVICE void load(Tile& to, uint32 barrier) {
    if (found) {
      const Segment& segment = segments[number];
      const int first = tile * kCfg.block_n;
      if constexpr (kCfg.bulk) {
        load_bulk(to, kKeys ? p.k_map : p.v_map, segment, barrier, first);
      } else {
        if constexpr (kKeys) find_row(segment, first);
        if (kKeys || !same_places()) place_rows(kKeys ? p.k : p.v, segment.head_kv);
        const int columns = segment.s.sk > 0 ? kKeys ? p.head_dim : p.head_dim_v : 0;  // no keys, no row to read
        load_rows(to, kKeys ? p.k : p.v, columns * kBytes);
      }
    }
    if constexpr (!kCfg.bulk) ptx::cp_async_commit_group();  // an empty one, too: the count stays
  }

  // Whether V's rows lie in their tensor where K's lie in theirs.
  TESSERA_DEVICE bool same_places() const {
    return p.k.batch == p.v.batch && p.k.row == p.v.row && p.k.head == p.v.head;
  }
  // Rows in pages lie anywhere: each lane knows the place of one, and hands it to the lanes that load it. What a row costs beside its copies is
  // one address for all of them.
  TESSERA_DEVICE void place_rows(const RowTensor& tensor, int head) {
    const int64 mine = (tensor.batch * page + tensor.row * row + tensor.head * head) * kBytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      places[pass] = __shfl_sync(0xffffffff, mine, (pass * (32 / kLanes) + lane_id() / kLanes) % 32);
    }
  }
  // Rows of K or V by cp.async; columns beyond row_bytes become zero.
  template <class Tile>
  TESSERA_DEVICE void load_rows(Tile& sTile, const RowTensor& tensor, int row_bytes) {
    static_assert(Tile::kCols * kBytes == kRowBytes);
    constexpr int kRowsAPass = 32 / kLanes;
    const int lane = lane_id(), offset = lane % kLanes * kLoadBytes;
    const char* const base = static_cast<const char*>(tensor.data) + offset;
    const uint32 to = sTile.at(lane / kLanes, 0) + offset;
    if (row_bytes == kRowBytes) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int at = 0; at < kRowBytes; at += kLanes * kLoadBytes) {
          if (kLoads % kLanes != 0 && offset + at >= kRowBytes) continue;
          ptx::cp_async_cg_16_l2_128b(to + pass * kRowsAPass * Tile::kPitchBytes + at, base + places[pass] + at);
        }
      }
    } else {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll 1
        for (int at = 0; at + offset < kRowBytes; at += kLanes * kLoadBytes) {
          const int wanted = clamp(row_bytes - offset - at, 0, kLoadBytes);
          ptx::cp_async_cg_16_l2_128b(to + pass * kRowsAPass * Tile::kPitchBytes + at,
                                      wanted > 0 ? base + places[pass] + at : base, wanted);
        }
      }
    }
  }

  // By TMA, a copy for 64 columns. All of a tile's keys are in one page.
  template <class Tile>
  TESSERA_DEVICE void load_bulk(Tile& to, const TensorMap& map, const Segment& segment, uint32 barrier, int first) {
    int row, batch;
    if constexpr (kCfg.paged) {
      row = first % p.page;
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

// Rows of V that lie past a sequence's end, where memory holds anything, or the last key's again, meet probabilities of zero: they become
// zero.
template <DecodeSm90Config kCfg, class Tile>
TESSERA_DEVICE void clear_rows_from(Tile& sV, int count) {
  if (count >= kCfg.block_n) return;
  constexpr int kWords = kCfg.head_dim / 8;
#pragma unroll 1
  for (int i = lane_id(); i < kCfg.block_n * kWords; i += 32) {
    if (i / kWords >= count) ptx::st_shared_zero_16(sV.at(i / kWords, i % kWords * 8));
  }
  if constexpr (kCfg.bulk) ptx::fence_proxy_async();  // before TMA writes there again
  __syncwarp();
}

}  // namespace tessera
