// What may carry out a plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::core {

struct Candidate {
  int32_t kernel;                                   // tessera_kernel
  std::string (*refuse)(const tessera_plan& plan);  // "" when it takes the problem; its sizes are filled in
  void (*configure)(tessera_plan& plan);            // of a problem that it takes: fills in what will run
  bool for_comparison = false;                      // serves on request by name alone
};

// Of a back end, in order of preference.
std::vector<const Candidate*> candidates_of(int32_t backend);

// What each of them says to a plan, which one was chosen for or is yet to be.
std::vector<tessera_candidate> answers(const tessera_plan& plan);

}  // namespace tessera::core
