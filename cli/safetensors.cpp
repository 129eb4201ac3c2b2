#include "safetensors.hpp"

#include <fmt/format.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "error.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kAlignment = 8;                  // of the data in a file

struct TypeName {
  const char* name;
  Element element;
};
constexpr TypeName kTypes[] = {
    {"F16", Element::kFloat16}, {"BF16", Element::kBfloat16}, {"F32", Element::kFloat32}, {"F64", Element::kFloat64},
    {"I32", Element::kInt32},   {"I64", Element::kInt64},     {"BOOL", Element::kBool},   {"U8", Element::kUint8},
};

std::uint64_t read_length(std::ifstream& file) {
  unsigned char bytes[8] = {};
  file.read(reinterpret_cast<char*>(bytes), sizeof bytes);
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  return length;
}

std::string names_of(const Json& header) {
  std::vector<std::string> names;
  constexpr std::size_t kMost = 8;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    if (names.size() == kMost) {
      names.push_back("...");
      break;
    }
    names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

FileTensor read_safetensors(const std::string& path, const std::string& name, const std::string& source) {
  const auto refuse = [&](const std::string& why) -> WrongUse {
    return WrongUse(fmt::format("{}: {}, accepted is a .safetensors file", source, why));
  };
  std::ifstream file(path, std::ios::binary);
  if (!file) throw WrongUse(fmt::format("{}: cannot be opened: {}", source, std::strerror(errno)));
  file.seekg(0, std::ios::end);
  const std::int64_t file_bytes = file.tellg();
  file.seekg(0);
  const std::uint64_t length = read_length(file);
  if (!file) throw refuse("cut off within its header");
  if (length > kLargestHeader) throw refuse("its header is garbled");
  if (static_cast<std::int64_t>(length) + 8 > file_bytes) throw refuse("cut off within its header");
  std::string text(length, '\0');
  file.read(text.data(), static_cast<std::streamsize>(length));
  const Json header = Json::parse(text, nullptr, false);
  if (!header.is_object()) throw refuse("its header is garbled");
  if (!header.contains(name)) {
    throw WrongUse(
        fmt::format("{}: has no tensor '{}', it holds {} (write FILE:NAME)", source, name, names_of(header)));
  }

  FileTensor tensor{.source = source, .element = Element::kFloat32, .shape = {}, .memory = {}};
  std::string type;
  std::vector<std::int64_t> offsets;
  try {
    const Json& entry = header.at(name);
    type = entry.at("dtype").get<std::string>();
    tensor.shape = entry.at("shape").get<Shape>();
    offsets = entry.at("data_offsets").get<std::vector<std::int64_t>>();
  } catch (const Json::exception&) {
    throw refuse("its header is garbled");
  }
  bool known = false;
  for (const TypeName& row : kTypes) {
    if (type == row.name) {
      tensor.element = row.element;
      known = true;
    }
  }
  if (!known) {
    throw WrongUse(fmt::format("{}: dtype {}, accepted are F16, BF16, F32, F64, I32, I64, BOOL and U8", source, type));
  }
  const std::int64_t bytes = checked_bytes(tensor.shape, element_bytes(tensor.element), source);
  const std::int64_t data_at = 8 + static_cast<std::int64_t>(length);
  if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0] || offsets[1] - offsets[0] != bytes) {
    throw refuse(fmt::format("data_offsets [{}] do not fit its shape {} of {}", fmt::join(offsets, ", "),
                             shape_text(tensor.shape), type));
  }
  if (offsets[1] > file_bytes - data_at) {
    throw WrongUse(fmt::format("{}: holds {} bytes of data, tensor '{}' ends at {}: the file is cut off", source,
                               file_bytes - data_at, name, offsets[1]));
  }
  file.seekg(data_at + offsets[0]);
  tensor.memory = Memory(bytes, source);
  if (!file.read(reinterpret_cast<char*>(tensor.memory.data()), bytes)) throw refuse("cannot be read to its end");
  return tensor;
}

std::string safetensors_header(const std::string& name, Element element, const Shape& shape) {
  const char* type = "U16";
  for (const TypeName& row : kTypes) {
    if (row.element == element) type = row.name;
  }
  const Json entry = {
      {"dtype", type}, {"shape", shape}, {"data_offsets", {0, checked_bytes(shape, element_bytes(element), name)}}};
  std::string text = Json{{name, entry}}.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  std::string header;
  for (std::size_t i = 0; i < 8; ++i) header.push_back(static_cast<char>(text.size() >> (8 * i) & 0xff));
  return header + text;
}

}  // namespace tessera::cli
