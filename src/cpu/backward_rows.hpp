// The backward pass's preprocess and postprocess for each query: delta and the LSE before the products; dQ from its
// parts and dSink after them.
#pragma once

#include "cpu/tile.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

// Writes a row of d_q, d_k or d_v, or adds it to the row, which is then float32.
TESSERA_INLINE void write_gradient_row(const Params& p, char* out, float* row, int64_t cols) {
  if (p.accumulate) {
    const float* before = reinterpret_cast<const float*>(out);
    for (int64_t d = 0; d < cols; ++d) row[d] += before[d];
  }
  with_float_elem(p.d_dtype, [&](auto elem) { write_row<decltype(elem)>(out, row, cols); });
}

// The float32 accumulator of d_q's row `query` in this split.
TESSERA_INLINE float* dq_row(const Params& p, const Sequence& sequence, int64_t batch, int64_t head, int64_t split,
                             int64_t query) {
  if (p.acc_dq) {
    return p.acc_dq + ((split * p.heads_q + head) * p.rows_total + sequence.row_begin + query) * p.acc_dq_ld;
  }
  return reinterpret_cast<float*>(p.d_q.data + p.d_q.batch * batch + p.d_q.row * (sequence.q_begin + query) +
                                  p.d_q.head * head);
}

// Rows of one tile of one head, among the tiles of `p.sequences`: the sequence and the queries.
struct RowSpan {
  int64_t batch, head, begin, count;
};

TESSERA_INLINE RowSpan row_span(const Params& p, int64_t item) {
  const int64_t tiles = p.sequences[p.batch].tile_begin;
  const int64_t index = item % tiles;
  int64_t low = 0, high = p.batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.sequences[middle].tile_begin <= index ? low : high) = middle;
  }
  const int64_t begin = (index - p.sequences[low].tile_begin) * kBlockM;
  return {low, item / tiles, begin, min_of<int64_t>(kBlockM, p.sequences[low].sq - begin)};
}

// Preprocess: delta = rowsum(dO o O) - dLSE, and the LSE in the two parts that scores are exponentiated against. It
// processes as many rows at a time as a vector has lanes: their sums over the lanes are one transposition.
inline void prepare_rows(const Params& p, const RowSpan& span) {
  const Sequence& sequence = p.sequences[span.batch];
  for (int64_t begin = span.begin; begin < span.begin + span.count; begin += kLanes) {
    const int64_t count = min_of<int64_t>(kLanes, span.begin + span.count - begin), row = sequence.q_begin + begin;
    const char* o = p.o.data + p.o.batch * span.batch + p.o.row * row + p.o.head * span.head;
    const char* d_o = p.d_o.data + p.d_o.batch * span.batch + p.d_o.row * row + p.d_o.head * span.head;
    VecF sums[kLanes] = {};
    with_float_elem(p.dtype, [&](auto elem) {
      using Elem = decltype(elem);
      for (int64_t i = 0; i < count; ++i, o += p.o.row, d_o += p.d_o.row) {
        VecF sum{};
        int64_t d = 0;
        for (; d + kLanes <= p.head_dim_v; d += kLanes) {
          sum = fma(Elem::read(o + d * Elem::kBytes), Elem::read(d_o + d * Elem::kBytes), sum);
        }
        if (d < p.head_dim_v) {
          sum = fma(Elem::read(o + d * Elem::kBytes, p.head_dim_v - d),
                    Elem::read(d_o + d * Elem::kBytes, p.head_dim_v - d), sum);
        }
        sums[i] = sum;
      }
    });
    transpose(sums);
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
    }
    alignas(64) float deltas[kLanes];
    store(deltas, sums[0]);
    const char* lse_row = p.lse + p.lse_batch * span.batch + p.lse_head * span.head + p.lse_row * row;
    const char* low_row = p.lse_low + p.lse_low_batch * span.batch + p.lse_low_head * span.head + p.lse_low_row * row;
    const char* d_lse_row = p.d_lse + p.d_lse_batch * span.batch + p.d_lse_head * span.head + p.d_lse_row * row;
    const int64_t at = span.head * p.rows_total + sequence.row_begin + begin;
    for (int64_t i = 0; i < count; ++i) {
      const float lse = *reinterpret_cast<const float*>(lse_row + i * p.lse_row);
      const float d_lse = p.d_lse ? *reinterpret_cast<const float*>(d_lse_row + i * p.d_lse_row) : 0.0f;
      const float low = p.lse_low ? *reinterpret_cast<const float*>(low_row + i * p.lse_low_row) : 0.0f;
      const bool seen = lse != -infinity(), huge = seen && __builtin_fabsf(lse) >= p.huge_score;
      p.row_shift[at + i] = huge ? lse : 0.0f;
      p.row_lse[at + i] =
          seen ? static_cast<float>(((huge ? 0.0 : double{lse}) + double{low}) * p.units_log2) : infinity();
      p.row_delta[at + i] = seen ? deltas[i] - d_lse : 0.0f;
    }
  }
}
inline void backward_preprocess_item(const Params& p, int64_t item, char*) { prepare_rows(p, row_span(p, item)); }

// Postprocess: d_q = the sum of its parts, in order; and after the last tile, d_sink, one item for each head.
inline void backward_postprocess_item(const Params& p, int64_t item, char* scratch) {
  const int64_t dq_items = p.acc_dq && !p.rows_in_items ? p.sequences[p.batch].tile_begin * p.heads_q : 0;
  if (item >= dq_items) {
    const int64_t head = item - dq_items;
    const char* sink = reinterpret_cast<const char*>(p.sink) + p.sink_head * head;
    const double sink_score = *reinterpret_cast<const float*>(sink);
    // Computed from the LSE itself: if a sink is most of every row's sum, rows have the same rounding error in row_lse,
    // which would add up.
    const auto number_at = [](const char* data) { return double{*reinterpret_cast<const float*>(data)}; };
    double sum = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence& sequence = p.sequences[b];
      const float* delta = p.row_delta + head * p.rows_total + sequence.row_begin;
      const char* lse = p.lse + p.lse_batch * b + p.lse_head * head + p.lse_row * sequence.q_begin;
      const char* low = p.lse_low + p.lse_low_batch * b + p.lse_low_head * head + p.lse_low_row * sequence.q_begin;
      for (int64_t i = 0; i < sequence.sq; ++i) {
        const double high = number_at(lse + i * p.lse_row);
        if (high == -infinity()) continue;
        const double above = sink_score - high - (p.lse_low ? number_at(low + i * p.lse_low_row) : 0.0);
        sum -= static_cast<double>(__builtin_exp2f(static_cast<float>(above * p.units_log2)) * delta[i]);
      }
    }
    *reinterpret_cast<float*>(reinterpret_cast<char*>(p.d_sink) + p.d_sink_head * head) = static_cast<float>(sum);
    return;
  }
  const RowSpan span = row_span(p, item);
  const Sequence& sequence = p.sequences[span.batch];
  float* sum = reinterpret_cast<float*>(scratch);
  for (int64_t i = span.begin; i < span.begin + span.count; ++i) {
    for (int64_t d = 0; d < p.acc_dq_ld; d += kLanes) {
      VecF total = load(dq_row(p, sequence, span.batch, span.head, 0, i) + d);
      for (int64_t split = 1; split < p.num_splits; ++split) {
        total += load(dq_row(p, sequence, span.batch, span.head, split, i) + d);
      }
      store(sum + d, total);
    }
    char* out = p.d_q.data + p.d_q.batch * span.batch + p.d_q.row * (sequence.q_begin + i) + p.d_q.head * span.head;
    write_gradient_row(p, out, sum, p.head_dim);
  }
}

}  // namespace
}  // namespace tessera::cpu
