#include "input_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.hpp"

namespace tessera::cli {

InputFile::InputFile(const std::string& path, std::string source)
    : source_(std::move(source)), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  struct stat facts {};
  if (descriptor_ < 0 || fstat(descriptor_, &facts) != 0) {
    const int error = errno;
    if (descriptor_ >= 0) close(descriptor_);
    throw WrongUse(fmt::format("{}: cannot be opened: {}", source_, std::strerror(error)));
  }
  if (S_ISDIR(facts.st_mode)) {
    close(descriptor_);
    throw WrongUse(fmt::format("{}: is a directory, accepted is a file", source_));
  }
  if (S_ISREG(facts.st_mode)) size_ = facts.st_size;
}

InputFile::~InputFile() { close(descriptor_); }

bool InputFile::read(void* data, std::int64_t size_bytes) {
  constexpr std::int64_t kMostAtOnce = 1 << 30;  // of what Linux reads in one call
  auto* to = static_cast<char*>(data);
  while (size_bytes > 0) {
    const ssize_t count = ::read(descriptor_, to, static_cast<std::size_t>(std::min(size_bytes, kMostAtOnce)));
    if (count == 0) return false;
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Failure(fmt::format("{}: cannot be read: {}", source_, std::strerror(errno)));
    to += count;
    size_bytes -= count;
    position_ += count;
  }
  return true;
}

bool InputFile::at_end() {
  char next = 0;
  return !read(&next, 1);
}

void InputFile::seek(std::int64_t position) {
  if (lseek(descriptor_, position, SEEK_SET) < 0) {
    throw Failure(fmt::format("{}: cannot be read: {}", source_, std::strerror(errno)));
  }
  position_ = position;
}

}  // namespace tessera::cli
