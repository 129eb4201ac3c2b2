// The candidates for a plan, and their answers.
#pragma once

#include <cstdint>
#include <vector>

#include "core/candidate.hpp"
#include "tessera/tessera.h"

namespace tessera::api {

// The candidates of a back end. Of those with equal estimates, the first is chosen.
const std::vector<const core::Candidate*>& candidates_of(int32_t backend);

// The answer of each candidate to a plan, whether or not one has been chosen yet.
std::vector<tessera_candidate> answers(const tessera_plan& plan);

}  // namespace tessera::api
