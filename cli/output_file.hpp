// A file that the program writes: it appears complete or not at all.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace tessera::cli {

// An existing file keeps its mode, and its owner if possible; links are followed, also dangling ones. A new file is
// written without a path, or under a temporary name if the file system cannot do that, and commit() moves it to its
// path. A pipe, a device or an open descriptor (/dev/stdout) is written directly.
class OutputFile {
 public:
  // Throws WrongUse, naming `source` ("--out o.npy"), if it cannot be written.
  OutputFile(const std::string& path, std::string source);
  ~OutputFile();  // discards what was not committed
  OutputFile(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& source() const { return source_; }
  // True for any spelling of the two paths.
  bool is_same_as(const OutputFile& other) const;
  bool is_standard_output() const { return standard_output_; }
  bool in_place() const { return kind_ != Kind::kReplaced; }

  // Each throws Failure. The file stays open until the object is destroyed.
  void open();
  int descriptor() const { return descriptor_; }
  void write(const void* data, std::int64_t size_bytes);
  void commit();

 private:
  enum class Kind { kReplaced, kDescriptor, kInPlace };

  [[noreturn]] void fail(const char* what) const;
  void open_replacement();

  std::string path_;    // through all links
  std::string source_;  // its name in messages
  Kind kind_ = Kind::kReplaced;
  bool exists_ = false, standard_output_ = false;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  mode_t mode_ = 0;
  uid_t owner_ = 0;
  gid_t group_ = 0;
  int inherited_ = -1;   // kDescriptor: its number
  int descriptor_ = -1;  // open
  std::string temporary_;
};

// While this object exists, a write to a pipe without a reader fails; otherwise it would end the program.
class IgnoreBrokenPipes {
 public:
  IgnoreBrokenPipes();
  ~IgnoreBrokenPipes();
  IgnoreBrokenPipes(const IgnoreBrokenPipes&) = delete;
  IgnoreBrokenPipes& operator=(const IgnoreBrokenPipes&) = delete;

 private:
  void (*before_)(int);
};

}  // namespace tessera::cli
