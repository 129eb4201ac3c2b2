// A program that was parsed, with what follows from it: made once for a text, and the same object for all who have that text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/score/derivative.hpp"
#include "core/score/program.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

struct Checked {
  Program program;
  Gradient gradient;  // its program's tensors and scalars are those of `program`, in the same places
  std::string text;   // key(program), of which read() makes the same program again
  uint64_t hash;      // of `text`, never 0
};

// INVALID_ARGUMENT: a limit, or what no key() has. `result` is then untouched.
tessera_status check(const Program& program, std::shared_ptr<const Checked>& result);
tessera_status read(std::string_view text, std::shared_ptr<const Checked>& result);

// "d_s = ...\nd_bias[h, i - j + 512] += ...\n": the derivative, a line for each result.
std::string gradient_text(const Checked& checked);

}  // namespace tessera::core::score
