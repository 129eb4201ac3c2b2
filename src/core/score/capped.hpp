// Scores that depend on a pair by one hyperbolic tangent alone, as softcaps do: score = outer(tanh(inner)). A kernel
// makes all inner values of a tile first, since tanh costs a third where all of them are small.
#pragma once

#include <optional>

#include "core/score/program.hpp"

namespace tessera::core::score {

struct Capped {
  int inner;  // index of a float that depends on s
  int tanh;   // index of its hyperbolic tangent: what else the score depends on is the same for all pairs of a head
};

// nullopt: the score is no such function.
std::optional<Capped> capped_of(const Program& program);

}  // namespace tessera::core::score
