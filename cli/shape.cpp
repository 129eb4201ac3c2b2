#include "shape.hpp"

#include "error.hpp"

namespace tessera::cli {

std::string shape_text(const Shape& shape) {
  std::string text;
  for (const std::int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

std::int64_t checked_bytes(const Shape& shape, std::int64_t element_size, const std::string& what) {
  std::int64_t bytes = element_size;
  bool empty = false, overflow = false;
  for (const std::int64_t extent : shape) {
    empty = empty || extent == 0;
    overflow = overflow || extent < 0 || (extent > 0 && __builtin_mul_overflow(bytes, extent, &bytes));
  }
  if (empty) return 0;
  if (overflow) throw WrongUse(what + ": shape " + shape_text(shape) + " overflows, at most 2^63 bytes");
  return bytes;
}

}  // namespace tessera::cli
