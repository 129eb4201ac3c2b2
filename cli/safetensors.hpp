// The safetensors format: https://huggingface.co/docs/safetensors
#pragma once

#include <string>

#include "tensor.hpp"

namespace tessera::cli {

// Reads the tensor called `name`. Throws WrongUse, naming `source`.
FileTensor read_safetensors(const std::string& path, const std::string& name, const std::string& source);

// The header of a file that holds one tensor. Data follows.
std::string safetensors_header(const std::string& name, Element element, const Shape& shape);

}  // namespace tessera::cli
