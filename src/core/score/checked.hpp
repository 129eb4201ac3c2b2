// A parsed program and what is derived from it, created once for each text and shared by all its users.
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
  Gradient gradient;  // its program's tensors and scalars have the same indices as those of `program`
  std::string text;   // key(program), from which read() creates the same program again
  uint64_t hash;      // of `text`, never 0
  // The mask as a program of its own, for kernels that read no more; NULL: there is no mask, or nothing else.
  std::shared_ptr<const Checked> mask_alone;
};

// INVALID_ARGUMENT if a limit is exceeded (check), or if `text` is not a key() (read). `result` is then unchanged.
tessera_status check(const Program& program, std::shared_ptr<const Checked>& result);
tessera_status read(std::string_view text, std::shared_ptr<const Checked>& result);

// "d_s = ...\nd_bias[h, i - j + 512] += ...\n": the derivative, one line for each result.
std::string gradient_text(const Checked& checked);

}  // namespace tessera::core::score
