// Facts that follow from a program, by which kernels and plans decide.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/score/checked.hpp"

namespace tessera::core::score {

// A set of a pair's inputs: bit n is the operation Op(n), one of kS ... kG.
using InputSet = uint32_t;
constexpr InputSet input_bit(Op op) { return 1u << static_cast<int>(op); }

// The inputs that differ between the pairs of a head.
constexpr InputSet kPairInputs = input_bit(Op::kI) | input_bit(Op::kQPos) | input_bit(Op::kJ) | input_bit(Op::kS);

// Which pairs of one (b, h) read the same element of a load, so that their gradients must be summed.
enum class GradientPattern {
  kHead,      // all pairs
  kRow,       // all pairs of a query
  kColumn,    // all pairs of a key
  kDiagonal,  // all pairs with the same i - j
  kElement,   // no two pairs
  kGather     // anything else
};

// Of what else than pairs one by one the gradient of a load's element can be made.
enum class LoadSum {
  kProducts,   // of the sum over a head of dScore s: d(new score) / d(element) is s times a value of the head, and
               // d(new score) / ds, which dQ includes, is another: the sum is that of q . dQ, over the latter
  kDiagonals,  // of sums of dScore over pairs with the same i - j, for which d(new score) / d(element) is the same
  kPairs       // of nothing else
};

struct Facts {
  bool changes_score;    // false: the score is unchanged, the program only hides keys
  bool has_mask;         // false: every key is visible
  bool score_needs_s;    // the new score depends on the current one
  bool mask_needs_s;     // visibility depends on it
  bool reads_tensors;    // the score or the mask reads a tensor
  bool may_hide;         // for a finite score, up to 1e30 in magnitude, the new one may be -inf or NaN
  bool passes_gradient;  // the gradient of the current score is that of the new score, for every pair
  bool slope_needs_s;    // d(new score) / d(current score) depends on the current score
  bool affine;           // the new score is affine in the current one (affine.hpp), and no mask is given
  // The new score is the current one times a value that is the same for all pairs of a head, and visibility does not
  // depend on the score: a kernel includes the value in its scale.
  bool scales_by_head;
  // The only such load is of an element that all pairs of a head share, whose gradient is made of pairs (LoadSum), and
  // the slope by s does not depend on s.
  bool sums_by_head;
  // Affine, and what is added is a linear function of the key: the growth of a row's scores from keys to keys is known
  // ahead.
  bool grows_linearly;
  int gradient_loads;     // loads of floating-point tensors, each of which receives a gradient
  InputSet score_inputs;  // the inputs that the score, the mask and the gradients depend on
  InputSet mask_inputs;
  InputSet gradient_inputs;  // without kG
};

Facts facts_of(const Checked& checked);

// The inputs that the value at `place` depends on, other than by the value at `except`.
InputSet inputs_of(const Program& program, int place, int except = -1);

// For each value whether all pairs of one (b, h) with the same i - j have the same.
std::vector<bool> of_diagonal(const Program& program);

// For each value the sum of a multiple of i - j and of what is the same for all pairs of one (b, h): the multiple, 0
// included. None for all other values.
std::vector<std::optional<int>> steps_along_diagonal(const Program& program);

GradientPattern pattern_of(const Program& gradient, const LoadGradient& load);

// Of each load of the gradient.
std::vector<LoadSum> load_sums(const Checked& checked);

}  // namespace tessera::core::score
