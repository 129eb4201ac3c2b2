// Tensors from and to files that the user names.
#pragma once

#include <string>
#include <vector>

#include "tensor.hpp"

namespace tessera::cli {

// Reads FILE.npy, FILE.safetensors:NAME, or FILE.safetensors with `default_name`. `argument` is what messages call it.
FileTensor read_tensor_file(const std::string& file, const std::string& argument, const std::string& default_name);

// Files that appear complete and all together, or not at all: each is written beside its place and then renamed.
class OutputFiles {
 public:
  OutputFiles() = default;
  ~OutputFiles();
  OutputFiles(const OutputFiles&) = delete;
  OutputFiles& operator=(const OutputFiles&) = delete;

  // Announces a file, before any work is done for it. Throws WrongUse naming `argument` if it cannot be written there.
  static void check(const std::string& file, const std::string& argument);

  // Writes a tensor in the order of its memory, as `stored_shape`. Throws Failure.
  void write(const std::string& file, const std::string& argument, const std::string& default_name,
             const Tensor& tensor, const Shape& stored_shape);
  // Writes bytes.
  void write(const std::string& file, const std::string& argument, const std::string& header, const void* data,
             std::int64_t size_bytes);

  // Puts every file in its place. Throws Failure.
  void commit();

 private:
  struct Pending {
    std::string temporary, final, argument;
  };
  std::vector<Pending> pending_;
};

}  // namespace tessera::cli
