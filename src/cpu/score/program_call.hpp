// The score program of a plan or a call, prepared for the kernels.
#pragma once

#include <optional>
#include <vector>

#include "core/score/bound.hpp"
#include "core/score/evaluate.hpp"
#include "cpu/params.hpp"
#include "cpu/score/lower.hpp"

namespace tessera::cpu {

class ProgramCall {
 public:
  // For a call of a plan that has a program: `bound` is the program with the buffers.
  ProgramCall(const tessera_plan& plan, core::score::Bound bound);
  // For the plan: only sizes.
  explicit ProgramCall(const tessera_plan& plan) : ProgramCall(plan, core::score::bind(plan)) {}

  // Register floats of a thread, for rows of `vecs` vectors of `lanes`.
  int64_t floats(int64_t vecs, int64_t lanes) const;
  // Backward: the number of chains of work items, each of which sums the gradients of the program's tensors separately,
  // and the doubles of one chain; 0: no gradient is requested. There are as few chains as memory allows and as many as
  // keep the cores busy, independently of the number of threads.
  int64_t chains(const tessera_plan& plan) const;
  int64_t sums() const { return sums_; }

  void fill(Params& p) const;                    // pointers into this object; not program_sums
  int32_t shows(const ScoreBlock& block) const;  // see Params::program_shows
  // Writes the gradients of the tensors from the sums of all chains, in order: the items are independent of each other.
  int64_t gradient_items() const;
  void write_gradients(const double* sums, int64_t chains, int64_t item) const;

 private:
  core::score::Interval bound_of_elements(const core::score::BoundTensor& tensor,
                                          const core::score::Interval* index) const;

  core::score::Bound bound_;
  core::score::Program mask_;         // only the mask
  std::vector<size_t> mask_tensors_;  // indices of its names in bound_
  std::vector<double> mask_scalars_;
  int64_t group_;
  LoweredScore program_, only_mask_, only_score_, gradient_;
  ScoreCode program_code_{}, mask_code_{}, score_code_{}, gradient_code_{};
  bool mask_first_ = false;  // the mask is there and does not depend on the score
  bool backward_;
  int64_t items_of(int tensor) const;

  static constexpr int64_t kNoSums = -1;  // for a tensor without a gradient
  int64_t sums_ = 0;
  int64_t begin_[core::score::kMaxTensors] = {};
};

// For a plan that may have no program.
int64_t program_floats(const tessera_plan& plan, int64_t vecs, int64_t lanes);

}  // namespace tessera::cpu
