// Drawn score programs, over the names of World (definitions.hpp).
#pragma once

#include <random>
#include <string>

#include "core/score/program.hpp"

namespace tessera::testing {

// A random expression of a type, at most `depth` deep.
std::string expression(core::score::Type type, int depth, std::mt19937_64& random);

// A random float expression whose value is moderate and has derivatives of any order by s and by the floats that it
// reads, at most `depth` deep.
std::string smooth_expression(int depth, std::mt19937_64& random);

// A random condition on integers and truth values alone, at most `depth` deep: no rounding decides it, and its loads
// are in range.
std::string exact_condition(int depth, std::mt19937_64& random);

// A text of parts of the language and of any bytes.
std::string bytes(std::mt19937_64& random);

}  // namespace tessera::testing
