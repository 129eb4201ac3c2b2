// A score program with what its names stand for in a call: what back ends get, and all that they get.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/score/checked.hpp"
#include "core/score/evaluate.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

struct BoundTensor {
  const void* data = nullptr;  // of a call; NULL of a plan
  int32_t dtype = 0;           // tessera_dtype
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride_bytes{};

  // Whether an index is inside: an element outside is never read, and counts as 0.
  bool holds(const int64_t* index) const {
    for (int axis = 0; axis < rank; ++axis) {
      if (index[axis] < 0 || index[axis] >= shape[axis]) return false;
    }
    return true;
  }
  int64_t elements() const {
    int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
    return count;
  }
  int64_t offset_bytes(const int64_t* index) const {
    int64_t offset = 0;
    for (int axis = 0; axis < rank; ++axis) offset += stride_bytes[axis] * index[axis];
    return offset;
  }
};

// Where the gradient of a tensor goes: as large as its tensor.
struct BoundGradient {
  bool wanted = false;
  void* data = nullptr;  // of a call; NULL of a plan
  int32_t dtype = 0;     // float32 or the tensor's
  std::array<int64_t, kMaxRank> stride_bytes{};
};

struct Bound {
  std::shared_ptr<const Checked> checked;
  // By their places in the tables of checked->program, which are those of the gradient's program, too. A tensor that is
  // declared and not used, whose gradient is wanted, comes after those that are used: its gradient is 0.
  int num_tensors = 0;
  std::array<BoundTensor, kMaxTensors> tensors;
  std::array<BoundGradient, kMaxTensors> gradients;
  std::array<double, kMaxScalars> scalars{};  // 0 of a plan

  const Program& program() const { return checked->program; }
  const Gradient& gradient() const { return checked->gradient; }
  bool wants_gradients() const {
    for (const BoundGradient& gradient : gradients) {
      if (gradient.wanted) return true;
    }
    return false;
  }
};

// An element as the oracle reads it: exact; of int64 the low 32 bits. The index is inside.
double load_element(const BoundTensor& tensor, const int64_t* index);

// `visit(index, n)` of every element, n in the order of the axes.
template <class Visit>
void for_each_element(const BoundTensor& tensor, const Visit& visit) {
  std::array<int64_t, kMaxRank> index{};
  const int64_t count = tensor.elements();
  for (int64_t n = 0; n < count; ++n) {
    int64_t rest = n;
    for (int axis = tensor.rank; axis-- > 0; rest /= tensor.shape[axis]) index[axis] = rest % tensor.shape[axis];
    visit(index.data(), n);
  }
}

// What the oracle's evaluation reads; `bound` must outlive it.
Bindings bindings_of(const Bound& bound);

inline bool has_program(const tessera_plan& plan) { return plan.program.text_bytes > 0; }

// Of a plan that has a program: without `buffers`, layouts alone.
Bound bind(const tessera_plan& plan, const tessera_buffers* buffers = nullptr);

// A tensor that a program names, or its gradient, as one of a call.
struct CapturedBuffer {
  std::string name;
  const tessera_layout* layout;
  const void* pointer;
  bool is_written;
};
std::vector<CapturedBuffer> captured_buffers(const tessera_plan& plan, const tessera_buffers& buffers);

// INVALID_ARGUMENT: a scalar is no value of its type.
tessera_status check_scalars(const tessera_plan& plan, const tessera_buffers& buffers);

}  // namespace tessera::core::score
