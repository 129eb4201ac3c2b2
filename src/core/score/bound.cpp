#include "core/score/bound.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "core/convert.hpp"
#include "core/geometry.hpp"
#include "core/score/handle.hpp"
#include "core/score/print.hpp"
#include "core/status.hpp"

namespace tessera::core::score {
namespace {

// Whether the program of a plan reads captured[slot].
bool is_used(const uint8_t* used, int count, int slot) { return std::find(used, used + count, slot) != used + count; }

// A captured tensor of rank 0 is [1].
BoundTensor bound_tensor(const tessera_layout& layout, int rank, const void* data) {
  BoundTensor tensor;
  const int64_t bytes = static_cast<int64_t>(tessera_dtype_bytes(layout.dtype));
  tensor.data = data, tensor.dtype = layout.dtype, tensor.rank = rank;
  for (int axis = 0; axis < rank; ++axis) {
    const size_t n = static_cast<size_t>(axis);
    tensor.shape[n] = layout.shape[axis], tensor.stride_bytes[n] = layout.strides[axis] * bytes;
  }
  return tensor;
}

BoundGradient bound_gradient(const tessera_layout& layout, int rank, void* data) {
  const BoundTensor tensor = bound_tensor(layout, rank, data);
  return {present(layout), data, tensor.dtype, tensor.stride_bytes};
}

template <class T>
double at(const BoundTensor& tensor, const int64_t* index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(tensor.data) + tensor.offset_bytes(index), sizeof value);
  return static_cast<double>(value);
}

}  // namespace

double load_element(const BoundTensor& tensor, const int64_t* index) {
  switch (tensor.dtype) {
    case TESSERA_INT8:
      return at<int8_t>(tensor, index);
    case TESSERA_INT16:
      return at<int16_t>(tensor, index);
    case TESSERA_INT32:
      return at<int32_t>(tensor, index);
    case TESSERA_INT64: {
      int64_t value;
      std::memcpy(&value, static_cast<const char*>(tensor.data) + tensor.offset_bytes(index), sizeof value);
      return static_cast<int32_t>(static_cast<uint64_t>(value));
    }
    case TESSERA_UINT8:
      return at<uint8_t>(tensor, index);
    case TESSERA_BOOL:
      return at<uint8_t>(tensor, index) != 0;
    default:
      return load(tensor.dtype, static_cast<const char*>(tensor.data) + tensor.offset_bytes(index), 0);
  }
}

Bindings bindings_of(const Bound& bound) {
  Bindings bindings;
  bindings.element = [&bound](int tensor, const int64_t* index, bool& read) {
    const BoundTensor& of = bound.tensors[static_cast<size_t>(tensor)];
    read = of.holds(index);
    return read ? load_element(of, index) : 0.0;
  };
  bindings.scalar = [&bound](int scalar) { return bound.scalars[static_cast<size_t>(scalar)]; };
  return bindings;
}

int place_of(std::span<const Name> declared, const Name& name) {
  return static_cast<int>(std::ranges::find(declared, name.text, &Name::text) - declared.begin());
}

void keep(const Checked& checked, const tessera_program& handle, tessera_plan_program& kept) {
  kept = {};
  kept.hash = checked.hash;
  kept.text_bytes = static_cast<int32_t>(checked.text.size());
  std::memcpy(kept.text, checked.text.data(), checked.text.size());
  const auto places = [](const std::vector<Name>& used, const std::vector<Name>& declared, uint8_t* to) {
    for (const Name& name : used) *to++ = static_cast<uint8_t>(place_of(declared, name));
    return static_cast<int32_t>(used.size());
  };
  kept.num_tensors = places(checked.program.tensors, handle.tensors, kept.tensors);
  kept.num_scalars = places(checked.program.scalars, handle.scalars, kept.scalars);
}

bool only_hides(const tessera_plan& plan) {
  const tessera_plan_program& kept = plan.program;
  return has_program(plan) && !key_changes_score({kept.text, static_cast<size_t>(kept.text_bytes)});
}

Bound bind(const tessera_plan& plan, const tessera_buffers* buffers) {
  const tessera_plan_program& kept = plan.program;
  const tessera_problem& p = plan.problem;
  Bound bound;
  const tessera_status status = read(std::string_view(kept.text, static_cast<size_t>(kept.text_bytes)), bound.checked);
  if (status.code != TESSERA_OK) throw std::runtime_error(status.message);
  const bool backward = p.direction == TESSERA_BACKWARD;
  const auto add = [&](int slot, int rank) {
    const size_t n = static_cast<size_t>(bound.num_tensors++);
    const tessera_layout& layout = present(p.captured[slot]) ? p.captured[slot] : p.d_captured[slot];
    bound.tensors[n] = bound_tensor(layout, rank, buffers ? buffers->captured[slot] : nullptr);
    if (!backward) return;
    bound.gradients[n] = bound_gradient(p.d_captured[slot], rank, buffers ? buffers->d_captured[slot] : nullptr);
  };
  for (int n = 0; n < kept.num_tensors; ++n) {
    add(kept.tensors[n], bound.program().tensors[static_cast<size_t>(n)].rank);
  }
  for (int slot = 0; backward && slot < TESSERA_MAX_CAPTURED_TENSORS; ++slot) {
    const bool is_extra = present(p.d_captured[slot]) && !is_used(kept.tensors, kept.num_tensors, slot);
    if (is_extra) add(slot, p.d_captured[slot].rank);
  }
  for (int n = 0; buffers && n < kept.num_scalars; ++n) {
    bound.scalars[static_cast<size_t>(n)] = buffers->scalars[kept.scalars[n]];
  }
  return bound;
}

std::vector<CapturedBuffer> captured_buffers(const tessera_plan& plan, const Bound& bound,
                                             const tessera_buffers& buffers) {
  std::vector<CapturedBuffer> all;
  const tessera_problem& p = plan.problem;
  for (int slot = 0; slot < TESSERA_MAX_CAPTURED_TENSORS; ++slot) {
    const uint8_t* const end = plan.program.tensors + plan.program.num_tensors;
    const uint8_t* const used = std::find(plan.program.tensors, end, slot);
    const bool named = used != end;
    const std::string name = named ? bound.program().tensors[static_cast<size_t>(used - plan.program.tensors)].text
                                   : "captured[" + std::to_string(slot) + "]";
    if (named) all.push_back({name, &p.captured[slot], buffers.captured[slot], false});
    if (p.direction == TESSERA_BACKWARD && present(p.d_captured[slot])) {
      all.push_back({"d_" + name, &p.d_captured[slot], buffers.d_captured[slot], true});
    }
  }
  return all;
}

tessera_status check_scalars(const tessera_plan& plan, const Bound& bound) {
  for (int n = 0; n < plan.program.num_scalars; ++n) {
    const Name& name = bound.program().scalars[static_cast<size_t>(n)];
    const double value = bound.scalars[static_cast<size_t>(n)];
    if (name.type == Type::kFloat) continue;
    const bool is_bool = name.type == Type::kBool;
    const double low = is_bool ? 0 : INT32_MIN, high = is_bool ? 1 : INT32_MAX;
    if (value >= low && value <= high && value == std::floor(value)) continue;
    return invalid("scalars[%d] (%s): %.17g, accepted %s", plan.program.scalars[n], name.text.c_str(), value,
                   is_bool ? "0 and 1" : "an integer of 32 bits");
  }
  return ok();
}

}  // namespace tessera::core::score
