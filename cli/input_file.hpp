// A file that is read from its beginning to its end: a regular one or a pipe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::cli {

class InputFile {
 public:
  // Throws WrongUse, naming `source`, if there is nothing to read.
  InputFile(const std::string& path, std::string source);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  // The size of a regular file; none for a pipe or a terminal, whose size only reading tells.
  std::optional<std::int64_t> size() const { return size_; }

  // Whether there were enough bytes. Throws Failure if the system cannot read.
  bool read(void* data, std::int64_t size_bytes);
  bool at_end();  // may read ahead

  std::int64_t position() const { return position_; }  // bytes from the beginning
  void seek(std::int64_t position);                    // of a regular file

 private:
  std::string source_;
  int descriptor_ = -1;
  std::int64_t position_ = 0;
  std::optional<std::int64_t> size_;
};

}  // namespace tessera::cli
