// The candidates that may execute a plan.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/tessera.h"

namespace tessera::core {

struct Candidate {
  int32_t kernel;                                   // tessera_kernel
  std::string (*refuse)(const tessera_plan& plan);  // empty if it supports the problem; sizes are set
  void (*configure)(tessera_plan& plan);            // for a supported problem: fills in what will run
  bool for_comparison = false;                      // chosen only if requested by name
};

}  // namespace tessera::core
