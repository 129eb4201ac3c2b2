// Program to text.
#pragma once

#include <string>
#include <vector>

#include "core/score/program.hpp"

namespace tessera::core::score {

// The canonical text of the value at `root`, which parses back to the same program: fewest parentheses, explicit
// conversions, what is used more than once as a statement of its own ("v0 = ...; ").
std::string to_text(const Program& program, int root);

// The same of several values, which share their statements.
struct Texts {
  std::string statements;  // "v0 = ...; v1 = ...; "
  std::vector<std::string> values;
};
Texts to_texts(const Program& program, const std::vector<int>& roots);

// What a kernel is compiled for: the language's version, the canonical score and mask, and what they name with types and ranks,
// a line each.
std::string key(const Program& program);

}  // namespace tessera::core::score
