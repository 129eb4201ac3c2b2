// The exact merge of partial results over disjoint sets of keys (tessera_combine; Flash-Decoding's second step).
#pragma once

#include "cpu/tile.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kCombineCols = 512;  // the largest head dimension

// Rows row_begin ... of the batch * heads * rows that `p` describes, rows innermost.
inline void combine_rows(const CombineParams& p, int64_t row_begin, int64_t row_end) {
  alignas(64) float total[kCombineCols], part[kCombineCols];
  const int64_t padded = (p.head_dim_v + kLanes - 1) / kLanes * kLanes;
  for (int64_t index = row_begin; index < row_end; ++index) {
    const int64_t row = index % p.rows, head = index / p.rows % p.heads, batch = index / p.rows / p.heads;
    const char* lse_row = p.lse_parts + p.lse_part_batch * batch + p.lse_part_head * head + p.lse_part_row * row;
    const char* o_row = p.o_parts + p.o_part_batch * batch + p.o_part_row * row + p.o_part_head * head;
    const auto lse_of = [&](int64_t n) { return *reinterpret_cast<const float*>(lse_row + p.lse_part * n); };

    float best = -infinity();
    for (int64_t n = 0; n < p.parts; ++n) best = lse_of(n) > best ? lse_of(n) : best;
    float sum = 0;
    for (int64_t n = 0; n < p.parts; ++n) {
      if (lse_of(n) != -infinity()) sum += __builtin_expf(lse_of(n) - (best == -infinity() ? 0.0f : best));
    }
    const bool seen = sum != 0.0f;
    if (p.sink && seen) {
      const float sink = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.sink) + p.sink_head * head);
      const float joint = sink > best ? sink : best;
      sum = sum * __builtin_expf(best - joint) + __builtin_expf(sink - joint);
      best = joint;
    }
    for (int64_t d = 0; d < padded; d += kLanes) store(total + d, VecF{});
    for (int64_t n = 0; n < p.parts && seen; ++n) {
      if (lse_of(n) == -infinity()) continue;
      const VecF weight = splat(__builtin_expf(lse_of(n) - best) / sum);
      with_float_elem(p.part_dtype,
                      [&](auto elem) { read_row<decltype(elem)>(part, o_row + p.o_part * n, p.head_dim_v); });
      for (int64_t d = 0; d < padded; d += kLanes) store(total + d, fma(weight, load(part + d), load(total + d)));
    }
    char* out = p.o + p.o_batch * batch + p.o_row * row + p.o_head * head;
    with_float_elem(p.dtype, [&](auto elem) { write_row<decltype(elem)>(out, total, p.head_dim_v); });
    if (p.lse) {
      float* lse = reinterpret_cast<float*>(p.lse + p.lse_batch * batch + p.lse_head * head + p.lse_row * row);
      *lse = seen ? best + __builtin_logf(sum) : -infinity();
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
