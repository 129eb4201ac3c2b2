// Scores that are affine in the current one: score = factor s + term, where neither depends on s. A kernel computes
// such a score by one multiplication and addition on the product, whose scale the factor includes.
#pragma once

#include <optional>

#include "core/score/program.hpp"

namespace tessera::core::score {

struct Affine {
  Program program;  // the original one, whose operations keep their indices, and what factor and term need beside it
  int factor;       // index of a float
  int term;         // index of a float; -1: nothing is added
};

// Sums, differences, products and quotients are followed; nullopt: the score is not affine by these, or it is s itself,
// or does not depend on s.
std::optional<Affine> affine_of(const Program& program);

// Whether a float is a linear function of the key: over a range of keys, its largest value is at an end of the range.
bool is_linear_in_key(const Program& program, int place);

}  // namespace tessera::core::score
