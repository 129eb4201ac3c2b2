// A tile of query rows: the query and head of every lane, and the keys that it sees.
#pragma once

#include <numbers>

#include "cpu/score/options.hpp"

namespace tessera::cpu {
namespace {

constexpr float kLog2e = std::numbers::log2e_v<float>, kLn2 = std::numbers::ln2_v<float>;

struct Tile {
  const Sequence* sequence;
  int64_t batch;
  int32_t count;  // query rows; lanes past the end repeat the last one
  int32_t vecs;   // vectors that hold them
  // Keys visible to at least one row, and those visible to every row; empty where low > high.
  int32_t some_low, some_high, all_low, all_high;
  bool started;        // a block of keys has been visited: stale_max, sum and the output tile are initialised
  bool has_stale_max;  // every lane's stale_max is finite and not huge
  bool huge;           // some lane's stale_max is huge (backward: its LSE); its scores use the general path
  bool passed_bound;   // the previous block exceeded the bound of the stale max
  bool consecutive;    // its rows are neighbouring queries of one head
  uint32_t
      // AMX, one bit a row: stale_max is the score of a key that the row sees, so its sum ends at 1 or above
      met_stale_max;
  alignas(64) int32_t query[kBlockM], head[kBlockM];
  alignas(64) int32_t low[kBlockM], high[kBlockM];  // keys low ... high are visible by position
  alignas(64) float stale_max[kBlockM];             // natural units; -inf before the first key
  // The number that scores are exponentiated against, which is the stale max in two parts: `shift` in natural units and
  // `offset` in log2 units.
  alignas(64) float shift[kBlockM], offset[kBlockM];
  alignas(64) float sum[kBlockM];  // of 2^(log2(e) (score - shift) - offset)
};

// The two parts of a number that scores are exponentiated against. One multiply-add converts a score to log2 units and
// subtracts the offset, whose rounding error is common to all weights of a row. For a huge number this error is worth
// powers of two, or the offset is not representable in float32. A huge number is therefore subtracted first, in the
// unit in which the scores are rounded, and its offset is 0.
struct Against {
  VecF shift, offset;
};
TESSERA_INLINE Against against(const Params& p, VecF number) {
  const VecI none = number == -infinity(), huge = (abs(number) >= p.huge_score) & ~none;
  return {select(huge, number, VecF{}), select(huge | none, VecF{}, number * kLog2e)};
}
TESSERA_INLINE Against against(const Tile& tile, int c) {
  return {load(tile.shift + c * kLanes), load(tile.offset + c * kLanes)};
}
TESSERA_INLINE bool is_huge(const Against& a) { return any(a.shift != 0.0f); }

// The exponent of a weight, from a score in natural units. `huge`: some lane's number is.
TESSERA_INLINE VecF exponent_of(VecF score, const Against& a, bool huge) {
  return fma(huge ? score - a.shift : score, splat(kLog2e), -a.offset);
}

// The factor of the sums if `to` replaces `from`; 0 if there was none.
TESSERA_INLINE VecF rescale_of(VecF old_max, const Against& from, const Against& to) {
  const VecF exponent = fma(from.shift - to.shift, splat(kLog2e), from.offset - to.offset);
  return select(old_max == -infinity(), VecF{}, exp2(exponent));
}

// Sets a new stale max of vector c.
TESSERA_INLINE Against set_stale_max(const Params& p, Tile& tile, int c, VecF next) {
  const Against a = against(p, next);
  store(tile.stale_max + c * kLanes, next);
  store(tile.shift + c * kLanes, a.shift);
  store(tile.offset + c * kLanes, a.offset);
  return a;
}

// A number in float32 and its rounding error.
struct LogSumExp {
  float high, low;
};
// log(sum) + shift + offset of a row that sees at least one key.
TESSERA_INLINE LogSumExp log_sum_exp(const Params& p, float shift, float offset, float sum_log2) {
  const double above = (double{offset} + sum_log2) / p.units_log2;
  const float high = static_cast<float>(double{shift} + above);
  const double low = (double{shift} - high) + above;
  return {high, high - high == 0.0f ? static_cast<float>(low) : 0.0f};
}

struct KeyRange {
  int64_t low, high;  // low ... high are visible, by causal, window and length
};

// Query i sees keys i + left ... i + right of `sk`.
struct KeyBand {
  int64_t left, right, sk;

  TESSERA_INLINE KeyBand(const Params& p, const Sequence& sequence) : sk(sequence.sk) {
    constexpr int64_t kUnbounded = int64_t{1} << 40;  // larger than any number of queries or keys
    left = sequence.diagonal - (p.window_left >= 0 ? p.window_left : kUnbounded);
    right =
        sequence.diagonal + min_of(sequence.causal ? 0 : kUnbounded, p.window_right >= 0 ? p.window_right : kUnbounded);
  }
  TESSERA_INLINE KeyRange of(int64_t query) const {
    return {min_of(max_of<int64_t>(0, query + left), sk), max_of<int64_t>(min_of(query + right, sk - 1), -1)};
  }
};

// Resets the softmax to the state before the first key.
TESSERA_INLINE void forget_softmax(Tile& tile) {
  for (int64_t lane = 0; lane < kBlockM; ++lane) {
    tile.stale_max[lane] = -infinity();
    tile.shift[lane] = tile.offset[lane] = tile.sum[lane] = 0.0f;
  }
}

// Rows of the sequence from row_begin on: row r is query r of `head` or, with packed heads, query r % sq of head `head`
// + r / sq.
inline void init_tile(Tile& tile, const Params& p, int64_t batch, int64_t head, int64_t row_begin, int64_t row_count) {
  const Sequence& sequence = p.sequences[batch];
  tile.sequence = &sequence;
  tile.batch = batch;
  tile.count = static_cast<int32_t>(row_count);
  tile.vecs = static_cast<int32_t>((row_count + kLanes - 1) / kLanes);
  tile.started = false;
  tile.has_stale_max = tile.passed_bound = tile.huge = false;
  tile.met_stale_max = 0;
  forget_softmax(tile);
  // Loops over lanes, which the compiler vectorises.
  const int64_t last = row_count - 1, first_head = p.pack_gqa ? row_begin / sequence.sq : 0;
  const int64_t first_query = row_begin - first_head * sequence.sq;
  tile.consecutive = !p.pack_gqa || first_query + last < sequence.sq;
  if (tile.consecutive) {
    for (int64_t lane = 0; lane < kBlockM; ++lane) {
      tile.query[lane] = static_cast<int32_t>(first_query + min_of(lane, last));
      tile.head[lane] = static_cast<int32_t>(head + first_head);
    }
  } else {
    for (int64_t lane = 0; lane < kBlockM; ++lane) {
      const int64_t row = row_begin + min_of(lane, last);
      tile.query[lane] = static_cast<int32_t>(row % sequence.sq);
      tile.head[lane] = static_cast<int32_t>(head + row / sequence.sq);
    }
  }
  const KeyBand band(p, sequence);
  for (int64_t lane = 0; lane < kBlockM; ++lane) {
    const KeyRange keys = band.of(tile.query[lane]);
    tile.low[lane] = static_cast<int32_t>(keys.low), tile.high[lane] = static_cast<int32_t>(keys.high);
  }
  int32_t some_low = 0x7fffffff, some_high = -1, all_low = 0, all_high = 0x7fffffff;
  for (int64_t lane = 0; lane < kBlockM; ++lane) {
    const int32_t low = tile.low[lane], high = tile.high[lane];
    const int32_t blind = low > high ? -1 : 0;  // all bits; a condition in the reduction would prevent vectorisation
    some_low = min_of(some_low, low | (blind & 0x7fffffff));
    some_high = max_of(some_high, high | blind);
    all_low = max_of(all_low, low), all_high = min_of(all_high, high);
  }
  tile.some_low = some_low, tile.some_high = some_high, tile.all_low = all_low;
  tile.all_high = static_cast<int32_t>(last_full_key(p, sequence, all_high));
}

TESSERA_INLINE char* row_at(const RowTensor& tensor, const Tile& tile, int64_t lane) {
  return tensor.data + tensor.batch * tile.batch + tensor.row * (tile.sequence->q_begin + tile.query[lane]) +
         tensor.head * tile.head[lane];
}

// The tile's rows in a tensor.
template <class Char>
TESSERA_INLINE void rows_of(Char* (&rows)[kBlockM], const RowTensor& tensor, const Tile& tile) {
  if (!tile.consecutive) {
    for (int64_t lane = 0; lane < tile.count; ++lane) rows[lane] = row_at(tensor, tile, lane);
    return;
  }
  char* row = row_at(tensor, tile, 0);
  for (int64_t lane = 0; lane < tile.count; ++lane, row += tensor.row) rows[lane] = row;
}

}  // namespace
}  // namespace tessera::cpu
