// A warp's ring of K and V tiles. The warp fills it itself, `stages` tiles ahead of its products and across the
// segments of the block's range, so no barrier and no merge stops the loads. A tile of K and a tile of V are separate
// groups of copies: K's stage is refilled as soon as the scores are computed. Page table entries are loaded before the
// rows of their pages: those of one tile, or of 32 tiles if a tile lies in one page; entries of the next segment are
// prefetched too. With a scale for each key, a tile's scales of keys and of values are copied with its K.
#pragma once

#include "tessera/decode_sm90/schedule.cuh"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/product.cuh"
#include "tessera/tile/shared_tile.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// A tile in the layout that TMA writes.
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
  using Tile = SharedTile<kCfg.dtype, kCfg.block_n, kCfg.tile_cols()>;
  Tile sK, sV;
};
template <DecodeSm90Config kCfg>
struct DecodeStage<kCfg, true> {
  using Tile = DecodeTmaTile<kCfg.dtype, kCfg.block_n, kCfg.tile_cols()>;
  Tile sK, sV;
};

// With key_scales: the scales of a tile, of its keys and of its values.
template <DecodeSm90Config kCfg>
struct DecodeTileScales {
  float k[kCfg.block_n], v[kCfg.block_n];
};

inline constexpr int kDecodeStageBarrierBytes = 16;  // of a stage: K's barrier, then V's

template <DecodeSm90Config kCfg>
class DecodeLoader {
 public:
  using Stage = DecodeStage<kCfg>;

  // `ring_barriers`: the barriers of the warp's stages, kDecodeStageBarrierBytes each. `ring_scales`: their scales;
  // unused without key_scales.
  TESSERA_DEVICE DecodeLoader(const DecodeSm90Params& params, const RangeSegments<kCfg>& all,
                              Stage (&ring)[kCfg.stages], uint32 ring_barriers, DecodeTileScales<kCfg>* ring_scales,
                              int of_warp)
      : p(params), segments(all), stages(ring), scales(ring_scales), barriers(ring_barriers), warp(of_warp) {}

  // Finds the warp's first tile of segment 0, the only segment known yet, and issues the load of its page table entry.
  TESSERA_DEVICE void start() {
    const Segment& first = segments[0];
    tile = first.begin + warp, end = first.end;
    found = tile < end;
    if constexpr (kPageATile) {
      page_entry = entry_of_box(first, tile);
      ahead = tile + kEntryTiles * kCfg.warps < end;
      if (ahead) load_ahead(0);
    }
    if constexpr (kCfg.paged && !kCfg.bulk) page_entry = entry_of_lane(first);
  }
  // Loads the first tiles of segment 0 into all stages. This is not fill(), because a short call also waits for its
  // code to be fetched.
  TESSERA_DEVICE void fill_first() {
#pragma unroll 1
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      empty_stages -= found;
      if constexpr (kScalesApart) {
        load<true>(stages[stage].sK, k_barrier(stage));
      } else {
        load_k(stage);
      }
      load<false>(stages[stage].sV, v_barrier(stage));
      if constexpr (!kCfg.bulk) ptx::cp_async_commit_group();
      if (!found) continue;
      tile += kCfg.warps, ++tile_number;
      found = tile < end;
      if constexpr (kCfg.paged && !kCfg.bulk) page_entry = entry_of_lane(segments[0]);
    }
  }
  // Loads the scales of these tiles, where they are a group of copies of their own: after Q, because their addresses
  // take some hundred instructions and they are needed only after the first product.
  TESSERA_DEVICE void fill_first_scales() {
    if constexpr (kScalesApart) {
      const Segment& first = segments[0];
#pragma unroll 1
      for (int stage = 0; stage < kCfg.stages; ++stage) {
        const int at = first.begin + warp + stage * kCfg.warps;
        load_scales(scales[stage], first, at, stage, at < first.end);
        ptx::cp_async_commit_group();
      }
    }
  }
  // Fills the empty stages from the known segments, whose numbers are at most `last`. `stage`: the next stage that the
  // warp waits for.
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
  // Segments up to number `last` are known: finds the warp's next tile. If a tile lies in one page, it also loads the
  // entries that follow the current 32 tiles, unless they were loaded before.
  TESSERA_DEVICE void look_ahead(int last) {
    if (!found && empty_stages == 0) find(last);
    if constexpr (kPageATile) {
      if (!ahead && found) load_ahead(last);
    }
  }

  // Load the warp's next tile of K into a stage whose K has been read, then the same tile of V. They load nothing if no
  // next tile is known.
  TESSERA_DEVICE void refill_k(int stage) {
    empty_stages += !found;
    load_k(stage);
  }
  TESSERA_DEVICE void refill_v(int stage, int last) { load_v(stage, last); }

  // With key_scales: the scales of a stage's tile, valid until refill_k(stage).
  TESSERA_DEVICE const DecodeTileScales<kCfg>& scales_of(int stage) const { return scales[stage]; }

 private:
  static constexpr int kBytes = dtype_bytes(kCfg.cache);
  static constexpr bool kScalesApart = kCfg.key_scales && kCfg.bulk;  // not in the group of K's copies
  static constexpr bool kPageATile = kCfg.paged && kCfg.bulk;         // all keys of a box are in one page
  static constexpr int kBoxRows = kCfg.block_n / kCfg.boxes, kEntryTiles = 32 / kCfg.boxes;
  // cp.async: kLanes lanes load one row, 16 bytes each at a time; one pass loads as many rows as a warp has such sets
  // of lanes.
  static constexpr int kRowBytes = kCfg.head_dim * kBytes, kLoads = kRowBytes / kLoadBytes;
  static constexpr int kLanes = kLoads < 8 ? lanes_of(kLoads) : 8, kPasses = kCfg.block_n * kLanes / 32;
  static_assert(kCfg.bulk || kCfg.block_n <= 32, "a lane finds the row of one key");

  const DecodeSm90Params& p;
  const RangeSegments<kCfg>& segments;
  Stage (&stages)[kCfg.stages];
  DecodeTileScales<kCfg>* const scales;
  const uint32 barriers;
  const int warp;

  int number = 0;         // the segment that contains the warp's next tile
  int tile = 0, end = 0;  // the next tile if `found`, and the end of its segment
  bool found = false;
  int empty_stages = kCfg.stages;
  // paged: the entry of key `tile` * block_n + lane % block_n. If a box lies in one page, each lane has the entry of
  // one box of the warp's next kEntryTiles tiles, from the last multiple of kEntryTiles up to tile_number on;
  // entry_ahead holds those of the tiles after them once `ahead` is set.
  int page_entry = 0, entry_ahead = 0, tile_number = 0;
  bool ahead = false;
  int row = 0, page = 0;  // find_row
  int64 places[kPasses];  // place_rows

  TESSERA_DEVICE uint32 k_barrier(int stage) const { return barriers + stage * kDecodeStageBarrierBytes; }
  TESSERA_DEVICE uint32 v_barrier(int stage) const { return k_barrier(stage) + 8; }

  // K's copy, whose latency is the longer one, does not wait for the scales' addresses. With cp.async they are one
  // group.
  TESSERA_DEVICE void load_k(int stage) {
    load<true>(stages[stage].sK, k_barrier(stage));
    if constexpr (kCfg.key_scales) load_scales(scales[stage], segments[number], tile, tile_number, found);
    if constexpr (kCfg.key_scales || !kCfg.bulk) ptx::cp_async_commit_group();
  }
  TESSERA_DEVICE void load_v(int stage, int last) {
    load<false>(stages[stage].sV, v_barrier(stage));
    if constexpr (!kCfg.bulk) ptx::cp_async_commit_group();
    if (!found) return;
    tile += kCfg.warps;
    if constexpr (kPageATile) {
      if (++tile_number % kEntryTiles == 0 && tile < end) take_ahead(last);
    }
    find(last);
  }

  // Finds this warp's first tile from `tile` on, also in later segments.
  TESSERA_DEVICE void find(int last) {
    while (tile >= end) {
      found = number < last && segments[number + 1].rows > 0;
      if (!found) return;
      const Segment& segment = segments[++number];
      tile = segment.begin + warp, end = segment.end, tile_number = 0;
      if constexpr (kPageATile) {
        if (!ahead) entry_ahead = entry_of_box(segment, tile);
        take_ahead(last);
      }
    }
    if constexpr (kCfg.paged && !kCfg.bulk) page_entry = entry_of_lane(segments[number]);
  }

  // A sequence without keys may have no entry, and a CSR page table may end where its entries would begin.
  TESSERA_DEVICE int entry_of_key(const Segment& segment, int key) const {
    return key >= 0 ? pages_of(p, segment.s, segment.batch)[p.keys.table_col * (key / p.page)] : 0;
  }
  // Of this lane's box among those of the warp's kEntryTiles tiles from `first` on.
  TESSERA_DEVICE int entry_of_box(const Segment& segment, int first) const {
    const int of = first + lane_id() / kCfg.boxes * kCfg.warps,
              key = of * kCfg.block_n + lane_id() % kCfg.boxes * kBoxRows;
    return entry_of_key(segment, of < segment.end ? min(key, segment.s.sk - 1) : -1);
  }
  TESSERA_DEVICE int page_of_box(int box) const { return page_of_box(box, tile_number); }
  TESSERA_DEVICE int page_of_box(int box, int of_number) const {
    const int lane = of_number % kEntryTiles * kCfg.boxes + box;
    return clamp(__shfl_sync(0xffffffff, page_entry, lane), 0, p.keys.pages - 1);
  }
  TESSERA_DEVICE int entry_of_lane(const Segment& segment) const {
    return entry_of_key(segment, min(tile * kCfg.block_n + lane_id() % kCfg.block_n, segment.s.sk - 1));
  }
  TESSERA_DEVICE void take_ahead(int last) {
    page_entry = entry_ahead;
    load_ahead(last);
  }
  // Loads the entries of the kEntryTiles tiles after those of page_entry: of this segment or, if it has no more, of the
  // next one.
  TESSERA_DEVICE void load_ahead(int last) {
    const int next = tile + (kEntryTiles - tile_number % kEntryTiles) * kCfg.warps;
    const bool here = next < end;
    ahead = here || (number < last && segments[number + 1].rows > 0);
    if (!ahead) return;
    const Segment& segment = segments[number + !here];
    entry_ahead = entry_of_box(segment, here ? next : segment.begin + warp);
  }

  // cp.async: finds the row and the page (or sequence) of this lane's key, first + lane % block_n. They are the same
  // for K and V.
  TESSERA_DEVICE void find_row(const Segment& segment, int first) {
    const int key = max(min(first + lane_id() % kCfg.block_n, segment.s.sk - 1), 0);
    if constexpr (kCfg.paged) {
      const int of_sequence = key / p.page;
      row = key - of_sequence * p.page.value, page = clamp(page_entry, 0, p.keys.pages - 1);
    } else {
      row = segment.s.k_begin + key, page = segment.batch;
    }
  }

  // cp.async: the caller commits the group, an empty one too, so that the count of groups stays the same.
  template <bool kKeys, class Tile>
  TESSERA_DEVICE void load(Tile& to, uint32 barrier) {
    if (!found) return;
    const Segment& segment = segments[number];
    const int first = tile * kCfg.block_n;
    if constexpr (kCfg.bulk) {
      load_bulk(to, kKeys ? p.k_map : p.v_map, segment, barrier, first);
    } else {
      if constexpr (kKeys) find_row(segment, first);
      if (kKeys || !same_places()) place_rows(kKeys ? p.k : p.v, segment.head_kv);
      // without keys there is no row to read
      const int columns = segment.s.sk > 0 ? kKeys ? p.head_dim : p.head_dim_v : 0;
      load_rows(to, kKeys ? p.k : p.v, columns * kBytes);
    }
  }

  // Copies the scales of tile `of_tile` of a segment, if there is one, after K's copies: each lane those of every 32nd
  // key and of its value. of_number: its tile_number.
  TESSERA_DEVICE void load_scales(DecodeTileScales<kCfg>& to, const Segment& segment, int of_tile, int of_number,
                                  bool exists) {
    if (exists) {
      const auto copy = [&](const ScaleTensor& of, int64 at, float& scale) {
        if (of.data && segment.s.sk > 0) {
          ptx::cp_async_ca_4(shared_address(&scale), of.data + at);
        } else {
          scale = 1.0f;
        }
      };
#pragma unroll
      for (int begin = 0; begin < kCfg.block_n; begin += 32) {
        const int local = begin + lane_id() % min(kCfg.block_n, 32);
        const int key = max(min(of_tile * kCfg.block_n + local, segment.s.sk - 1), 0);
        int of_page = 0;
        if constexpr (kCfg.paged) {
          of_page = kPageATile ? page_of_box(local / kBoxRows, of_number) : clamp(page_entry, 0, p.keys.pages - 1);
        }
        const auto place = [&](const ScaleTensor& of) {
          const bool in_pages = kCfg.paged && of.in_pages;
          return of.batch * (in_pages ? of_page : segment.batch) + of.head * segment.head_kv +
                 of.row * (in_pages ? key % p.page : key / kScaleTokens);
        };
        if (lane_id() >= kCfg.block_n) continue;
        int64 at = place(p.k_scales);
        copy(p.k_scales, at, to.k[local]);
        if (!p.same_scale_places) at = place(p.v_scales);
        copy(p.v_scales, at, to.v[local]);
      }
    }
  }

  // Whether V's rows have the same offsets in their tensor as K's.
  TESSERA_DEVICE bool same_places() const {
    return p.k.batch == p.v.batch && p.k.row == p.v.row && p.k.head == p.v.head;
  }
  // Rows in pages are at arbitrary addresses: each lane computes the offset of one row and passes it to the lanes that
  // load it. A row then costs one address computation besides its copies.
  TESSERA_DEVICE void place_rows(const RowTensor& tensor, int head) {
    const int64 mine = (tensor.batch * page + tensor.row * row + tensor.head * head) * kBytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      places[pass] = __shfl_sync(0xffffffff, mine, (pass * (32 / kLanes) + lane_id() / kLanes) % 32);
    }
  }
  // Loads rows of K or V by cp.async; columns from row_bytes on become zero.
  template <class Tile>
  TESSERA_DEVICE void load_rows(Tile& sTile, const RowTensor& tensor, int row_bytes) {
    static_assert(Tile::kCols * Tile::kElemBytes == kRowBytes);
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

  // Loads a tile by TMA, one copy for 64 columns of a box.
  template <class Tile>
  TESSERA_DEVICE void load_bulk(Tile& to, const TensorMap& map, const Segment& segment, uint32 barrier, int first) {
    int rows[kCfg.boxes], batch[kCfg.boxes];
#pragma unroll
    for (int box = 0; box < kCfg.boxes; ++box) {
      if constexpr (kCfg.paged) {
        rows[box] = (first + box * kBoxRows) % p.page, batch[box] = page_of_box(box);
      } else {
        rows[box] = segment.s.k_begin + first + box * kBoxRows, batch[box] = p.keys.begins ? 0 : segment.batch;
      }
    }
    if (lane_id() != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
#pragma unroll
      for (int box = 0; box < kCfg.boxes; ++box) {
        const uint32 at = shared_address(to.data) + chunk * Tile::kChunkBytes + box * kBoxRows * kChunkRowBytes;
        ptx::cp_async_bulk_tensor_4d(at, &map, barrier, chunk * kChunkCols, rows[box], segment.head_kv, batch[box]);
      }
  }
};

// Sets V's rows past the sequence's end to zero. They hold arbitrary memory or the last key again; their probabilities
// are zero, but 0 times NaN is NaN.
template <DecodeSm90Config kCfg, class Tile>
TESSERA_DEVICE void clear_rows_from(Tile& sV, int count) {
  if (count >= kCfg.block_n) return;
  constexpr int kWords = Tile::kCols / 8;
#pragma unroll 1
  for (int i = lane_id(); i < kCfg.block_n * kWords; i += 32) {
    if (i / kWords >= count) ptx::st_shared_zero_16(sV.at(i / kWords, i % kWords * 8));
  }
  if constexpr (kCfg.bulk) ptx::fence_proxy_async();  // before TMA writes there again
  __syncwarp();
}

}  // namespace tessera
