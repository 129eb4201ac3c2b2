// What may carry out a plan.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/tessera.h"

namespace tessera::core {

struct Candidate {
  int32_t kernel;                                   // tessera_kernel
  std::string (*refuse)(const tessera_plan& plan);  // "" when it can do the problem; its sizes are filled in
  void (*configure)(tessera_plan& plan);            // of a problem that it can do: fills in what will run
  double (*estimate_us)(const tessera_plan& plan);  // likewise: how long it would take, from its own table
  bool for_comparison = false;                      // serves on request by name alone
};

}  // namespace tessera::core
