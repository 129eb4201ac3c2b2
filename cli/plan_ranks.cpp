#include "plan_ranks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "error.hpp"
#include "options.hpp"
#include "tessera/distributed.hpp"

namespace tessera::cli {
namespace {

constexpr std::int32_t kAllUpTo = 8;  // ranks; of more ranks only the first is shown

std::int32_t number_of(const char* flag, const std::string& name, const char* (*name_of)(std::int32_t)) {
  std::string accepted;
  for (std::int32_t value = 0;; ++value) {
    const std::string known = name_of(value);
    if (known == "unknown") break;
    if (known == name) return value;
    accepted += (accepted.empty() ? "" : ", ") + known;
  }
  throw WrongUse(fmt::format("{}: '{}', accepted {}", flag, name, accepted));
}

std::int32_t fitting(const char* flag, std::int64_t value) {
  if (value >= 0 && value <= std::numeric_limits<std::int32_t>::max()) return static_cast<std::int32_t>(value);
  throw WrongUse(fmt::format("{}: {}, accepted 0 .. 2^31 - 1", flag, value));
}

// Refuses options that a schedule does not support.
void refuse_others(const ProblemSizes& sizes) {
  const auto refuse = [](const char* flag) {
    throw WrongUse(fmt::format(
        "{}: given with --ranks, which supports equal lengths of queries and keys, causal and a window", flag));
  };
  if (sizes.seqlen_k && *sizes.seqlen_k != sizes.seqlen_q) refuse("--sk");
  if (sizes.page_size) refuse("--page-size");
  for (const core::TensorField& field : core::kTensorFields) {
    if (sizes[field]) refuse(field.flag);
  }
}

tessera_ranks_problem problem_of(const RankOptions& o, const ProblemSizes& sizes, const tessera_problem& given) {
  tessera_ranks_problem problem;
  tessera_ranks_problem_init(&problem);
  problem.ranks = fitting("--ranks", *o.ranks);
  problem.strategy = number_of("--strategy", o.strategy, tessera_strategy_name);
  problem.layout = number_of("--layout", o.layout, tessera_rank_layout_name);
  problem.head_ranks = fitting("--head-ranks", o.head_ranks.value_or(0));
  problem.direction = given.direction;
  problem.dtype = sizes.dtype;
  problem.causal = given.causal;
  problem.window_left = given.window_left, problem.window_right = given.window_right;
  problem.num_sequences = static_cast<std::int64_t>(o.lengths.size());
  problem.lengths = o.lengths.data();
  problem.batch = o.lengths.size() == 1 ? sizes.batch : 1;
  problem.heads_q = sizes.heads_q, problem.heads_kv = sizes.heads_kv.value_or(sizes.heads_q);
  problem.head_dim = sizes.head_dim, problem.head_dim_v = sizes.head_dim_v.value_or(sizes.head_dim);
  problem.link_gbps = o.link_gbps.value_or(0), problem.network_gbps = o.network_gbps.value_or(0);
  problem.tflops_forward = o.tflops_forward.value_or(0), problem.tflops_backward = o.tflops_backward.value_or(0);
  problem.ranks_per_host = o.ranks_per_host.value_or(0);
  return problem;
}

}  // namespace

void RankOptions::add_to(CLI::App& command) {
  command.add_option("--ranks", ranks, "One batch over this many devices: each rank's schedule")->check(kInteger);
  command.add_option("--strategy", strategy, "With --ranks: auto, ring, all_to_all, mesh or all_gather")
      ->capture_default_str();
  command.add_option("--layout", layout, "With --ranks, the rows of each: contiguous, zig_zag or planned")
      ->capture_default_str();
  command.add_option("--lengths", lengths, "With --ranks, in place of --sq: the sequences of a packed batch")
      ->delimiter(',')
      ->check(kInteger);
  command.add_option("--head-ranks", head_ranks, "With --ranks, for mesh: ranks of a group, which divide the heads")
      ->check(kInteger);
  command.add_option("--rank", rank, "With --ranks: this rank's schedule alone")->check(kInteger);
  command.add_option("--ranks-per-host", ranks_per_host, "The model's: devices of a host (8)")->check(kInteger);
  command.add_option("--link-gbps", link_gbps, "The model's: GB/s each way between devices of a host (237)");
  command.add_option("--network-gbps", network_gbps, "The model's: the same between hosts (45)");
  command.add_option("--tflops-forward", tflops_forward, "The model's: of one device, forward (765)");
  command.add_option("--tflops-backward", tflops_backward, "The model's: of one device, backward (590)");
}

void RankOptions::refuse_without_ranks(const CLI::App& command) {
  for (const char* flag : {"--strategy", "--layout", "--lengths", "--head-ranks", "--rank", "--ranks-per-host",
                           "--link-gbps", "--network-gbps", "--tflops-forward", "--tflops-backward"}) {
    if (command.count(flag) > 0) throw WrongUse(fmt::format("{}: given without --ranks", flag));
  }
}

int show_ranks(const RankOptions& options, const ProblemSizes& sizes, const tessera_problem& problem, bool as_json) {
  refuse_others(sizes);
  RankOptions o = options;
  if (o.lengths.empty()) o.lengths = {sizes.seqlen_q};
  const tessera_ranks_problem of_ranks = problem_of(o, sizes, problem);
  tessera_ranks_plan plan{};
  check_status(tessera_make_ranks_plan(&of_ranks, &plan), {{"lengths", options.lengths.empty() ? "--sq" : "--lengths"},
                                                           {"ranks", "--ranks"},
                                                           {"strategy", "--strategy"},
                                                           {"head_ranks", "--head-ranks"}});
  const std::int32_t number_of_ranks = plan.problem.ranks;
  if (o.rank && (*o.rank < 0 || *o.rank >= number_of_ranks)) {
    throw WrongUse(fmt::format("--rank: {}, accepted 0 .. {}", *o.rank, number_of_ranks - 1));
  }
  std::vector<std::int32_t> shown(static_cast<std::size_t>(number_of_ranks <= kAllUpTo ? number_of_ranks : 1));
  std::iota(shown.begin(), shown.end(), 0);
  if (o.rank) shown = {static_cast<std::int32_t>(*o.rank)};
  if (as_json) {
    nlohmann::json all = nlohmann::json::parse(json(plan));
    for (const std::int32_t rank : shown) {
      const nlohmann::json schedule = nlohmann::json::parse(json(plan, rank));
      if (rank == shown.front()) all["chunks"] = schedule["chunks"];
      nlohmann::json& of_rank = all["schedules"].emplace_back();
      for (const char* key : {"rank", "first_head_q", "num_heads_q", "first_head_kv", "num_heads_kv", "steps"}) {
        of_rank[key] = schedule[key];
      }
    }
    fmt::print("{}\n", all.dump(2));
    return 0;
  }
  fmt::print("{}", describe(plan));
  for (const std::int32_t rank : shown) fmt::print("\n{}", describe(plan, rank));
  if (!o.rank && number_of_ranks > kAllUpTo)
    fmt::print("\n(--rank R shows another of the {} ranks)\n", number_of_ranks);
  return 0;
}

}  // namespace tessera::cli
