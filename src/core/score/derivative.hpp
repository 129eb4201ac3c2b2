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
  // the values of the score that the gradient needs, and the gradient; kG is the gradient of the new score
  Program program;
  int d_s = -1;                     // kG times d(new score) / d(s); -1: the new score does not depend on s
  std::vector<LoadGradient> loads;  // in the order of the program's operations; two loads of one tensor are two entries
};

// If a derivative does not exist, the result is PyTorch's: 0 for abs at 0, half to each side for min and max at a tie,
// 0 for floor. where selects: the side that is not selected gets 0, whatever its derivative is.
Gradient gradient(const Program& program);

// The score and its slopes as values of one program, so that what both need is one value.
struct Slope {
  Program program;                  // begins with the values of the given program, and has its names
  int d_s = -1;                     // d(new score) / d(s); -1: the new score does not depend on s
  std::vector<LoadGradient> loads;  // as in Gradient; `adjoint` is d(new score) / d(element)
};
Slope slope(const Program& program);

}  // namespace tessera::core::score
