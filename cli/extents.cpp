#include "extents.hpp"

#include "core/dtypes.hpp"

namespace tessera::cli {
namespace {

bool is_broadcast(const core::TensorField& field, const core::Axis& axis) {
  if (axis.kind != core::kEqualOrOne) return false;
  return axis.symbol == core::kB || (axis.symbol == core::kHq && field.dtypes == core::Dtypes::kBool);
}

}  // namespace

void Extents::bind(const core::Shape& symbols, const Shape& shape) {
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    std::int64_t& value = values_[symbols.axes[axis].symbol];
    if (value == kUnbound) value = shape[axis];
  }
}

Shape Extents::shape(const core::TensorField& field, const core::Shape& symbols) const {
  Shape shape;
  for (int axis = 0; axis < symbols.rank; ++axis) {
    const auto [symbol, kind] = symbols.axes[axis];
    shape.push_back(is_broadcast(field, symbols.axes[axis]) ? 1 : values_[symbol] + (kind == core::kPlusOne ? 1 : 0));
  }
  return shape;
}

std::string shape_symbols(const core::TensorField& field) {
  std::string text;
  for (int axis = 0; axis < field.dense.rank; ++axis) {
    const auto [symbol, kind] = field.dense.axes[axis];
    text += text.empty() ? "[" : ", ";
    text += is_broadcast(field, field.dense.axes[axis]) ? "1" : core::kSymbolRules[symbol].name;
    if (kind == core::kPlusOne) text += " + 1";
  }
  return text + "]";
}

tessera_dtype dtype_of(const core::TensorField& field, tessera_dtype q, tessera_dtype kv) {
  switch (field.dtypes) {
    case core::Dtypes::kFloating:
    case core::Dtypes::kAsQ:
    case core::Dtypes::kAsQOrFloat32:
      return q;
    case core::Dtypes::kKeys:
      return kv;
    case core::Dtypes::kOutput:
      return core::is_float8(q) ? TESSERA_BFLOAT16 : q;
    case core::Dtypes::kFloat32:
    case core::Dtypes::kFloat32OrAsQ:
      return TESSERA_FLOAT32;
    case core::Dtypes::kInt32:
      return TESSERA_INT32;
    case core::Dtypes::kInt64:
      return TESSERA_INT64;
    case core::Dtypes::kBool:
      return TESSERA_BOOL;
  }
  return q;
}

std::string contents_text(const core::TensorField& field) {
  // --dtype gives the dtype of q, k, v, o and their gradients.
  std::string text = core::is_sequence(field) ? "" : std::string(core::dtypes_text(field.dtypes)) + " ";
  text += core::symbols_of(field.dense).text;
  const char* other = field.form == core::Form::kByRank ? " or " : ", packed ";
  if (field.packed.rank != 0) text += std::string(other) + core::symbols_of(field.packed).text;
  if (field.paged.rank != 0) text += std::string(", paged ") + core::symbols_of(field.paged).text;
  if (field.form == core::Form::kLastAxes) text += " or its last axes";
  return text;
}

}  // namespace tessera::cli
