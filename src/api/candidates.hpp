// Who was asked for a plan, and what each said.
#pragma once

#include <cstdint>
#include <vector>

#include "core/candidate.hpp"
#include "tessera/tessera.h"

namespace tessera::api {

// Of a back end. Of those that take as long as another, the first is chosen.
const std::vector<const core::Candidate*>& candidates_of(int32_t backend);

// What each of them says to a plan, which one was chosen for or is yet to be.
std::vector<tessera_candidate> answers(const tessera_plan& plan);

}  // namespace tessera::api
