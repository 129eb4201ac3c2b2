// The extents of a problem's tensors, by the symbols of core/fields.hpp, and the shapes that follow from them.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/fields.hpp"
#include "shape.hpp"

namespace tessera::cli {

class Extents {
 public:
  Extents() {  // an extent that is always the same is known
    for (int n = 0; n < core::kSymbols; ++n) {
      const core::SymbolRule& rule = core::kSymbolRules[n];
      values_[n] = rule.min == rule.max ? rule.min : kUnbound;
    }
  }
  std::int64_t& operator[](core::Symbol symbol) { return values_[symbol]; }
  std::int64_t operator[](core::Symbol symbol) const { return values_[symbol]; }

  // Adds the extents of a tensor's shape that no earlier tensor has given.
  void bind(const core::Shape& symbols, const Shape& shape);
  // The shape of a tensor whose symbols all have an extent. If 1 is accepted as well, batch is 1, and a mask's heads
  // are 1: most models have one bias per head and one mask for all.
  Shape shape(const core::TensorField& field, const core::Shape& symbols) const;

 private:
  static constexpr std::int64_t kUnbound = -1;
  std::array<std::int64_t, core::kSymbols> values_;
};

// The same in symbols, for a dense problem: "[1, Hq, Sq, Sk]".
std::string shape_symbols(const core::TensorField& field);

// The first accepted dtype, or q's; for o of 8-bit queries bfloat16. `kv`: that of k and v.
tessera_dtype dtype_of(const core::TensorField& field, tessera_dtype q, tessera_dtype kv);
inline tessera_dtype dtype_of(const core::TensorField& field, tessera_dtype q) { return dtype_of(field, q, q); }

// "float32 [B, Hq, Sq], packed [Hq, Tq]": a file's contents, for a help text.
std::string contents_text(const core::TensorField& field);

}  // namespace tessera::cli
