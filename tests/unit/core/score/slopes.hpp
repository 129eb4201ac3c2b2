// Gradients of score programs beside central differences, in float64.
#pragma once

#include <random>
#include <string>

#include "core/score/definitions.hpp"

namespace tessera::testing {

// A pair of the world, drawn.
Pair drawn_pair(const World& world, std::mt19937_64& random);

// Compares the derivative of a program's score by s, and by each element that it reads, with slopes of the score at so
// many drawn pairs. "": they agree; otherwise the first that does not. Pairs whose score is not finite, or is too large
// for a difference to have digits, are left out. Elements of the world are moved and put back.
std::string wrong_gradient(World& world, const core::score::Program& program, std::mt19937_64& random, int pairs);

}  // namespace tessera::testing
