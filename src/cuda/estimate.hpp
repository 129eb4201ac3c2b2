// What families' estimates of a call's time have in common. Each family has a table of its own of what was measured; these are the
// sizes that the tables are multiplied by. An estimate is there to compare kernels by: it counts the longest sequences that the plan
// allows, no options, and of each kernel what bounds it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/geometry.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// What any call takes beside its keys.
inline constexpr double kCallUs = 5;
// How many times its estimate a family counts where it leaves most of the GPU idle, or where nothing was measured: so that a kernel
// that was measured to be right there is chosen.
inline constexpr double kIdleFactor = 16;
// From so many keys on it pays to split them among multiprocessors.
inline constexpr int64_t kSplitKeys = 512;

// The row of a plan's head size, of rows in ascending order. The last one serves all that are larger.
template <class Row, size_t kRows>
const Row& row_of(const Row (&rows)[kRows], const tessera_plan& plan) {
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  const Row* const found =
      std::find_if(rows, rows + kRows - 1, [&](const Row& row) { return head_dim <= row.head_dim; });
  return *found;
}

inline int64_t group_of(const tessera_plan& plan) { return plan.heads_q / std::max<int64_t>(1, plan.heads_kv); }
// Of the longest sequence.
inline int64_t rows_of_kv_head(const tessera_plan& plan) { return plan.max_seqlen_q * group_of(plan); }
inline auto kv_heads(const tessera_plan& plan) { return static_cast<double>(plan.batch * plan.heads_kv); }
inline auto cores_of(const tessera_plan& plan) { return static_cast<double>(std::max(1, plan.device.cores)); }

// Queries of a sequence, of packed ones in the mean.
inline int64_t mean_queries(const tessera_plan& plan) {
  if (!core::packed_q(plan.problem)) return plan.max_seqlen_q;
  return core::sizes(plan.problem).rows_q / std::max<int64_t>(1, plan.batch);
}

// Fewer than half as many tokens as a batch of the longest sequences: most have few.
inline bool most_have_few(const tessera_plan& plan) {
  return core::packed_q(plan.problem) && 2 * core::sizes(plan.problem).rows_q < plan.batch * plan.max_seqlen_q;
}

// The part of the scores that causal and a window leave, as the plan's FLOPs have it.
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

// Of a forward call that takes so many nanoseconds for a key of every sequence.
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
