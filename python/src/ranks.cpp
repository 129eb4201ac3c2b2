#include "ranks.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "error.hpp"
#include "released_gil.hpp"
#include "tessera/distributed.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tessera::python {
namespace {

using Problem = tessera_ranks_problem;

struct Member {  // one of these
  const char* name;
  int32_t Problem::*count = nullptr;
  int64_t Problem::*size = nullptr;
  double Problem::*rate = nullptr;
  const char* (*name_of)(int32_t) = nullptr;  // the count's name
};

const char* direction_name(int32_t value) {
  constexpr const char* kNames[] = {"forward", "backward"};
  return value == 0 || value == 1 ? kNames[value] : "unknown";
}

constexpr Member kMembers[] = {
    {"strategy", &Problem::strategy, nullptr, nullptr, tessera_strategy_name},
    {"layout", &Problem::layout, nullptr, nullptr, tessera_rank_layout_name},
    {"direction", &Problem::direction, nullptr, nullptr, direction_name},
    {"dtype", &Problem::dtype, nullptr, nullptr, tessera_dtype_name},
    {"ranks", &Problem::ranks},
    {"head_ranks", &Problem::head_ranks},
    {"causal", &Problem::causal},
    {"window_left", nullptr, &Problem::window_left},
    {"window_right", nullptr, &Problem::window_right},
    {"batch", nullptr, &Problem::batch},
    {"heads_q", nullptr, &Problem::heads_q},
    {"heads_kv", nullptr, &Problem::heads_kv},
    {"head_dim", nullptr, &Problem::head_dim},
    {"head_dim_v", nullptr, &Problem::head_dim_v},
    {"chunk_rows", nullptr, &Problem::chunk_rows},
    {"tflops_forward", nullptr, nullptr, &Problem::tflops_forward},
    {"tflops_backward", nullptr, nullptr, &Problem::tflops_backward},
    {"link_gbps", nullptr, nullptr, &Problem::link_gbps},
    {"network_gbps", nullptr, nullptr, &Problem::network_gbps},
    {"memory_gbps", nullptr, nullptr, &Problem::memory_gbps},
    {"step_us", nullptr, nullptr, &Problem::step_us},
    {"overlap_loss", nullptr, nullptr, &Problem::overlap_loss},
    {"ranks_per_host", nullptr, &Problem::ranks_per_host},
};

int32_t number_of(const Member& member, const std::string& name) {
  std::string accepted;
  for (int32_t value = 0;; ++value) {
    const std::string known = member.name_of(value);
    if (known == "unknown") break;
    if (known == name) return value;
    accepted += (accepted.empty() ? "" : ", ") + known;
  }
  throw Error(std::string(member.name) + ": \"" + name.substr(0, 80) + "\", accepted " + accepted);
}

void set_member(Problem& problem, const std::string& name, nb::handle value) {
  for (const Member& member : kMembers) {
    if (name != member.name) continue;
    try {
      if (member.name_of)
        problem.*member.count = number_of(member, nb::cast<std::string>(value));
      else if (member.count)
        problem.*member.count = nb::cast<int32_t>(value);
      else if (member.size)
        problem.*member.size = nb::cast<int64_t>(value);
      else
        problem.*member.rate = nb::cast<double>(value);
    } catch (const nb::cast_error&) {
      throw Error(name + ": " + nb::cast<std::string>(nb::repr(value)).substr(0, 80) + ", accepted " +
                  (member.name_of ? "a name"
                   : member.rate  ? "a number"
                                  : "an integer"));
    }
    return;
  }
  throw Error(name + ": no member of a problem for ranks");
}

using Writer = size_t (*)(const tessera_ranks_plan*, int32_t, char*, size_t);

template <Writer write>
std::string text_of(const std::vector<int64_t>& lengths, int32_t rank, const nb::kwargs& members) {
  RanksProblem problem;
  for (const auto& [name, value] : members) set_member(problem, nb::cast<std::string>(name), value);
  problem.num_sequences = static_cast<int64_t>(lengths.size());
  problem.lengths = lengths.data();
  RanksPlan plan;
  tessera_status status;
  std::string text;
  {
    const ReleasedGil released;
    status = tessera_make_ranks_plan(&problem, &plan);
    if (status.code == TESSERA_OK) text = detail::text_of(plan, rank, write);
  }
  check(status);
  if (text.empty())
    throw Error("rank: " + std::to_string(rank) + ", accepted 0 .. " + std::to_string(plan.problem.ranks - 1));
  return text;
}

}  // namespace

void add_ranks(nb::module_& m) {
  m.def("ranks_plan", &text_of<tessera_ranks_plan_describe>, "lengths"_a, "rank"_a, "members"_a);
  m.def("ranks_plan_json", &text_of<tessera_ranks_plan_json>, "lengths"_a, "rank"_a, "members"_a);
}

}  // namespace tessera::python
