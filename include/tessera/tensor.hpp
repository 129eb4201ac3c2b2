// Shapes and strides of tensors in caller-owned memory, and typed views of them. Nothing here owns or copies elements.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "tessera/status.hpp"
#include "tessera/tessera.h"

namespace tessera {

// ---- element types --------------------------------------------------------------------------------------------------

enum class DType : std::int32_t {
  float32 = TESSERA_FLOAT32,
  float16 = TESSERA_FLOAT16,
  bfloat16 = TESSERA_BFLOAT16,
  float64 = TESSERA_FLOAT64,
  int32 = TESSERA_INT32,
  boolean = TESSERA_BOOL,  // one byte, 0 or 1
  int64 = TESSERA_INT64,
  int8 = TESSERA_INT8,
  int16 = TESSERA_INT16,
  uint8 = TESSERA_UINT8,
  float8_e4m3 = TESSERA_FLOAT8_E4M3,
  float8_e5m2 = TESSERA_FLOAT8_E5M2
};
// What a score program computes with: floats of any floating-point type, integers whose values fit 32 bits, booleans.
enum class ValueType : std::int32_t {
  floating = TESSERA_VALUE_FLOAT,
  integer = TESSERA_VALUE_INT,
  boolean = TESSERA_VALUE_BOOL
};
// int64 has no short name: device code, which is in this namespace too, has a type of that name.
inline constexpr DType float32 = DType::float32, float16 = DType::float16, bfloat16 = DType::bfloat16,
                       float64 = DType::float64, int32 = DType::int32, boolean = DType::boolean, int8 = DType::int8,
                       int16 = DType::int16, uint8 = DType::uint8, float8_e4m3 = DType::float8_e4m3,
                       float8_e5m2 = DType::float8_e5m2;

inline std::string_view name(DType dtype) { return tessera_dtype_name(static_cast<std::int32_t>(dtype)); }
inline std::size_t size_bytes(DType dtype) { return tessera_dtype_bytes(static_cast<std::int32_t>(dtype)); }

// The DType of a C++ type. Specialise it for your own 16-bit floating-point types.
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> : std::integral_constant<DType, float32> {};
template <>
struct DTypeOf<double> : std::integral_constant<DType, float64> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<DType, int32> {};
template <>
struct DTypeOf<std::int64_t> : std::integral_constant<DType, DType::int64> {};
template <>
struct DTypeOf<std::int8_t> : std::integral_constant<DType, int8> {};
template <>
struct DTypeOf<std::int16_t> : std::integral_constant<DType, int16> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<DType, uint8> {};
template <>
struct DTypeOf<bool> : std::integral_constant<DType, boolean> {};

template <typename T>
concept Element = requires {
  { DTypeOf<std::remove_const_t<T>>::value } -> std::convertible_to<DType>;
};

// ---- layouts --------------------------------------------------------------------------------------------------------

// Shape, and strides in elements; rank 0 means that a tensor is absent.
using Layout = tessera_layout;

inline constexpr int max_rank = TESSERA_MAX_RANK;

// A layout with explicit strides in any order, for instance [B, S, H, D] over memory that is [B, H, S, D]. Throws Error
// (invalid_argument) if the ranks differ or exceed max_rank.
inline Layout layout(DType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  if (shape.size() > std::size_t{max_rank}) {
    throw Error(Code::invalid_argument,
                "shape: rank " + std::to_string(shape.size()) + ", accepted at most " + std::to_string(max_rank));
  }
  if (strides.size() != shape.size()) {
    throw Error(Code::invalid_argument, "strides: " + std::to_string(strides.size()) +
                                            " of them, accepted one for each of " + std::to_string(shape.size()) +
                                            " axes");
  }
  Layout result{};
  result.dtype = static_cast<std::int32_t>(dtype);
  result.rank = static_cast<std::int32_t>(shape.size());
  std::ranges::copy(shape, result.shape);
  std::ranges::copy(strides, result.strides);
  return result;
}

// A contiguous layout; the last axis is the fastest.
inline Layout layout(DType dtype, std::span<const std::int64_t> shape) {
  std::array<std::int64_t, TESSERA_MAX_RANK> strides{};
  std::uint64_t stride = 1;  // unsigned: absurd shapes wrap around, and are refused when a plan is made
  for (std::size_t axis = std::min(shape.size(), strides.size()); axis-- > 0;) {
    strides[axis] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(shape[axis]);
  }
  return layout(dtype, shape, std::span(strides).first(std::min(shape.size(), strides.size())));
}

inline Layout layout(DType dtype, std::initializer_list<std::int64_t> shape) {
  return layout(dtype, std::span(shape.begin(), shape.size()));
}
inline Layout layout(DType dtype, std::initializer_list<std::int64_t> shape,
                     std::initializer_list<std::int64_t> strides) {
  return layout(dtype, std::span(shape.begin(), shape.size()), std::span(strides.begin(), strides.size()));
}

// The same memory with its axes in another order: axis a of the result is axis order[a] of `from`. Memory that is [B,
// H, S, D] becomes the [B, S, H, D] that a Problem expects by permute(from, {0, 2, 1, 3}).
inline Layout permute(const Layout& from, std::initializer_list<int> order) {
  Layout result = from;
  std::array<bool, TESSERA_MAX_RANK> seen{};
  bool valid = order.size() == static_cast<std::size_t>(from.rank);
  int to = 0;
  for (const int axis : order) {
    valid = valid && axis >= 0 && axis < from.rank && !seen[static_cast<std::size_t>(axis)];
    if (!valid) break;
    seen[static_cast<std::size_t>(axis)] = true;
    result.shape[to] = from.shape[axis];
    result.strides[to] = from.strides[axis];
    ++to;
  }
  if (!valid) throw Error(Code::invalid_argument, "order: must name each of the tensor's axes once");
  return result;
}

inline DType dtype(const Layout& layout) { return static_cast<DType>(layout.dtype); }

inline std::int64_t elements(const Layout& layout) {
  std::int64_t count = layout.rank > 0 ? 1 : 0;
  for (int axis = 0; axis < layout.rank; ++axis) count *= layout.shape[axis];
  return count;
}

// ---- views ----------------------------------------------------------------------------------------------------------

// The caller's elements and their layout. A view is cheap to copy and owns nothing.
template <Element T>
class TensorView {
 public:
  TensorView(T* data, std::initializer_list<std::int64_t> shape)
      : TensorView(data, tessera::layout(DTypeOf<std::remove_const_t<T>>::value, shape)) {}
  TensorView(T* data, std::initializer_list<std::int64_t> shape, std::initializer_list<std::int64_t> strides)
      : TensorView(data, tessera::layout(DTypeOf<std::remove_const_t<T>>::value, shape, strides)) {}

  // Throws Error (invalid_argument) if the layout's dtype is not T's.
  TensorView(T* data, const Layout& layout) : data_(data), layout_(layout) {
    constexpr DType expected = DTypeOf<std::remove_const_t<T>>::value;
    if (tessera::dtype(layout) != expected) {
      throw Error(Code::invalid_argument, "layout: dtype " + std::string(name(tessera::dtype(layout))) +
                                              ", accepted the view's " + std::string(name(expected)));
    }
  }

  operator TensorView<const T>() const  // NOLINT: reading is always allowed
      requires(!std::is_const_v<T>) {
    return {data_, layout_};
  }

  T* data() const { return data_; }
  const Layout& layout() const { return layout_; }
  operator const Layout&() const { return layout_; }  // NOLINT: problem.q = view

  // The element at these indices, one per axis; unchecked.
  template <std::integral... Index>
  T& operator()(Index... index) const {
    int axis = 0;
    std::int64_t offset = 0;
    ((offset += static_cast<std::int64_t>(index) * layout_.strides[axis++]), ...);
    return data_[offset];
  }

 private:
  T* data_;
  Layout layout_;
};

}  // namespace tessera
