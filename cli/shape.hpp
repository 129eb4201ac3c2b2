// The lengths of a tensor's axes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

using Shape = std::vector<std::int64_t>;

std::string shape_text(const Shape& shape);  // "[2, 128, 8, 64]"

// Product of `shape` and `element_bytes`. Throws WrongUse naming `what` when it does not fit in 63 bits.
std::int64_t checked_bytes(const Shape& shape, std::int64_t element_bytes, const std::string& what);

}  // namespace tessera::cli
