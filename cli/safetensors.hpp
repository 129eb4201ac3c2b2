// The safetensors format: https://huggingface.co/docs/safetensors
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensor.hpp"

namespace tessera::cli {

inline constexpr std::string_view kMetadataKey = "__metadata__";  // the key of a header that names no tensor

// Reads the tensor called `name`. Throws WrongUse, naming `source`.
FileTensor read_safetensors(const std::string& path, const std::string& name, const std::string& source);

struct SafetensorsEntry {
  std::string name;
  Element element;
  Shape shape;
};

// The header of a file with these tensors. Their data follow, one after another.
std::string safetensors_header(const std::vector<SafetensorsEntry>& entries);

}  // namespace tessera::cli
