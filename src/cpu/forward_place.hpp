// A work item of the forward pass, and the prologue and epilogue of its tiles: common to the vectors and AMX.
#pragma once

#include "cpu/tile.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

// The sequence that holds `index` in the running count `begin`, such as the items of one head and split.
TESSERA_INLINE int64_t find_sequence(const Params& p, int64_t Sequence::*begin, int64_t index) {
  int64_t low = 0, high = p.batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.sequences[middle].*begin <= index ? low : high) = middle;
  }
  return low;
}

// A work item of the forward pass: query tiles of one head and sequence, and a part of the keys.
struct ForwardPlace {
  int64_t split, batch, head_kv, head;
  int64_t row_begin, rows;  // of the first tile; of the sequence
  int64_t tile_count;
};

// false: there is no such item.
TESSERA_INLINE bool place_item(const Params& p, int64_t item, ForwardPlace& at) {
  const int64_t group = p.heads_q / p.heads_kv;
  at.split = item % p.num_splits;
  const int64_t index = item / p.num_splits % p.sequences[p.batch].item_begin;
  const int64_t head_slot = item / p.num_splits / p.sequences[p.batch].item_begin;
  if (head_slot >= (p.pack_gqa ? p.heads_kv : p.heads_q)) return false;
  at.batch = find_sequence(p, &Sequence::item_begin, index);
  // Longest first (LPT order): under a causal mask the last queries see the most keys.
  const int64_t local = p.sequences[at.batch + 1].item_begin - 1 - index;
  at.head_kv = p.pack_gqa ? head_slot : head_slot / group;
  at.head = p.pack_gqa ? head_slot * group : head_slot;
  at.rows = p.sequences[at.batch].sq * (p.pack_gqa ? group : 1);
  at.row_begin = local * p.tiles_per_item * kBlockM;
  at.tile_count = (min_of(at.rows - at.row_begin, int64_t{p.tiles_per_item} * kBlockM) + kBlockM - 1) / kBlockM;
  return true;
}

struct KeySpan {
  int64_t begin, end;
};

// Initialises the item's tiles. Returns the keys of its part that any of them sees, from a multiple of `step` on.
TESSERA_INLINE KeySpan init_tiles(const Params& p, const ForwardPlace& at, Tile* tiles, int64_t step) {
  int64_t low = 0x7fffffff, high = -1;
  for (int64_t t = 0; t < at.tile_count; ++t) {
    const int64_t first = at.row_begin + t * kBlockM;
    init_tile(tiles[t], p, at.batch, at.head, first, min_of<int64_t>(kBlockM, at.rows - first));
    if (tiles[t].some_low > tiles[t].some_high) continue;
    low = min_of<int64_t>(low, tiles[t].some_low);
    high = max_of<int64_t>(high, tiles[t].some_high);
  }
  const int64_t begin = low / step * step;
  if (p.num_splits == 1) return {max_of(int64_t{0}, begin), high + 1};
  const int64_t part = at.split * p.split_keys;
  return {max_of(part, begin), min_of(high + 1, part + p.split_keys)};
}

// Adds a sink: updates the rows' stale max and sum, and the factor of O.
TESSERA_OWN_FUNCTION void add_sink(const Params& p, Tile& tile, float* scale) {
  alignas(64) float sinks[kBlockM];
  for (int64_t lane = 0; lane < kBlockM; ++lane) {
    sinks[lane] =
        *reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.sink) + p.sink_head * tile.head[lane]);
  }
  for (int c = 0; c < kBlockM / kLanes; ++c) {
    const VecF sum = load(tile.sum + c * kLanes), old = load(tile.stale_max + c * kLanes);
    const VecF sink = load(sinks + c * kLanes);
    const VecI seen = sum != 0.0f;  // NaN counts as seen
    const Against from = against(tile, c);
    const Against to = set_stale_max(p, tile, c, select(seen & (sink > old), sink, old));
    const VecF rescale = select(sink > old, rescale_of(old, from, to), splat(1.0f));
    VecF weight{};  // of the sink, which may be the whole sum: exactly
    for (int lane = 0; lane < kLanes; ++lane) {
      weight[lane] =
          __builtin_exp2f(static_cast<float>((double{sink[lane]} - to.shift[lane]) * p.units_log2 - to.offset[lane]));
    }
    const VecF joint = fma(sum, rescale, weight);
    store(scale + c * kLanes, load(scale + c * kLanes) * select(seen, rescale, splat(1.0f)));
    store(tile.sum + c * kLanes, select(seen, joint, sum));
  }
}

// Index of a row in a split's partial results.
TESSERA_INLINE int64_t partial_row(const Params& p, const Tile& tile, int64_t split, int64_t lane) {
  return (split * p.heads_q + tile.head[lane]) * p.rows_total + tile.sequence->row_begin + tile.query[lane];
}

// Addresses of a tile's rows of O: in the output or in this split's partial results.
TESSERA_INLINE void output_rows(char* (&rows)[kBlockM], const Params& p, const Tile& tile, int64_t split) {
  if (!p.partial) return rows_of(rows, p.o, tile);
  for (int64_t lane = 0; lane < tile.count; ++lane) {
    rows[lane] = reinterpret_cast<char*>(p.partial_o + partial_row(p, tile, split, lane) * p.head_dim_v);
  }
}

// Addresses of a tile's LSEs, or of their low parts: in the output or in this split's partial results. `data` NULL:
// they are not stored.
struct RowNumbers {
  char* data;
  int64_t batch, head, row;
  float* partial;  // NULL: there is one split

  TESSERA_INLINE float* at(const Params& p, const Tile& tile, int64_t split, int64_t lane) const {
    if (partial) return partial + partial_row(p, tile, split, lane);
    return reinterpret_cast<float*>(data + batch * tile.batch + head * tile.head[lane] +
                                    row * (tile.sequence->q_begin + tile.query[lane]));
  }
  TESSERA_INLINE bool needed() const { return partial || data; }
  // Whether the numbers of the tile's rows are adjacent.
  TESSERA_INLINE bool in_a_row(const Tile& tile) const { return tile.consecutive && (partial || row == sizeof(float)); }
};
TESSERA_INLINE RowNumbers lse_of(const Params& p) {
  return {p.lse, p.lse_batch, p.lse_head, p.lse_row, p.partial ? p.partial_lse : nullptr};
}
TESSERA_INLINE RowNumbers lse_low_of(const Params& p) {
  return {p.lse_low, p.lse_low_batch, p.lse_low_head, p.lse_low_row, p.partial ? p.partial_lse_low : nullptr};
}

TESSERA_INLINE void write_numbers(const Params& p, const Tile& tile, int64_t split, const RowNumbers& numbers,
                                  const float* lse) {
  if (!numbers.needed()) return;
  if (!numbers.in_a_row(tile)) {
    for (int64_t lane = 0; lane < tile.count; ++lane) *numbers.at(p, tile, split, lane) = lse[lane];
    return;
  }
  float* out = numbers.at(p, tile, split, 0);
  for (int64_t lane = 0; lane < tile.count; lane += kLanes) {
    store_first(out + lane, load(lse + lane), min_of<int64_t>(kLanes, tile.count - lane));
  }
}

// Writes factor O / l to `rows`, and the LSE to the output or to this split's partial results. next_rows: of a later
// tile.
inline void finish_tile(const Params& p, Tile& tile, float* sO, int64_t split, float factor, char* const* rows,
                        char* const* next_rows, int64_t next_count) {
  alignas(64) float inverse[kBlockM], lse[kBlockM], lse_low[kBlockM];
  const bool partial = p.partial != 0, with_lse = partial || p.lse;
  for (int64_t lane = 0; lane < kBlockM; lane += kLanes) store(inverse + lane, splat(factor));
  if (p.sink && !partial) add_sink(p, tile, inverse);
  for (int64_t lane = 0; lane < kBlockM; lane += kLanes) {
    const VecF sum = load(tile.sum + lane);
    const VecI seen = sum != 0.0f;  // NaN counts as seen
    store(inverse + lane, select(seen, load(inverse + lane) / sum, VecF{}));
    if (!with_lse) continue;
    store(lse + lane, log2(sum));
  }
  if (with_lse) {
    for (int64_t lane = 0; lane < kBlockM; ++lane) {
      const LogSumExp of_row = log_sum_exp(p, tile.shift[lane], tile.offset[lane], lse[lane]);
      const bool seen = tile.sum[lane] != 0.0f;
      lse[lane] = seen ? of_row.high : -infinity();
      lse_low[lane] = seen ? of_row.low : 0.0f;
    }
    write_numbers(p, tile, split, lse_of(p), lse);
    write_numbers(p, tile, split, lse_low_of(p), lse_low);
  }
  if (!tile.started) __builtin_memset(sO, 0, static_cast<size_t>(p.head_dim_v) * kBlockM * sizeof(float));
  with_float_elem(partial ? static_cast<int32_t>(TESSERA_FLOAT32) : p.o_dtype, [&](auto elem) {
    unpack_transposed<decltype(elem)>(rows, sO, inverse, tile.count, p.head_dim_v, next_rows, next_count);
  });
}

// The same for all of an item's tiles, whose O are o_floats apart. With each tile, the rows and the LSE of the tile
// after next are prefetched, since each store would otherwise wait for its line.
inline void finish_tiles(const Params& p, Tile* tiles, int64_t tile_count, float* sO, int64_t o_floats, int64_t split,
                         float factor) {
  char* rows[3][kBlockM];  // of this tile and the next two
  const auto locate = [&](int64_t t) TESSERA_LAMBDA_INLINE {
    output_rows(rows[t % 3], p, tiles[t], split);
    for (const RowNumbers& numbers : {lse_of(p), lse_low_of(p)}) {
      if (!numbers.needed() || !numbers.in_a_row(tiles[t])) continue;
      const char* at = reinterpret_cast<const char*>(numbers.at(p, tiles[t], split, 0));
      for (int64_t byte = 0; byte < tiles[t].count * 4; byte += kCacheLine_bytes) prefetch_write(at + byte);
    }
  };
  for (int64_t t = 0; t < min_of<int64_t>(2, tile_count); ++t) locate(t);
  for (int64_t t = 0; t < tile_count; ++t) {
    const bool more = t + 2 < tile_count;
    if (more) locate(t + 2);
    finish_tile(p, tiles[t], sO + t * o_floats, split, factor, rows[t % 3], rows[(t + 2) % 3],
                more ? tiles[t + 2].count : 0);
  }
}

}  // namespace
}  // namespace tessera::cpu
