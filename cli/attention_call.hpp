// One call of the library on the program's tensors: describe, plan, execute.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "core/fields.hpp"
#include "options.hpp"
#include "score_options.hpp"
#include "tensor.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

// The tensors of a call, absent ones empty: tensors["q"]. Copies share memory.
class AttentionTensors {
 public:
  Tensor& operator[](core::TensorName name) { return tensors_[name.index]; }
  const Tensor& operator[](core::TensorName name) const { return tensors_[name.index]; }
  Tensor& operator[](const core::TensorField& field) { return tensors_[&field - core::kTensorFields]; }
  const Tensor& operator[](const core::TensorField& field) const { return tensors_[&field - core::kTensorFields]; }

  // The layouts of the tensors that are present and that the problem's direction uses.
  void describe(tessera_problem& problem) const;
  tessera_buffers buffers() const;
  std::vector<ArgumentName> names() const;  // the present tensors' names in messages

  std::shared_ptr<ScoreProgram> program;  // NULL: none

 private:
  std::array<Tensor, core::kNumTensors> tensors_;
};

struct CallResult {
  tessera_plan plan{};
  double seconds = 0;
};

// Runs one direction. Throws WrongUse or Failure.
CallResult run_attention(const AttentionTensors& tensors, const AttentionOptions& options, const tessera_device& device,
                         tessera_direction direction);

}  // namespace tessera::cli
