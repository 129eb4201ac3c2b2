#include "files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "error.hpp"
#include "npy.hpp"
#include "safetensors.hpp"

namespace tessera::cli {
namespace {

constexpr std::string_view kSafetensors = ".safetensors";

struct Place {
  std::string path;
  std::string name;  // of the tensor in a .safetensors file
  bool safetensors = false;
};

Place parse_place(const std::string& file, const std::string& default_name) {
  const std::size_t at = file.rfind(std::string(kSafetensors) + ":");
  if (at != std::string::npos) {
    return {file.substr(0, at + kSafetensors.size()), file.substr(at + kSafetensors.size() + 1), true};
  }
  return {file, default_name, file.ends_with(kSafetensors)};
}

Element stored_element(tessera_dtype dtype) {
  switch (dtype) {
    case TESSERA_FLOAT16:
      return Element::kFloat16;
    case TESSERA_BFLOAT16:
      return Element::kBfloat16;
    case TESSERA_FLOAT64:
      return Element::kFloat64;
    default:
      return Element::kFloat32;
  }
}

}  // namespace

FileTensor read_tensor_file(const std::string& file, const std::string& argument, const std::string& default_name) {
  const Place place = parse_place(file, default_name);
  const std::string source = fmt::format("{} {}", argument, file);
  return place.safetensors ? read_safetensors(place.path, place.name, source) : read_npy(place.path, source);
}

void OutputTensors::add(const std::string& file, const std::string& argument, const std::string& default_name) {
  const Place place = parse_place(file, default_name);
  const std::string source = fmt::format("{} {}", argument, file);
  const bool nameable = !place.name.empty() && place.name != kMetadataKey && printable(place.name) == place.name;
  if (place.safetensors && !nameable) {
    throw WrongUse(fmt::format("{}: '{}' cannot name a tensor, accepted FILE.safetensors:NAME", source, place.name));
  }
  OutputFile output(place.path, place.path.empty() ? fmt::format("{} ''", argument) : source);
  const auto same =
      std::find_if(files_.begin(), files_.end(), [&](const File& known) { return known.file.is_same_as(output); });
  if (same == files_.end()) {
    files_.push_back({std::move(output), place.safetensors, {{argument, place.name, {}, {}}}});
    return;
  }
  for (const Entry& entry : same->entries) {
    if (!place.safetensors || !same->safetensors || entry.name == place.name) {
      throw WrongUse(
          fmt::format("{}: is also what {} names, accepted are different files, or different names in one "
                      ".safetensors file",
                      source, entry.argument));
    }
  }
  same->entries.push_back({argument, place.name, {}, {}});
}

bool OutputTensors::use_standard_output() const {
  return std::any_of(files_.begin(), files_.end(), [](const File& f) { return f.file.is_standard_output(); });
}

void OutputTensors::set(const std::string& argument, const Tensor& tensor, const Shape& stored_shape) {
  for (File& file : files_) {
    for (Entry& entry : file.entries) {
      if (entry.argument == argument) entry.tensor = tensor, entry.stored_shape = stored_shape;
    }
  }
}

void OutputTensors::write(File& file) {
  std::vector<SafetensorsEntry> table;
  for (const Entry& entry : file.entries) {
    table.push_back({entry.name, stored_element(entry.tensor.dtype), entry.stored_shape});
  }
  const std::string header =
      file.safetensors ? safetensors_header(table) : npy_header(table.front().element, table.front().shape);
  file.file.open();
  file.file.write(header.data(), static_cast<std::int64_t>(header.size()));
  for (const Entry& entry : file.entries) {
    file.file.write(entry.tensor.memory.data(), entry.tensor.memory.size_bytes());
  }
}

void OutputTensors::commit() {
  // Output to pipes and devices cannot be undone: it is written after all files are complete and before any file
  // appears.
  for (const bool in_place : {false, true}) {
    for (File& file : files_) {
      if (file.file.in_place() == in_place) write(file);
    }
  }
  for (File& file : files_) file.file.commit();
  files_.clear();
}

}  // namespace tessera::cli
