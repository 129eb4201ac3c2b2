#include "core/layout.hpp"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "core/status.hpp"
#include "core/validate.hpp"

namespace tessera::core {
namespace {

// True if the number of elements and the bytes from the lowest to the highest element both fit in 63 bits.
bool addressable(const tessera_layout& layout) {
  int64_t count = 1, span_elems = 1, bytes = 0;
  for (int axis = 0; axis < layout.rank; ++axis) {
    if (layout.shape[axis] == 0) return true;
  }
  for (int axis = 0; axis < layout.rank; ++axis) {
    const int64_t stride = layout.strides[axis];
    int64_t reach = 0;
    if (stride == INT64_MIN || __builtin_mul_overflow(layout.shape[axis] - 1, stride < 0 ? -stride : stride, &reach) ||
        __builtin_add_overflow(span_elems, reach, &span_elems) ||
        __builtin_mul_overflow(count, layout.shape[axis], &count)) {
      return false;
    }
  }
  const int64_t element_bytes = static_cast<int64_t>(tessera_dtype_bytes(layout.dtype));
  return !__builtin_mul_overflow(std::max(span_elems, count), element_bytes, &bytes);
}

// Each axis, in ascending order of stride, must step over the whole range of the axes before it.
bool may_overlap(const tessera_layout& layout) {
  struct Axis {
    int64_t stride, extent;
  };
  std::array<Axis, TESSERA_MAX_RANK> axes{};
  int used = 0;
  for (int axis = 0; axis < layout.rank; ++axis) {
    if (layout.shape[axis] == 0) return false;
    if (layout.shape[axis] > 1) axes[used++] = {layout.strides[axis], layout.shape[axis]};
  }
  for (int a = 0; a < used; ++a) {
    for (int b = a + 1; b < used; ++b) {
      if (axes[b].stride < axes[a].stride) std::swap(axes[a], axes[b]);
    }
  }
  int64_t reach = 0;
  for (int axis = 0; axis < used; ++axis) {
    if (axes[axis].stride <= reach) return true;  // includes negative strides
    reach += (axes[axis].extent - 1) * axes[axis].stride;
  }
  return false;
}

ShapeText list_text(const int64_t* values, int count) {
  ShapeText result{};
  int length = std::snprintf(result.text, sizeof result.text, "[");
  for (int i = 0; i < count; ++i) {
    length +=
        std::snprintf(result.text + length, sizeof result.text - length, i == 0 ? "%" PRId64 : ", %" PRId64, values[i]);
  }
  std::snprintf(result.text + length, sizeof result.text - length, "]");
  return result;
}

ShapeText strides_text(const tessera_layout& layout) { return list_text(layout.strides, layout.rank); }

}  // namespace

ShapeText shape_text(const tessera_layout& layout) {
  return list_text(layout.shape, std::clamp(layout.rank, 0, TESSERA_MAX_RANK));
}

tessera_status check_layout(const char* name, const tessera_layout& layout, Access access, LastAxis last_axis) {
  for (int axis = 0; axis < layout.rank; ++axis) {
    if (layout.shape[axis] < 0) {
      return invalid("%s: shape %s, every extent must be at least 0", name, shape_text(layout).text);
    }
  }
  if (!addressable(layout)) {
    return invalid("%s: shape %s with strides %s is more than 2^63 bytes can hold", name, shape_text(layout).text,
                   strides_text(layout).text);
  }
  const int last = layout.rank - 1;
  if (last_axis == LastAxis::kContiguous && layout.shape[last] > 1 && layout.strides[last] != 1) {
    return invalid("%s: stride %" PRId64 " along the last axis, which must be contiguous (stride 1)", name,
                   layout.strides[last]);
  }
  if (access == Access::kWritten && may_overlap(layout)) {
    return invalid(
        "%s: shape %s with strides %s could write two elements to one place; an output needs positive "
        "strides, each larger than the reach of the smaller ones",
        name, shape_text(layout).text, strides_text(layout).text);
  }
  return ok();
}

}  // namespace tessera::core
