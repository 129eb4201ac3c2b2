// Programs that are options of the library: masks by position become ranges of visible keys, which let kernels skip tiles, and a soft
// cap becomes the built-in one. What is recognised costs what the option costs, and every kernel that has the option serves it.
#pragma once

#include "core/score/program.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

// Moves what `problem` can say in its options from the program to them; equal for every call of the problem. Terms of a mask,
// joined by &&, that bound j - q_pos (or j - i) by constants become causal or a window; C * tanh(s / C) becomes softcap where nothing
// but the scale comes before it, and only where nothing is left of the program then. False: there is nothing to move.
bool recognise(Program& program, tessera_problem& problem);

}  // namespace tessera::core::score
