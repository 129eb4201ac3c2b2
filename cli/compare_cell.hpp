// One cell of `tessera compare`: Tessera and standard attention on the same inputs, at one length in one direction.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "peers/exact.hpp"
#include "peers/standard_attention.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

struct CellSettings {
  peers::AttentionShape shape;
  tessera_dtype dtype = TESSERA_FLOAT32;
  tessera_direction direction = TESSERA_FORWARD;
  tessera_device device{};
  std::int32_t host_threads = 1;          // for inputs and the float64 reference; Tessera has the device's
  int repeat = 3;                         // timed calls at most
  std::int64_t standard_limit_bytes = 0;  // standard attention that needs more is not run
  std::uint64_t seed = 1;
};

struct Side {
  double seconds = 0;  // median
  double gflops = 0;
  std::int64_t extra_bytes = 0;     // allocated beyond inputs and outputs
  std::int64_t resident_bytes = 0;  // growth of the process's peak resident memory, 0 where the system does not tell
  std::vector<std::pair<std::string, peers::ErrorStats>> errors;  // by output, against float64
  peers::ErrorStats error;                                        // all of them together
};

struct Cell {
  CellSettings settings;
  std::string kernel;
  Side tessera;
  std::optional<Side> standard;  // none: it was not run, as on a GPU
  std::int64_t standard_needs_bytes = 0;

  double speed_up() const { return standard ? standard->seconds / tessera.seconds : 0; }
};

// `report` is told what is being done. Throws WrongUse or Failure.
Cell measure_cell(const CellSettings& settings, const std::function<void(const std::string&)>& report);

}  // namespace tessera::cli
