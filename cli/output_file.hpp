// A file that the program writes: it appears complete or not at all.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace tessera::cli {

// What is at a path keeps its mode, and its owner where that may be; links are followed, dangling ones, too. A new file
// is written where no path leads to it, or under a temporary name where the file system cannot do that, and is put in its
// place by commit(). A pipe, a terminal's null device or an open descriptor (/dev/stdout) is written as it stands.
class OutputFile {
 public:
  // Throws WrongUse, naming `source` ("--out o.npy"), where nothing can be written.
  OutputFile(const std::string& path, std::string source);
  ~OutputFile();  // what was not committed is gone
  OutputFile(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& source() const { return source_; }
  // However the paths of the two are spelt.
  bool is_same_as(const OutputFile& other) const;
  bool is_standard_output() const { return standard_output_; }
  bool in_place() const { return kind_ != Kind::kReplaced; }

  // Each throws Failure. Opened is a file that stays open until the object is gone.
  void open();
  int descriptor() const { return descriptor_; }
  void write(const void* data, std::int64_t size_bytes);
  void commit();

 private:
  enum class Kind { kReplaced, kDescriptor, kInPlace };

  [[noreturn]] void fail(const char* what) const;
  void open_replacement();

  std::string path_;    // through all links
  std::string source_;  // as messages call it
  Kind kind_ = Kind::kReplaced;
  bool exists_ = false, standard_output_ = false;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  mode_t mode_ = 0;
  uid_t owner_ = 0;
  gid_t group_ = 0;
  int inherited_ = -1;   // kDescriptor: which
  int descriptor_ = -1;  // open
  std::string temporary_;
};

// A write to a pipe without a reader fails while this lives, where it would end the program.
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
