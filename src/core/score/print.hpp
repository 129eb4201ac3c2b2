// Program to text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/score/program.hpp"

namespace tessera::core::score {

// The canonical text of the value at `root`, which parses back to the same program: the fewest parentheses, explicit
// conversions, and a statement of its own ("v0 = ...; ") for each value that is used more than once.
std::string to_text(const Program& program, int root);

// The same for several values with common statements.
struct Texts {
  std::string statements;  // "v0 = ...; v1 = ...; "
  std::vector<std::string> values;
};
Texts to_texts(const Program& program, const std::vector<int>& roots);

// The text that identifies a compiled kernel: the language's version, the canonical score and mask, and the names in
// them with types and ranks, one line each.
std::string key(const Program& program);

// Whether the program of a key changes the score; false: it only hides keys.
bool key_changes_score(std::string_view key);

}  // namespace tessera::core::score
