// Whose files this process takes code from: compiled kernels and NVRTC (docs/reference/cuda.md, "Whose code runs"). Owners and modes are
// read from descriptors, by which the files are then read, so that no name can lead elsewhere in between.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera::cuda {

// An open file or folder, closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { close_now(); }

  explicit operator bool() const { return number_ >= 0; }
  int get() const { return number_; }
  bool close_now();  // false: what was written may not have arrived

 private:
  int number_ = -1;
};

// Users and groups that may write what this process takes code from. At first root and the effective user.
class Writers {
 public:
  Writers();

  // Also the users and groups that may write `path` or a folder on its way, since they may exchange it: the owners of an
  // installation. Everybody is never among them.
  void add_installation(const std::string& path);
  // Also those of this library, which runs already. Folders on its way are as they are: through them strangers could exchange
  // the library itself.
  void add_own_installation(const std::string& library);

  // Why a file or folder is not trusted: "belongs to user 1001", "may be written by group 50 (mode 0775)", "may be written by
  // everybody (mode 0777)"; "" where it is.
  std::string refusal(const struct stat& info) const;
  // The same of a folder on the way. In a sticky one strangers cannot exchange what is not theirs; a group of its owner's
  // number is that user's own.
  std::string refusal_on_the_way(const struct stat& info) const;
  // Of a link, which has no mode.
  std::string refusal_of_link(const struct stat& info) const;

 private:
  void add_writers(const std::string& path, bool own);

  struct Identity {
    dev_t device;
    ino_t inode;
    bool operator==(const Identity&) const = default;
  };
  std::vector<uid_t> users_;
  std::vector<gid_t> groups_;
  std::vector<Identity> own_way_;
};

struct Way {
  const Writers& writers;
  bool to_installation = true;  // false: within one, where every folder must be as trusted as what it holds
  mode_t make = 0;              // the mode of folders that are missing; 0: they are not made
};

// What lies at `path`, absolute or below the open folder `from`, whose own path is `from_path`; every folder and link on the way
// trusted. The last is not looked at: the caller does, by fstat(). It serves fstat() and openat(), and no reading. Closed:
// `reason` says why in one line, "" where nothing lies there.
Descriptor open_trusted(const std::string& path, const Way& way, std::string& reason, const Descriptor* from = nullptr,
                        const std::string& from_path = "");

}  // namespace tessera::cuda
