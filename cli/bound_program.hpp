// A score program from the command line with the tensors and scalars that its names stand for.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/score/program.hpp"
#include "score_options.hpp"

namespace tessera::cli {

struct BoundProgram {
  explicit BoundProgram(std::shared_ptr<const ScoreProgram> program);
  // Another program over the same names: a gradient.
  BoundProgram(std::shared_ptr<const ScoreProgram> program, core::score::Program other);

  // Element `index` of a tensor of `program`; `read` false: the index is outside, and the element counts as 0.
  double element(int tensor, const std::int64_t* index, bool& read) const;

  std::shared_ptr<const ScoreProgram> given;
  core::score::Program program;
  std::vector<std::size_t> tensors;  // of each name of `program`: its place in given->tensors
  std::vector<double> scalars;       // of each name of `program`

 private:
  void bind();
};

}  // namespace tessera::cli
