// Lowers a score program and its bound names to the list of steps that the kernels run.
#pragma once

#include <span>
#include <vector>

#include "core/score/derivative.hpp"
#include "cpu/score/code.hpp"

namespace tessera::cpu {

// Owns the data of a ScoreCode. A value that is the same for all pairs of a call, a query or a key is computed once for
// it.
class LoweredScore {
 public:
  LoweredScore() = default;
  // `tensors`, `scalars`: bound to the program's names, in its order.
  LoweredScore(const core::score::Program& program, std::span<const CodeTensor> tensors,
               std::span<const double> scalars);
  // The gradient; `loads` selects the tensors whose loads it includes.
  LoweredScore(const core::score::Gradient& gradient, std::span<const CodeTensor> tensors,
               std::span<const double> scalars, std::span<const bool> loads);

  ScoreCode code() const;  // points into this object

 private:
  // Roots are the results. `in_place`: the one that may take the place of the rows of s; -1: none.
  void lower(const core::score::Program& program, std::span<const double> scalars, const std::vector<int>& roots,
             int in_place);

  std::vector<CodeStep> steps_;
  std::vector<CodeTensor> tensors_;
  std::vector<CodeGradient> gradients_;
  std::vector<CodePlace> places_;  // of the program's values; none for a value that no result needs
  CodePlace score_, mask_, d_s_;
  int32_t ends_[kCodeLevels] = {}, registers_[kCodeLevels] = {};
};

}  // namespace tessera::cpu
