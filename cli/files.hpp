// Tensors from and to files that the user names.
#pragma once

#include <string>
#include <vector>

#include "output_file.hpp"
#include "tensor.hpp"

namespace tessera::cli {

// Reads FILE.npy, FILE.safetensors:NAME, or FILE.safetensors with `default_name`. `argument` is its name in messages.
FileTensor read_tensor_file(const std::string& file, const std::string& argument, const std::string& default_name);

// Tensors to be written to files, which appear complete and all together, or not at all. A .npy file holds one tensor,
// a .safetensors file all tensors for that path, under their names.
class OutputTensors {
 public:
  // Registers a tensor's path before any work is done for it. Throws WrongUse, naming `argument`, if the path cannot be
  // written or belongs to another tensor, in any spelling.
  void add(const std::string& file, const std::string& argument, const std::string& default_name);

  // Whether one of them goes to standard output, where messages must then not go.
  bool use_standard_output() const;

  // The tensor that was added under this argument, in the order of its memory, as `stored_shape`.
  void set(const std::string& argument, const Tensor& tensor, const Shape& stored_shape);

  // Writes all of them and moves them to their paths. Throws Failure.
  void commit();

 private:
  struct Entry {
    std::string argument, name;
    Tensor tensor;
    Shape stored_shape;
  };
  struct File {
    OutputFile file;
    bool safetensors;
    std::vector<Entry> entries;
  };
  static void write(File& file);

  std::vector<File> files_;
};

}  // namespace tessera::cli
