// tessera plan --ranks: one batch on many devices, each rank's schedule and its predicted time.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sized_problem.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

struct RankOptions {
  std::optional<std::int64_t> ranks, rank, head_ranks, ranks_per_host;
  std::optional<double> link_gbps, network_gbps, tflops_forward, tflops_backward;
  std::string strategy = "auto", layout = "zig_zag";
  std::vector<std::int64_t> lengths;

  void add_to(CLI::App& command);
  bool asked() const { return ranks.has_value(); }
  // Throws WrongUse for a flag that needs --ranks.
  static void refuse_without_ranks(const CLI::App& command);
};

// `sizes` and `problem` as for one device, of which heads, sizes, dtype, direction, causal and the window are used.
int show_ranks(const RankOptions& options, const ProblemSizes& sizes, const tessera_problem& problem, bool json);

}  // namespace tessera::cli
