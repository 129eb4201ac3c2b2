// The gradient of a score program by reverse mode (Griewank and Walther, "Evaluating Derivatives", 2008, chapter 3).
#pragma once

#include <vector>

#include "core/score/program.hpp"

namespace tessera::core::score {

// One load of a floating-point tensor, whose element receives `adjoint`.
struct LoadGradient {
  int tensor;  // of `program`
  std::vector<int> indices;
  int adjoint;
};

struct Gradient {
  Program program;  // what the gradient needs of the score, and the gradient itself; kG is the gradient that comes in
  int d_s = -1;     // kG times d(new score) / d(s); -1: the new score does not depend on s
  std::vector<LoadGradient> loads;  // in the order of the program's operations; two loads of one tensor are two entries
};

// Where a derivative does not exist it is PyTorch's: of abs at 0 it is 0, of min and max at a tie half to each side, of
// floor 0; where selects, so what is not taken gets 0, whatever its derivative is.
Gradient gradient(const Program& program);

}  // namespace tessera::core::score
