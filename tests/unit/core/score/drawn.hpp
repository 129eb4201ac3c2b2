// Drawn score programs, over the names of World (definitions.hpp).
#pragma once

#include <random>
#include <string>

#include "core/score/program.hpp"

namespace tessera::testing {

// A random expression of a type, at most `depth` deep.
std::string expression(core::score::Type type, int depth, std::mt19937_64& random);

}  // namespace tessera::testing
