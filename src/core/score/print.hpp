// Program to text.
#pragma once

#include <string>

#include "core/score/program.hpp"

namespace tessera::core::score {

// The canonical text of the value at `root`, which parses back to the same program: fewest parentheses, explicit
// conversions, what is used more than once as a statement of its own ("v0 = ...; ").
std::string to_text(const Program& program, int root);

// What a kernel is compiled for: the canonical texts, with the types and ranks of what they name.
std::string key(const Program& program);

}  // namespace tessera::core::score
