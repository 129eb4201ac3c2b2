#include "files.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "error.hpp"
#include "npy.hpp"
#include "safetensors.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

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
  std::error_code error;
  if (fs::is_directory(place.path, error))
    throw WrongUse(fmt::format("{}: is a directory, accepted is a file", source));
  return place.safetensors ? read_safetensors(place.path, place.name, source) : read_npy(place.path, source);
}

OutputFiles::~OutputFiles() {
  for (const Pending& file : pending_) unlink(file.temporary.c_str());
}

void OutputFiles::check(const std::string& file, const std::string& argument) {
  const fs::path path = parse_place(file, "").path;
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  if (path.empty() || fs::is_directory(path, error)) {
    throw WrongUse(fmt::format("{} {}: is a directory, accepted is the path of a file to write", argument, file));
  }
  if (!fs::is_directory(parent, error)) {
    throw WrongUse(fmt::format("{} {}: directory {} does not exist", argument, file, parent.string()));
  }
  if (access(parent.c_str(), W_OK | X_OK) != 0) {
    throw WrongUse(fmt::format("{} {}: directory {} cannot be written: {}", argument, file, parent.string(),
                               std::strerror(errno)));
  }
}

void OutputFiles::write(const std::string& file, const std::string& argument, const std::string& default_name,
                        const Tensor& tensor, const Shape& stored_shape) {
  const Place place = parse_place(file, default_name);
  const Element element = stored_element(tensor.dtype);
  write(place.path, argument,
        place.safetensors ? safetensors_header(place.name, element, stored_shape) : npy_header(element, stored_shape),
        tensor.memory.data(), tensor.memory.size_bytes());
}

void OutputFiles::write(const std::string& file, const std::string& argument, const std::string& header,
                        const void* data, std::int64_t size_bytes) {
  std::error_code error;
  const fs::path resolved = fs::weakly_canonical(file, error);  // through a link, to what it points at
  const std::string target = error ? file : resolved.string();
  // What is there and is no ordinary file, such as /dev/null, is written as it stands.
  const bool in_place = fs::exists(target, error) && !fs::is_regular_file(target, error);
  const std::string path = in_place ? target : fmt::format("{}.{}.{}.partial", target, getpid(), pending_.size());
  if (!in_place) pending_.push_back({path, target, argument});
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(header.data(), static_cast<std::streamsize>(header.size()));
  if (size_bytes > 0) stream.write(static_cast<const char*>(data), size_bytes);
  stream.close();
  if (!stream) throw Failure(fmt::format("{} {}: cannot be written: {}", argument, file, std::strerror(errno)));
}

void OutputFiles::commit() {
  for (const Pending& file : pending_) {
    if (std::rename(file.temporary.c_str(), file.final.c_str()) != 0) {
      throw Failure(fmt::format("{} {}: cannot be written: {}", file.argument, file.final, std::strerror(errno)));
    }
  }
  pending_.clear();
}

}  // namespace tessera::cli
