// A score program bound to the tensors and scalars of a call. Back ends read nothing else of it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/geometry.hpp"
#include "core/score/checked.hpp"
#include "core/score/evaluate.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

struct BoundTensor {
  const void* data = nullptr;  // of a call; NULL for a plan
  int32_t dtype = 0;           // tessera_dtype
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride_bytes{};

  // Whether an index is inside. Elements outside are never read, and count as 0.
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

// The tensor that receives the gradient of a program's tensor, of the same shape.
struct BoundGradient {
  bool needed = false;
  void* data = nullptr;  // of a call; NULL for a plan
  int32_t dtype = 0;     // float32 or the tensor's
  std::array<int64_t, kMaxRank> stride_bytes{};
};

struct Bound {
  std::shared_ptr<const Checked> checked;
  // Indexed as the tables of checked->program and of the gradient's program. Tensors that are declared but not used,
  // and whose gradient is requested, follow the used ones; their gradient is 0.
  int num_tensors = 0;
  std::array<BoundTensor, kMaxTensors> tensors;
  std::array<BoundGradient, kMaxTensors> gradients;
  std::array<double, kMaxScalars> scalars{};  // 0 for a plan

  const Program& program() const { return checked->program; }
  const Gradient& gradient() const { return checked->gradient; }
  bool wants_gradients() const {
    for (const BoundGradient& gradient : gradients) {
      if (gradient.needed) return true;
    }
    return false;
  }
};

// An element as the oracle reads it: exact, for int64 the low 32 bits. The index must be inside.
double load_element(const BoundTensor& tensor, const int64_t* index);

// Calls `visit(index, n)` for every element, with n counted in the order of the axes.
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

// The bindings for the oracle's evaluation; `bound` must outlive them.
Bindings bindings_of(const Bound& bound);

// The inputs of query i and key j of the problem's sequence b and query head h, in numbers of the whole, without s.
inline Inputs inputs_of(const WholeHeads& whole, const Place& place, int64_t b, int64_t h, int64_t i, int64_t j) {
  Inputs inputs;
  inputs.b = b + whole.first_sequence;
  inputs.h = h + whole.first_head, inputs.h_kv = inputs.h / whole.group;
  inputs.i = i + place.first_q, inputs.j = j + place.first_k;
  inputs.q_pos = inputs.i + place.total_k - place.total_q;
  inputs.len_q = place.total_q, inputs.len_k = place.total_k;
  return inputs;
}

inline bool has_program(const tessera_plan& plan) { return plan.program.text_bytes > 0; }

// Whether the plan has a program that leaves the score as it is and only hides keys.
bool only_hides(const tessera_plan& plan);

// For a plan that has a program; without `buffers`, only layouts.
Bound bind(const tessera_plan& plan, const tessera_buffers* buffers = nullptr);

// A tensor that a program names, or its gradient, as a buffer of a call.
struct CapturedBuffer {
  std::string name;
  const tessera_layout* layout;
  const void* pointer;
  bool is_written;
};
std::vector<CapturedBuffer> captured_buffers(const tessera_plan& plan, const Bound& bound,
                                             const tessera_buffers& buffers);

// INVALID_ARGUMENT if a scalar is not a value of its type.
tessera_status check_scalars(const tessera_plan& plan, const Bound& bound);

}  // namespace tessera::core::score
