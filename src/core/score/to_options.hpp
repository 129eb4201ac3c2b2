// Moves the parts of a program that the library's options can express from the program to the options: masks by
// position become causal or a window, by which kernels skip tiles; a soft cap and ALiBi become the built-in ones. These
// parts then cost as much as the option, and every kernel that has the option serves them.
#pragma once

#include <span>

#include "core/score/program.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

// `tensors`: the names that the program's creator declared, number n of which is problem.captured[n]. Equal for every
// call of the problem. The result: which captured tensor has become problem.alibi_slopes, or -1.
int move_to_options(Program& program, std::span<const Name> tensors, tessera_problem& problem);

}  // namespace tessera::core::score
