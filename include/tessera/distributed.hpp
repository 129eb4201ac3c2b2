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
//
// and their execution, over NCCL on GPUs or between threads on the CPU:
//
//   tessera::Communicator communicator = tessera::nccl_communicator(comm);     // an ncclComm_t
//   problem.direction = TESSERA_BACKWARD;                                      // both passes
//   const tessera::RanksAttention attention(problem, my_rank, {}, &gpu);
//   attention.forward(communicator, {.q = q, .k = k, .v = v, .o = o, .lse = lse, .saved = saved}, workspace, &on_gpu);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

// ---- execution ------------------------------------------------------------------------------------------------------

// One rank's connection with the others; one call at a time uses it. See tessera_communicator.
class Communicator {
 public:
  explicit Communicator(tessera_communicator* made) : made_(made) {}
  tessera_communicator* get() const { return made_.get(); }

 private:
  struct Destroy {
    void operator()(tessera_communicator* made) const { tessera_communicator_destroy(made); }
  };
  std::unique_ptr<tessera_communicator, Destroy> made_;
};

// Over NCCL. The caller keeps `comm`, an ncclComm_t, alive. Throws Error: unsupported says that NCCL is missing or too
// old, and what to install.
inline Communicator nccl_communicator(ncclComm* comm) {
  tessera_communicator* made = nullptr;
  throw_if_error(tessera_communicator_nccl(comm, &made));
  return Communicator(made);
}

// For `ranks` threads of this process and calls on the CPU: element r is that of rank r.
inline std::vector<Communicator> thread_communicators(std::int32_t ranks) {
  std::vector<tessera_communicator*> made(ranks > 0 ? static_cast<std::size_t>(ranks) : 0);
  throw_if_error(tessera_communicator_threads(ranks, made.data()));
  std::vector<Communicator> communicators;
  for (tessera_communicator* one : made) communicators.emplace_back(one);
  return communicators;
}

using RanksOptions = tessera_ranks_options;
using RanksBuffers = tessera_ranks_buffers;

// One rank's part of an attention, see tessera_ranks_attention. It serves any number of calls.
class RanksAttention {
 public:
  // problem.direction: forward, or backward for both passes. device nullptr: this machine's CPU. Throws Error.
  RanksAttention(const tessera_ranks_problem& problem, std::int32_t rank, const RanksOptions& options = {},
                 const tessera_device* device = nullptr) {
    tessera_ranks_attention* made = nullptr;
    throw_if_error(tessera_ranks_attention_create(&problem, &options, device, rank, &made));
    made_.reset(made);
  }

  // Its chosen strategy, and with RankSchedule its chunks and steps. Throws Error if the direction is not prepared.
  const tessera_ranks_plan& plan(tessera_direction direction = TESSERA_FORWARD) const {
    const tessera_ranks_plan* const plan = tessera_ranks_attention_plan(made_.get(), direction);
    if (!plan) throw Error(Code::invalid_argument, "direction: backward, accepted what the attention is prepared for");
    return *plan;
  }
  std::size_t workspace_bytes(tessera_direction direction = TESSERA_FORWARD) const {
    return tessera_ranks_workspace_bytes(made_.get(), direction);
  }
  std::size_t saved_bytes() const { return tessera_ranks_saved_bytes(made_.get()); }

  // Every rank makes the same calls in the same order. On a GPU they return at once.
  Status try_forward(const Communicator& communicator, const RanksBuffers& buffers, std::span<std::byte> workspace,
                     const tessera_executor* executor = nullptr) const {
    return tessera_ranks_forward(made_.get(), communicator.get(), &buffers, workspace.data(), workspace.size(),
                                 executor);
  }
  Status try_backward(const Communicator& communicator, const RanksBuffers& buffers, std::span<std::byte> workspace,
                      const tessera_executor* executor = nullptr) const {
    return tessera_ranks_backward(made_.get(), communicator.get(), &buffers, workspace.data(), workspace.size(),
                                  executor);
  }
  // The same, throwing Error.
  void forward(const Communicator& communicator, const RanksBuffers& buffers, std::span<std::byte> workspace,
               const tessera_executor* executor = nullptr) const {
    throw_if_error(try_forward(communicator, buffers, workspace, executor));
  }
  void backward(const Communicator& communicator, const RanksBuffers& buffers, std::span<std::byte> workspace,
                const tessera_executor* executor = nullptr) const {
    throw_if_error(try_backward(communicator, buffers, workspace, executor));
  }

 private:
  struct Destroy {
    void operator()(tessera_ranks_attention* made) const { tessera_ranks_attention_destroy(made); }
  };
  std::unique_ptr<tessera_ranks_attention, Destroy> made_;
};

}  // namespace tessera
