// NumPy's .npy format, versions 1 to 3: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <string>

#include "tensor.hpp"

namespace tessera::cli {

// Reads `path`, in row-major order, whatever the file's order. Throws WrongUse, naming `source`.
FileTensor read_npy(const std::string& path, const std::string& source);

// The header of a file that holds `shape` of `element`, row-major; bfloat16 is written as uint16 bits. Data follows.
std::string npy_header(Element element, const Shape& shape);

}  // namespace tessera::cli
