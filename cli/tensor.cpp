#include "tensor.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "core/dtypes.hpp"
#include "error.hpp"
#include "peers/standard_attention.hpp"

namespace tessera::cli {
namespace {

struct ElementRow {
  Element element;
  const char* name;
  std::int64_t bytes;
};
constexpr ElementRow kElements[] = {
    {Element::kFloat16, "float16", 2}, {Element::kBfloat16, "bfloat16", 2}, {Element::kFloat32, "float32", 4},
    {Element::kFloat64, "float64", 8}, {Element::kInt32, "int32", 4},       {Element::kInt64, "int64", 8},
    {Element::kBool, "bool", 1},       {Element::kUint8, "uint8", 1},       {Element::kUint16, "uint16", 2},
    {Element::kInt8, "int8", 1},       {Element::kE4m3, "float8_e4m3", 1},  {Element::kE5m2, "float8_e5m2", 1},
};

const ElementRow& row_of(Element element) { return kElements[static_cast<std::size_t>(element)]; }

std::vector<std::int64_t> row_major(const Shape& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  return strides;
}

std::int64_t count(const Shape& shape) {
  std::int64_t elems = 1;
  for (const std::int64_t extent : shape) elems *= extent;
  return elems;
}

Tensor adopt(FileTensor file, tessera_dtype dtype) {
  if (file.shape.size() > TESSERA_MAX_RANK) {
    throw WrongUse(fmt::format("{}: shape {}, at most {} axes are accepted", file.source, shape_text(file.shape),
                               TESSERA_MAX_RANK));
  }
  if (file.shape.empty()) throw WrongUse(fmt::format("{}: a single number, a tensor is accepted", file.source));
  Tensor tensor{.source = std::move(file.source),
                .dtype = dtype,
                .shape = std::move(file.shape),
                .strides = {},
                .memory = std::move(file.memory)};
  tensor.strides = row_major(tensor.shape);
  return tensor;
}

[[noreturn]] void refuse(const FileTensor& file, const char* accepted) {
  throw WrongUse(fmt::format("{}: holds {}, accepted {}", file.source, element_name(file.element), accepted));
}

double half_to_double(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

// To nearest, ties to even: `digits` binary digits of precision, no exponent below `least`, overflow beyond `largest`.
double round_to(double value, int digits, int least, double largest) {
  if (!std::isfinite(value) || value == 0) return value;
  const int exponent = std::max(std::ilogb(value), least);
  const double ulp = std::ldexp(1.0, exponent - digits + 1);
  const double rounded = std::nearbyint(value / ulp) * ulp;
  return std::abs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

std::uint16_t double_to_half(double value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return 0x7e00;
  const double rounded = std::abs(round_to(value, 11, -14, 65504));
  if (std::isinf(rounded)) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (rounded < std::ldexp(1.0, -14)) {
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::ldexp(rounded, 24)));
  }
  const int exponent = std::ilogb(rounded);
  const auto mantissa = static_cast<int>(std::ldexp(rounded, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | ((exponent + 15) << 10) | mantissa);
}

double bfloat16_to_double(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return static_cast<double>(value);
}

std::uint16_t double_to_bfloat16(double value) {
  const auto rounded = static_cast<float>(round_to(value, 8, -126, 0x1.fep127));
  std::uint32_t bits = 0;
  std::memcpy(&bits, &rounded, sizeof bits);
  return static_cast<std::uint16_t>(std::isnan(value) ? 0x7fc0U : bits >> 16);
}

}  // namespace

Memory::Memory(std::int64_t size_bytes, const std::string& what) : size_bytes_(size_bytes) {
  constexpr std::int64_t kAlignment = 64;
  if (peers::fits(size_bytes)) {
    const std::int64_t padded = (std::max<std::int64_t>(size_bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<std::size_t>(padded))), std::free);
  }
  if (data_ == nullptr) {
    throw Failure(
        fmt::format("{}: needs {} bytes, {} are available", what, size_bytes, peers::available_memory_bytes()));
  }
}

const char* element_name(Element element) { return row_of(element).name; }

std::int64_t element_bytes(Element element) { return row_of(element).bytes; }

std::int64_t FileTensor::elems() const { return count(shape); }

std::int64_t Tensor::elems() const { return count(shape); }

tessera_layout Tensor::layout() const {
  tessera_layout layout{};
  layout.dtype = dtype;
  layout.rank = static_cast<std::int32_t>(shape.size());
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    layout.shape[axis] = shape[axis];
    layout.strides[axis] = strides[axis];
  }
  return layout;
}

std::string Tensor::describe() const {
  return fmt::format("{}: {} {}", source, tessera_dtype_name(dtype), shape_text(shape));
}

Tensor make_tensor(std::string source, tessera_dtype dtype, Shape shape) {
  const std::int64_t bytes = checked_bytes(shape, static_cast<std::int64_t>(tessera_dtype_bytes(dtype)), source);
  Memory memory(bytes, source);
  Tensor tensor{.source = std::move(source),
                .dtype = dtype,
                .shape = std::move(shape),
                .strides = {},
                .memory = std::move(memory)};
  tensor.strides = row_major(tensor.shape);
  return tensor;
}

Tensor as_floating(FileTensor file, bool sixteen_bit_is_bfloat16) {
  switch (file.element) {
    case Element::kFloat16:
      return adopt(std::move(file), TESSERA_FLOAT16);
    case Element::kBfloat16:
      return adopt(std::move(file), TESSERA_BFLOAT16);
    case Element::kFloat32:
      return adopt(std::move(file), TESSERA_FLOAT32);
    case Element::kFloat64:
      return adopt(std::move(file), TESSERA_FLOAT64);
    case Element::kUint16:
      if (sixteen_bit_is_bfloat16) return adopt(std::move(file), TESSERA_BFLOAT16);
      refuse(file, "float32, float16, float64, or bfloat16 bits in uint16 with --dtype bfloat16");
    default:
      refuse(file, "float32, float16, float64 and bfloat16");
  }
}

Tensor as_sequence(FileTensor file, std::optional<tessera_dtype> dtype) {
  switch (file.element) {
    case Element::kInt8:
      return adopt(std::move(file), TESSERA_INT8);
    case Element::kE4m3:
      return adopt(std::move(file), TESSERA_FLOAT8_E4M3);
    case Element::kE5m2:
      return adopt(std::move(file), TESSERA_FLOAT8_E5M2);
    case Element::kUint8:
      if (dtype && core::is_float8(*dtype)) return adopt(std::move(file), *dtype);
      refuse(file, "floating types, int8, or codes of --dtype or --dtype-kv float8_e4m3 or float8_e5m2");
    default:
      return as_floating(std::move(file), dtype == TESSERA_BFLOAT16);
  }
}

Tensor as_float32(FileTensor file) {
  const bool floating = file.element == Element::kFloat16 || file.element == Element::kBfloat16 ||
                        file.element == Element::kFloat32 || file.element == Element::kFloat64;
  if (!floating) refuse(file, "float32 (or another floating type, which is converted)");
  return converted(as_floating(std::move(file), false), TESSERA_FLOAT32);
}

Tensor as_int32(FileTensor file) {
  if (file.element == Element::kInt32) return adopt(std::move(file), TESSERA_INT32);
  if (file.element != Element::kInt64) refuse(file, "int32 and int64");
  Memory narrow(file.elems() * 4, file.source);
  for (std::int64_t i = 0; i < file.elems(); ++i) {
    const std::int64_t wide = reinterpret_cast<const std::int64_t*>(file.memory.data())[i];
    if (wide < std::numeric_limits<std::int32_t>::min() || wide > std::numeric_limits<std::int32_t>::max()) {
      throw WrongUse(fmt::format("{}: element {} is {}, which 32 bits do not hold", file.source, i, wide));
    }
    reinterpret_cast<std::int32_t*>(narrow.data())[i] = static_cast<std::int32_t>(wide);
  }
  file.memory = std::move(narrow);
  return adopt(std::move(file), TESSERA_INT32);
}

Tensor as_int64(FileTensor file) {
  if (file.element != Element::kInt64) refuse(file, "int64");
  return adopt(std::move(file), TESSERA_INT64);
}

Tensor as_bool(FileTensor file) {
  if (file.element != Element::kBool && file.element != Element::kUint8) refuse(file, "bool, and uint8 of 0 and 1");
  for (std::int64_t i = 0; i < file.elems(); ++i) {
    const auto value = static_cast<unsigned>(file.memory.data()[i]);
    if (value > 1) throw WrongUse(fmt::format("{}: element {} is {}, accepted 0 and 1", file.source, i, value));
  }
  return adopt(std::move(file), TESSERA_BOOL);
}

void view_heads_first(Tensor& tensor) {
  if (tensor.shape.size() != 4) {
    throw WrongUse(fmt::format("--layout bhsd: {}, rank 4 is accepted", tensor.describe()));
  }
  std::swap(tensor.shape[1], tensor.shape[2]);
  std::swap(tensor.strides[1], tensor.strides[2]);
}

Tensor converted(const Tensor& tensor, tessera_dtype dtype) {
  Tensor copy = make_tensor(tensor.source, dtype, tensor.shape);
  copy.strides = tensor.strides;
  for (std::int64_t i = 0; i < tensor.elems(); ++i) set_element(copy, i, element_at(tensor, i));
  return copy;
}

double element_at(const Tensor& tensor, std::int64_t index) {
  switch (tensor.dtype) {
    case TESSERA_FLOAT16:
      return half_to_double(tensor.as<std::uint16_t>()[index]);
    case TESSERA_BFLOAT16:
      return bfloat16_to_double(tensor.as<std::uint16_t>()[index]);
    case TESSERA_FLOAT64:
      return tensor.as<double>()[index];
    default:
      return static_cast<double>(tensor.as<float>()[index]);
  }
}

void set_element(const Tensor& tensor, std::int64_t index, double value) {
  switch (tensor.dtype) {
    case TESSERA_FLOAT16:
      tensor.as<std::uint16_t>()[index] = double_to_half(value);
      break;
    case TESSERA_BFLOAT16:
      tensor.as<std::uint16_t>()[index] = double_to_bfloat16(value);
      break;
    case TESSERA_FLOAT64:
      tensor.as<double>()[index] = value;
      break;
    default:
      tensor.as<float>()[index] = static_cast<float>(value);
  }
}

}  // namespace tessera::cli
