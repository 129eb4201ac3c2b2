// What the families' estimates of a call's time have in common. Each family has a table of measurements of its own; the
// functions here are the sizes that the tables are multiplied by. An estimate serves to compare kernels: it counts the
// longest sequences that the plan allows, and no options.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/geometry.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// The time of a call without keys.
inline constexpr double kCallUs = 5;
// Factor of an estimate where a family leaves most of the GPU idle or was not measured, so that a kernel that was
// measured to be the right one is chosen.
inline constexpr double kIdleFactor = 16;
// Number of keys from which splitting them among multiprocessors pays.
inline constexpr int64_t kSplitKeys = 512;

// The row for a plan's head size. Rows are in ascending order, and the last one serves all larger sizes.
template <class Row, size_t kRows>
const Row& row_of(const Row (&rows)[kRows], const tessera_plan& plan) {
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  const Row* const found =
      std::find_if(rows, rows + kRows - 1, [&](const Row& row) { return head_dim <= row.head_dim; });
  return *found;
}

inline int64_t group_of(const tessera_plan& plan) { return plan.heads_q / std::max<int64_t>(1, plan.heads_kv); }
// Query rows of a KV head of the longest sequence.
inline int64_t rows_of_kv_head(const tessera_plan& plan) { return plan.max_seqlen_q * group_of(plan); }
inline auto kv_heads(const tessera_plan& plan) { return static_cast<double>(plan.batch * plan.heads_kv); }
inline auto cores_of(const tessera_plan& plan) { return static_cast<double>(std::max(1, plan.device.cores)); }

// Queries of a sequence; if packed, the mean.
inline int64_t mean_queries(const tessera_plan& plan) {
  if (!core::packed_q(plan.problem)) return plan.max_seqlen_q;
  return core::sizes(plan.problem).rows_q / std::max<int64_t>(1, plan.batch);
}

// Whether a packed batch has fewer than half as many queries as if all sequences had max_seqlen_q: most have few.
inline bool most_have_few(const tessera_plan& plan) {
  return core::packed_q(plan.problem) && 2 * core::sizes(plan.problem).rows_q < plan.batch * plan.max_seqlen_q;
}

// The visible part of the scores under causal and a window, as in the plan's FLOPs.
inline double visible_part(const tessera_plan& plan) {
  const core::Sizes size = core::sizes(plan.problem);
  const auto mean = [&](bool packed, int64_t rows, int64_t most) {
    return static_cast<double>(packed ? rows : plan.batch * most);
  };
  const double queries = mean(core::packed_q(plan.problem), size.rows_q, plan.max_seqlen_q);
  const double keys = mean(core::packed_k(plan.problem), size.rows_k, plan.max_seqlen_k);
  const double all = 2.0 * queries * keys / static_cast<double>(std::max<int64_t>(1, plan.batch)) *
                     static_cast<double>(plan.heads_q * (plan.head_dim + plan.head_dim_v));
  return all > 0 ? std::min(1.0, plan.flops / all) : 1.0;
}

// What kernels for tiles of many rows take longer for few rows than those that were made for these: their blocks read
// slowly, and a second launch merges split keys (one token of 8 heads over 1024 keys: fwd_sm80 20.5 us, decode_sm90
// 7.8, an H200). With fewer keys fwd_sm80 is the fastest.
inline double few_rows_us(const tessera_plan& plan) {
  constexpr double kUs = 12;
  constexpr int64_t kLeastKeys = 256;
  const bool measured = !plan.problem.batch_invariant && !plan.after_another && plan.max_seqlen_k >= kLeastKeys;
  return measured ? kUs : 0;
}

// Time of a forward call that takes `ns_a_key` for one key of every sequence.
inline double forward_us(const tessera_plan& plan, double ns_a_key) {
  return kCallUs + static_cast<double>(plan.max_seqlen_k) * visible_part(plan) * ns_a_key * 1e-3;
}

// TFLOP/s of a kernel on a GPU of 132 multiprocessors.
struct Rate {
  int head_dim;
  double tflops;
};
template <size_t kRows>
double us_at_rate(const tessera_plan& plan, const Rate (&rates)[kRows]) {
  constexpr double kMultiprocessors = 132;
  return kCallUs + plan.flops * 1e-6 / (row_of(rates, plan).tflops * cores_of(plan) / kMultiprocessors);
}

}  // namespace tessera::cuda
