// The exact merge of partial results over disjoint sets of keys (tessera_combine; Flash-Decoding's second step).
#pragma once

#include "cpu/tile.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kCombineCols = 512;  // the largest head dimension

// Rows from row_begin on, of the batch * heads * rows that `p` describes, rows innermost.
inline void combine_rows(const CombineParams& p, int64_t row_begin, int64_t row_end) {
  alignas(64) float total[kCombineCols], part[kCombineCols];
  const int64_t padded = (p.head_dim_v + kLanes - 1) / kLanes * kLanes;
  for (int64_t index = row_begin; index < row_end; ++index) {
    const int64_t row = index % p.rows, head = index / p.rows % p.heads, batch = index / p.rows / p.heads;
    const char* lse_row = p.lse_parts + p.lse_part_batch * batch + p.lse_part_head * head + p.lse_part_row * row;
    const char* o_row = p.o_parts + p.o_part_batch * batch + p.o_part_row * row + p.o_part_head * head;
    const char* low_row =
        p.lse_low_parts + p.lse_low_part_batch * batch + p.lse_low_part_head * head + p.lse_low_part_row * row;
    const auto number = [](const char* at) { return *reinterpret_cast<const float*>(at); };
    char* const lse_out = p.lse + p.lse_batch * batch + p.lse_head * head + p.lse_row * row;
    char* const low_out = p.lse_low + p.lse_low_batch * batch + p.lse_low_head * head + p.lse_low_row * row;
    const int64_t parts = p.parts + (p.accum_o != nullptr);
    const auto lse_of = [&](int64_t n) { return number(n < p.parts ? lse_row + p.lse_part * n : lse_out); };
    const auto part_of = [&](int64_t n) -> LogSumExp {
      if (n == p.parts) return {number(lse_out), number(low_out)};
      return {lse_of(n), p.lse_low_parts ? number(low_row + p.lse_low_part * n) : 0.0f};
    };
    const auto above = [](const LogSumExp& a, const LogSumExp& b) {
      return a.high > b.high || (a.high == b.high && a.low > b.low);
    };
    // exp(a - b): a large number that both have in common is subtracted before anything is rounded.
    const auto exp_difference = [](const LogSumExp& a, const LogSumExp& b) {
      return __builtin_expf((a.high - b.high) + (a.low - b.low));
    };

    LogSumExp best{-infinity(), 0.0f};
    for (int64_t n = 0; n < parts; ++n) best = above(part_of(n), best) ? part_of(n) : best;
    if (best.high == -infinity()) best = {0.0f, 0.0f};
    float sum = 0;
    for (int64_t n = 0; n < parts; ++n) {
      if (lse_of(n) != -infinity()) sum += exp_difference(part_of(n), best);
    }
    const bool seen = sum != 0.0f;
    if (p.sink && seen) {
      const LogSumExp sink{*reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.sink) + p.sink_head * head),
                           0.0f};
      const LogSumExp joint = above(sink, best) ? sink : best;
      sum = sum * exp_difference(best, joint) + exp_difference(sink, joint);
      best = joint;
    }
    for (int64_t d = 0; d < padded; d += kLanes) store(total + d, VecF{});
    for (int64_t n = 0; n < parts && seen; ++n) {
      if (lse_of(n) == -infinity()) continue;
      const VecF weight = splat(exp_difference(part_of(n), best) / sum);
      const bool accumulated = n == p.parts;
      const char* const from = accumulated ? p.accum_o + p.accum_row * row + p.accum_head * head : o_row + p.o_part * n;
      with_float_elem(accumulated ? p.accum_dtype : p.part_dtype,
                      [&](auto elem) { read_row<decltype(elem)>(part, from, p.head_dim_v); });
      for (int64_t d = 0; d < padded; d += kLanes) store(total + d, fma(weight, load(part + d), load(total + d)));
    }
    char* out = p.o + p.o_batch * batch + p.o_row * row + p.o_head * head;
    with_float_elem(p.dtype, [&](auto elem) { write_row<decltype(elem)>(out, total, p.head_dim_v); });
    if (p.lse) {
      const double rest = double{best.low} + __builtin_logf(sum);
      const float high = seen ? static_cast<float>(double{best.high} + rest) : -infinity();
      *reinterpret_cast<float*>(lse_out) = high;
      if (!p.lse_low) continue;
      const float low = high - high == 0.0f ? static_cast<float>((double{best.high} - high) + rest) : 0.0f;
      *reinterpret_cast<float*>(low_out) = low;
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
