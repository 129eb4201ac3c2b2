// What a score program's mask shows of blocks of columns to the rows of one tile: by bounds, samples, or every pair.
#pragma once

#include "tessera/block_lists/entry.cuh"
#include "tessera/block_lists/program_side.cuh"

namespace tessera {

// The rows of one list, and the bounds of what the mask reads of each half of them.
template <ProgramListsConfig kCfg, class Program>
struct ProgramTile {
  static constexpr int kHalfRows = kCfg.rows / kListHalves;
  using Rows = MaskSide<kCfg, Program, kCfg.transposed>;
  using Columns = MaskSide<kCfg, Program, !kCfg.transposed>;
  using RowBounds = typename Rows::Bounds;

  const ProgramListsParams& p;
  const ScoreProgramParams& program;
  Sequence s;
  int batch, head, tile;
  const RowBounds* halves;  // [kListHalves]

  TESSERA_DEVICE int first_row(int half) const { return tile * kCfg.rows + half * kHalfRows; }
  TESSERA_DEVICE int end_row(int half) const { return min(first_row(half) + kHalfRows, kCfg.transposed ? s.sk : s.sq); }

  // The blocks of columns that some of the rows may see by position: first ... last.
  TESSERA_DEVICE KeyRange blocks() const {
    const int row0 = first_row(0), row1 = max(end_row(0), end_row(kListHalves - 1)) - 1;
    const KeyRange seen = kCfg.transposed ? seeing_queries<kCfg.score>(p, s, row0, row1)
                                          : visible_keys<kCfg.score>(p, s, row0, row1).some;
    if (row0 > row1 || seen.low > seen.high || seen.high < 0) return {0, -1};
    return {max(seen.low, 0) / kCfg.cols, min(seen.high / kCfg.cols, p.lists.most - 1)};
  }

  // What is known of columns col0 ... col1 by position and by bounds: bits of an entry. A half with neither bit sees
  // some of the columns, or is not decided. kBlock: the columns are one block, to which a block mask applies, too.
  template <bool kBlock>
  TESSERA_DEVICE int known(int col0, int col1, const typename Columns::Bounds& columns) const {
    col1 = min(col1, (kCfg.transposed ? s.sq : s.sk) - 1);
    int bits = 0;
#pragma unroll
    for (int half = 0; half < kListHalves; ++half) {
      const int row0 = first_row(half), row1 = end_row(half) - 1;
      const int q0 = kCfg.transposed ? col0 : row0, q1 = kCfg.transposed ? col1 : row1;
      const int k0 = kCfg.transposed ? row0 : col0, k1 = kCfg.transposed ? row1 : col1;
      program::BoolBounds shown{0, 0};
      if (sees<kBlock>(q0, q1, k0, k1)) {
        using program::bounds_exactly;
        const ProgramPlace low = pair_place<kCfg>(program, p, s, batch, head, q0, k0);
        const int queries = q1 - q0, keys = k1 - k0;
        const program::PlaceBounds at{bounds_exactly(low.b),     bounds_exactly(low.h),
                                      bounds_exactly(low.h_kv),  {low.i, low.i + queries},
                                      {low.j, low.j + keys},     {low.q_pos, low.q_pos + queries},
                                      bounds_exactly(low.len_q), bounds_exactly(low.len_k)};
        if constexpr (kCfg.transposed) {
          shown = Program::mask_bounds(program, columns, halves[half], at);
        } else {
          shown = Program::mask_bounds(program, halves[half], columns, at);
        }
      }
      if (shown.high == 0) bits |= 1 << half;
      if (shown.low == 1) bits |= 1 << (kListHalves + half);
    }
    return bits;
  }
  TESSERA_DEVICE static bool is_hidden(int bits) { return (bits & kListHidden) == kListHidden; }
  TESSERA_DEVICE static bool is_decided(int bits, int half) {
    return (bits >> half & 1) != 0 || (bits >> (kListHalves + half) & 1) != 0;
  }

  // Whether the mask shows some, and hides some, of the pairs of a half and a block that are visible by position.
  struct Pairs {
    bool shows, hides;
    TESSERA_DEVICE void add(bool shown) { shows = shows || shown, hides = hides || !shown; }
  };
  // Of one of kSamples pairs, evenly spaced with the corners among them.
  static constexpr int kSamples = 16;
  TESSERA_DEVICE Pairs sampled(int half, int block, int sample) const {
    constexpr int kSide = 4;
    static_assert(kSide * kSide == kSamples);
    const Range queries = queries_of(half, block), keys = keys_of(half, block);
    const int query = queries.first + (queries.last - queries.first) * (sample / kSide) / (kSide - 1);
    const int key = keys.first + (keys.last - keys.first) * (sample % kSide) / (kSide - 1);
    const ProgramPlace first = pair_place<kCfg>(program, p, s, batch, head, query, 0);
    const auto column = MaskSide<kCfg, Program, true>::value(program, p, s, batch, head, key);
    Pairs pairs{};
    if (visible_keys<kCfg.score>(p, s, query).holds(key, 1)) {
      pairs.add(
          Program::mask(program, Program::mask_row(program, first), column, with_key<kCfg.score>(first, key), 0.0f));
    }
    return pairs;
  }
  // Of every parts-th query from the part-th on, by a warp: of a lane's keys. The rows of kAhead queries are loaded at
  // once.
  TESSERA_DEVICE Pairs evaluated(int half, int block, int part, int parts) const {
    constexpr int kKeys = kCfg.transposed ? kHalfRows : kCfg.cols, kLaneKeys = kKeys / 32, kAhead = 4;
    static_assert(kKeys % 32 == 0);
    const Range queries = queries_of(half, block), keys = keys_of(half, block);
    const int key0 = keys.first + static_cast<int>(threadIdx.x % 32);
    typename Program::MaskColumn columns[kLaneKeys];
#pragma unroll
    for (int n = 0; n < kLaneKeys; ++n) {
      columns[n] = MaskSide<kCfg, Program, true>::value(program, p, s, batch, head, min(key0 + 32 * n, keys.last));
    }
    Pairs pairs{};
#pragma unroll 1
    for (int first = queries.first + part; first <= queries.last; first += kAhead * parts) {
      ProgramPlace places[kAhead];
      typename Program::MaskRow rows[kAhead];
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        places[ahead] = pair_place<kCfg>(program, p, s, batch, head, min(first + ahead * parts, queries.last), 0);
        rows[ahead] = Program::mask_row(program, places[ahead]);
      }
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        const KeyRange visible = visible_keys<kCfg.score>(p, s, min(first + ahead * parts, queries.last));
#pragma unroll
        for (int n = 0; n < kLaneKeys; ++n) {
          const int key = key0 + 32 * n;
          if (key > keys.last || !visible.holds(key, 1)) continue;
          pairs.add(Program::mask(program, rows[ahead], columns[n], with_key<kCfg.score>(places[ahead], key), 0.0f));
        }
      }
    }
    return pairs;
  }
  // The bits of a half all of whose pairs were evaluated, or of which one is shown and one is hidden.
  TESSERA_DEVICE static int bits_of(int half, const Pairs& pairs) {
    return !pairs.shows ? 1 << half : pairs.hides ? 0 : 1 << (kListHalves + half);
  }

 private:
  struct Range {
    int first, last;
  };
  TESSERA_DEVICE Range rows_of(int half) const { return {first_row(half), end_row(half) - 1}; }
  TESSERA_DEVICE Range columns_of(int block) const {
    return {block * kCfg.cols, min((block + 1) * kCfg.cols, kCfg.transposed ? s.sq : s.sk) - 1};
  }
  TESSERA_DEVICE Range queries_of(int half, int block) const {
    return kCfg.transposed ? columns_of(block) : rows_of(half);
  }
  TESSERA_DEVICE Range keys_of(int half, int block) const {
    return kCfg.transposed ? rows_of(half) : columns_of(block);
  }
  template <bool kBlock>
  TESSERA_DEVICE bool sees(int q0, int q1, int k0, int k1) const {
    if (q0 > q1 || k0 > k1) return false;
    if (kBlock && p.block_mask.data) {
      const char* mask =
          static_cast<const char*>(p.block_mask.data) + p.block_mask.batch * batch + p.block_mask.head * head;
      return sees_some<kCfg.score>(p, s, mask, q0, q1, k0, k1);
    }
    const KeyRange keys = visible_keys<kCfg.score>(p, s, q0, q1).some;
    return keys.low <= k1 && k0 <= keys.high;
  }
};

}  // namespace tessera
