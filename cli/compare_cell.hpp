// One cell of `tessera compare`: Tessera and its peers on the same inputs, at one length in one direction.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "peers/exact.hpp"
#include "peers/standard_attention.hpp"
#include "score_options.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

// A peer's name and its description. On the CPU the peer is textbook standard attention on OpenBLAS; on a GPU peers are
// Tessera's own kernels for comparison, fwd_NAME and bwd_NAME.
struct Contestant {
  const char* name;
  const char* words;
  bool on_cpu;
};
std::span<const Contestant> contestants();
const Contestant* find_contestant(const std::string& name);

struct CellSettings {
  peers::AttentionShape shape;
  tessera_dtype dtype = TESSERA_FLOAT32;
  tessera_direction direction = TESSERA_FORWARD;
  tessera_device device{};
  std::int32_t host_threads = 1;  // for inputs and the float64 reference; Tessera has the device's
  int repeat = 3;                 // timed calls at most
  std::vector<const Contestant*> against;
  std::int64_t standard_limit_bytes = 0;  // a peer that needs more is not run
  std::uint64_t seed = 1;
  std::shared_ptr<ScoreProgram> program = nullptr;  // nullptr: none
};

struct Side {
  double seconds = 0;  // median
  double gflops = 0;
  std::int64_t extra_bytes = 0;     // allocated beyond inputs and outputs
  std::int64_t resident_bytes = 0;  // growth of the process's peak resident memory, 0 if unknown
  std::vector<std::pair<std::string, peers::ErrorStats>> errors;  // by output, against float64
  peers::ErrorStats error;                                        // all of them together
};

struct Other {
  const Contestant* contestant;
  std::optional<Side> side;      // none: not run
  std::int64_t needs_bytes = 0;  // 0: unsupported problem
  std::string refusal;           // why it is unsupported
};

struct Cell {
  CellSettings settings;
  std::string kernel;
  Side tessera;
  std::vector<Other> others;  // as in settings.against

  double speed_up(const Other& other) const { return other.side ? other.side->seconds / tessera.seconds : 0; }
};

// Calls `report` with progress messages. Throws WrongUse or Failure.
Cell measure_cell(const CellSettings& settings, const std::function<void(const std::string&)>& report);

}  // namespace tessera::cli
