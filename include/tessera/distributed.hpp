// Attention over one batch on many ranks: plans and schedules as plain data, see tessera/distributed.h. Header only.
//
//   tessera::RanksProblem problem;
//   problem.ranks = 4;
//   problem.causal = true;
//   problem.heads_q = 32, problem.heads_kv = 8, problem.head_dim = 128;
//   const std::int64_t lengths[] = {131072};
//   problem.lengths = lengths, problem.num_sequences = 1;
//   const tessera::RanksPlan plan = tessera::plan_ranks(problem);
//   for (const tessera_rank_step& step : tessera::RankSchedule(plan, my_rank).steps()) ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/distributed.h"
#include "tessera/status.hpp"

namespace tessera {

// The sequence lengths, heads, masks and ranks of a problem. `lengths` must outlive the plan.
struct RanksProblem : tessera_ranks_problem {
  RanksProblem() : tessera_ranks_problem{} { tessera_ranks_problem_init(this); }
  RanksProblem(const tessera_ranks_problem& problem) : tessera_ranks_problem(problem) {}  // NOLINT: the same plain data
};

struct RanksPlan : tessera_ranks_plan {
  RanksPlan() : tessera_ranks_plan{} {}
  RanksPlan(const tessera_ranks_plan& plan) : tessera_ranks_plan(plan) {}  // NOLINT: the same plain data
};

// Leaves `plan` untouched unless the status is ok.
inline Status try_plan_ranks(const tessera_ranks_problem& problem, RanksPlan& plan) {
  return tessera_make_ranks_plan(&problem, &plan);
}

// Throws Error: invalid_argument names the member that breaks a rule, unsupported says why the strategy cannot be used.
inline RanksPlan plan_ranks(const tessera_ranks_problem& problem) {
  RanksPlan plan;
  throw_if_error(try_plan_ranks(problem, plan));
  return plan;
}

// One rank's list of steps. Throws Error if `rank` is not a rank of the plan.
class RankSchedule {
 public:
  RankSchedule(const tessera_ranks_plan& plan, std::int32_t rank)
      : block_(tessera_ranks_schedule_bytes(&plan, rank) / sizeof(std::uint64_t) + 1) {
    throw_if_error(tessera_ranks_schedule(&plan, rank, block_.data(), block_.size() * sizeof(std::uint64_t)));
  }

  const tessera_rank_schedule& header() const { return *reinterpret_cast<const tessera_rank_schedule*>(block_.data()); }
  std::span<const tessera_chunk> chunks() const {
    return list<tessera_chunk>(header().chunks_offset, 0, header().num_chunks);
  }
  std::span<const tessera_rank_step> steps() const {
    return list<tessera_rank_step>(header().steps_offset, 0, header().num_steps);
  }
  std::span<const tessera_rank_pair> pairs(const tessera_rank_step& step) const {
    return list<tessera_rank_pair>(header().pairs_offset, step.first_pair, step.num_pairs);
  }
  std::span<const tessera_rank_transfer> transfers(const tessera_rank_step& step) const {
    return list<tessera_rank_transfer>(header().transfers_offset, step.first_transfer, step.num_transfers);
  }

 private:
  template <class T>
  std::span<const T> list(std::int64_t offset, std::int64_t first, std::int64_t count) const {
    const auto* bytes = reinterpret_cast<const std::byte*>(block_.data()) + offset;
    return {reinterpret_cast<const T*>(bytes) + first, static_cast<std::size_t>(count)};
  }

  std::vector<std::uint64_t> block_;
};

namespace detail {
inline std::string text_of(const tessera_ranks_plan& plan, std::int32_t rank,
                           std::size_t (*write)(const tessera_ranks_plan*, std::int32_t, char*, std::size_t)) {
  std::string text(write(&plan, rank, nullptr, 0), '\0');
  write(&plan, rank, text.data(), text.size() + 1);
  return text;
}
}  // namespace detail

// The plan as several lines of text; with a rank, its schedule as a table.
inline std::string describe(const tessera_ranks_plan& plan, std::int32_t rank = -1) {
  return detail::text_of(plan, rank, tessera_ranks_plan_describe);
}

// The plan as one JSON object; with a rank, including its schedule.
inline std::string json(const tessera_ranks_plan& plan, std::int32_t rank = -1) {
  return detail::text_of(plan, rank, tessera_ranks_plan_json);
}

}  // namespace tessera
