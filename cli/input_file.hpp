// A file that is read from its beginning to its end: a regular one or a pipe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::cli {

class InputFile {
 public:
  // Throws WrongUse, naming `source`, where there is nothing to read.
  InputFile(const std::string& path, std::string source);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  // How many bytes a regular file holds; none: a pipe or a terminal, of which only reading tells.
  std::optional<std::int64_t> size() const { return size_; }

  // Whether there were so many bytes. Throws Failure where the system cannot read.
  bool read(void* data, std::int64_t size_bytes);
  bool at_end();  // reads on where it is not

  std::int64_t position() const { return position_; }  // bytes from the beginning
  void seek(std::int64_t position);                    // of a regular file

 private:
  std::string source_;
  int descriptor_ = -1;
  std::int64_t position_ = 0;
  std::optional<std::int64_t> size_;
};

}  // namespace tessera::cli
