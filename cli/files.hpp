// Tensors from and to files that the user names.
#pragma once

#include <string>
#include <vector>

#include "output_file.hpp"
#include "tensor.hpp"

namespace tessera::cli {

// Reads FILE.npy, FILE.safetensors:NAME, or FILE.safetensors with `default_name`. `argument` is what messages call it.
FileTensor read_tensor_file(const std::string& file, const std::string& argument, const std::string& default_name);

// Tensors on their way to files that appear complete and all together, or not at all. A .npy file holds one, a
// .safetensors file all those that go there, under their names.
class OutputTensors {
 public:
  // Says where a tensor will go, before any work is done for it. Throws WrongUse, naming `argument`, where it cannot be
  // written or another tensor has that place, however the two are spelt.
  void add(const std::string& file, const std::string& argument, const std::string& default_name);

  // Whether one of them goes to standard output, which then is no place for messages.
  bool use_standard_output() const;

  // The tensor that was added under this argument, in the order of its memory, as `stored_shape`.
  void set(const std::string& argument, const Tensor& tensor, const Shape& stored_shape);

  // Writes all of them and puts them in their places. Throws Failure.
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
