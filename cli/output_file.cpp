#include "output_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "error.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kPermissions = 0777;
constexpr mode_t kNewFile = 0666;  // less the umask

// Returns 3 if `path` is /proc/self/fd/3, to which /dev/fd/3 and /dev/stdout lead.
std::optional<int> own_descriptor(const fs::path& folder, const fs::path& name) {
  if (folder != fmt::format("/proc/{}/fd", getpid())) return {};
  const std::string text = name.string();
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

// Resolves a path through links, also dangling ones: a folder without links, and a name in it that is not a link.
struct Resolved {
  fs::path folder, name;
  std::optional<int> descriptor;
};

Resolved resolve(fs::path path, const std::string& source) {
  constexpr int kMostLinks = 40;  // Linux's own limit
  for (int links = 0; links <= kMostLinks; ++links) {
    const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
    std::error_code error;
    const fs::path folder = fs::canonical(parent, error);
    if (error || !fs::is_directory(folder)) {
      throw WrongUse(fmt::format("{}: directory {} does not exist", source, parent.string()));
    }
    const fs::path name = path.filename();
    if (name.empty() || name == "." || name == "..") {
      throw WrongUse(fmt::format("{}: is a directory, accepted is the path of a file to write", source));
    }
    if (const std::optional<int> number = own_descriptor(folder, name)) return {folder, name, number};
    const fs::path target = fs::read_symlink(folder / name, error);
    if (error) return {folder, name, {}};  // not a link
    path = folder / target;                // `target` alone where that is absolute
  }
  throw WrongUse(fmt::format("{}: {}", source, std::strerror(ELOOP)));
}

}  // namespace

OutputFile::OutputFile(const std::string& path, std::string source) : source_(std::move(source)) {
  if (path.empty()) throw WrongUse(fmt::format("{}: an empty name, accepted is the path of a file to write", source_));
  struct stat facts {};
  std::error_code error;
  if (path.ends_with('/') || fs::is_directory(path, error)) {
    throw WrongUse(fmt::format("{}: is a directory, accepted is the path of a file to write", source_));
  }
  const Resolved place = resolve(path, source_);
  path_ = (place.folder / place.name).string();
  if (place.descriptor) {
    kind_ = Kind::kDescriptor;
    inherited_ = *place.descriptor;
    exists_ = fstat(inherited_, &facts) == 0;
    if (!exists_) throw WrongUse(fmt::format("{}: is not open", source_));
  } else {
    exists_ = stat(path_.c_str(), &facts) == 0;
    if (exists_ && !S_ISREG(facts.st_mode)) kind_ = Kind::kInPlace;
  }
  device_ = facts.st_dev, inode_ = facts.st_ino;
  mode_ = facts.st_mode, owner_ = facts.st_uid, group_ = facts.st_gid;

  if (S_ISBLK(mode_) || S_ISSOCK(mode_)) {
    throw WrongUse(
        fmt::format("{}: is a {}, accepted is a file or a pipe", source_, S_ISBLK(mode_) ? "block device" : "socket"));
  }
  const bool terminal = kind_ == Kind::kDescriptor && isatty(inherited_) == 1;
  if (terminal) throw WrongUse(fmt::format("{}: is a terminal, accepted is a file or a pipe", source_));
  // Root may write any file, so the mode itself is checked.
  const bool read_only = (mode_ & 0222) == 0 || access(path_.c_str(), W_OK) != 0;
  if (exists_ && kind_ != Kind::kDescriptor && read_only) {
    throw WrongUse(fmt::format("{}: is there and read-only, accepted is a file that may be written", source_));
  }
  if (kind_ == Kind::kReplaced && access(place.folder.c_str(), W_OK | X_OK) != 0) {
    throw WrongUse(
        fmt::format("{}: directory {} cannot be written: {}", source_, place.folder.string(), std::strerror(errno)));
  }
  // Any number of writers may use /dev/null.
  struct stat standard {};
  standard_output_ = exists_ && !S_ISCHR(mode_) && fstat(STDOUT_FILENO, &standard) == 0 && standard.st_dev == device_ &&
                     standard.st_ino == inode_;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      source_(std::move(other.source_)),
      kind_(other.kind_),
      exists_(other.exists_),
      standard_output_(other.standard_output_),
      device_(other.device_),
      inode_(other.inode_),
      mode_(other.mode_),
      owner_(other.owner_),
      group_(other.group_),
      inherited_(other.inherited_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      temporary_(std::exchange(other.temporary_, {})) {}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
  if (descriptor_ >= 0) close(descriptor_);
}

bool OutputFile::is_same_as(const OutputFile& other) const {
  if (exists_ && other.exists_) return device_ == other.device_ && inode_ == other.inode_;
  return path_ == other.path_;
}

void OutputFile::fail(const char* what) const {
  throw Failure(fmt::format("{}: {}: {}", source_, what, std::strerror(errno)));
}

void OutputFile::open() {
  if (kind_ == Kind::kReplaced) {
    open_replacement();
  } else if (kind_ == Kind::kDescriptor) {
    descriptor_ = fcntl(inherited_, F_DUPFD_CLOEXEC, 0);
  } else {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  }
  if (descriptor_ < 0) fail("cannot be written");
}

void OutputFile::open_replacement() {
  const std::string folder = fs::path(path_).parent_path().string();
  const mode_t mode = exists_ ? mode_ & kPermissions & 0600 : kNewFile;  // private until it has its owner
  // A file without a name disappears with the program, however it ends. /proc gives it a name.
  if (access("/proc/self/fd", X_OK) == 0) descriptor_ = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode);
  if (descriptor_ < 0) {
    static int count = 0;
    const std::string name = fmt::format("{}/.tessera-{}-{}.partial", folder, getpid(), count++);
    descriptor_ = ::open(name.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, mode);
    if (descriptor_ >= 0) temporary_ = name;
  }
  if (descriptor_ < 0 || !exists_) return;
  // Keeps the mode, and owner and group if that is allowed.
  if (fchown(descriptor_, owner_, group_) != 0 && fchown(descriptor_, static_cast<uid_t>(-1), group_) != 0) errno = 0;
  if (fchmod(descriptor_, mode_ & kPermissions) != 0) fail("cannot be given the mode of what is there");
}

void OutputFile::write(const void* data, std::int64_t size_bytes) {
  constexpr std::int64_t kMostAtOnce = 1 << 30;  // of what Linux writes in one call
  const IgnoreBrokenPipes ignore;
  const auto* from = static_cast<const char*>(data);
  while (size_bytes > 0) {
    const ssize_t count = ::write(descriptor_, from, static_cast<std::size_t>(std::min(size_bytes, kMostAtOnce)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot be written");
    from += count;
    size_bytes -= count;
  }
}

void OutputFile::commit() {
  if (kind_ != Kind::kReplaced) return;
  if (temporary_.empty()) {
    static int count = 0;
    const std::string folder = fs::path(path_).parent_path().string();
    const std::string name = fmt::format("{}/.tessera-{}-{}.named.partial", folder, getpid(), count++);
    const std::string unnamed = fmt::format("/proc/self/fd/{}", descriptor_);
    if (linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0) fail("cannot be written");
    temporary_ = name;
  }
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be written");
  temporary_.clear();
}

IgnoreBrokenPipes::IgnoreBrokenPipes() : before_(std::signal(SIGPIPE, SIG_IGN)) {}

IgnoreBrokenPipes::~IgnoreBrokenPipes() { std::signal(SIGPIPE, before_); }

}  // namespace tessera::cli
