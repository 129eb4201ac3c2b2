// Moves what of a program the library's options can say from the program to them: masks by position become causal or a
// window, which let kernels skip tiles; a soft cap and ALiBi become the built-in ones. What is moved costs what the option
// costs, and every kernel that has the option serves it.
#pragma once

#include <span>

#include "core/score/program.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

// `tensors`: the names that the program's creator declared, number n of which is problem.captured[n]. Equal for every
// call of the problem. The result: which captured tensor has become problem.alibi_slopes, or -1.
int move_to_options(Program& program, std::span<const Name> tensors, tessera_problem& problem);

}  // namespace tessera::core::score
