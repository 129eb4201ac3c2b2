// What kernels and plans decide by: facts that follow from a program.
#pragma once

#include <cstdint>

#include "core/score/checked.hpp"

namespace tessera::core::score {

// A set of what a pair brings: bit n is the operation Op(n), one of kS ... kG.
using InputSet = uint32_t;
constexpr InputSet input_bit(Op op) { return 1u << static_cast<int>(op); }

// How the pairs of one (b, h) share the elements that a load reads, whose gradients are to be summed.
enum class GradientPattern {
  kHead,      // all pairs read one element
  kRow,       // all pairs of a query do
  kColumn,    // all pairs of a key
  kDiagonal,  // all pairs of the same i - j
  kElement,   // no two pairs do
  kGather     // anything else
};

struct Facts {
  bool changes_score;     // false: the score stays as it is
  bool has_mask;          // false: every key is visible
  bool score_needs_s;     // the new score depends on the score so far
  bool mask_needs_s;      // visibility does
  bool reads_tensors;     // score or mask reads one
  bool may_hide;          // of a finite score, however large to 1e30, the new one may be -inf or NaN
  bool passes_gradient;   // the gradient of the score so far is that of the new score, whatever the pair
  bool gradient_needs_s;  // gradients depend on the score so far
  int gradient_loads;     // loads of floating-point tensors, each of which receives a gradient
  InputSet score_inputs;  // of the score, the mask and the gradients: what of a pair they depend on
  InputSet mask_inputs;
  InputSet gradient_inputs;  // without kG
};

Facts facts_of(const Checked& checked);

// What the value at `place` depends on.
InputSet inputs_of(const Program& program, int place);

GradientPattern pattern_of(const Program& gradient, const LoadGradient& load);

}  // namespace tessera::core::score
