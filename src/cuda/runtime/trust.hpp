// Decides whose files this process loads code from: compiled kernels and NVRTC (docs/reference/cuda.md, "Whose code
// runs"). Owners and modes are read from descriptors, through which the files are then read, so that no name can be
// redirected in between.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera::cuda {

// An open file or folder, closed by the destructor.
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
  bool close_now();  // false: written data may be lost

 private:
  int number_ = -1;
};

// Users and groups that may write the files that this process loads code from. Initially root and the effective user.
class Writers {
 public:
  Writers();

  // Adds the users and groups that may write `path` or a folder of its path, since they may replace it: the owners of
  // an installation. All users (mode o+w) are never added.
  void add_installation(const std::string& path);
  // Adds the same for this library, which runs already. Folders of its path are accepted as they are: an untrusted user
  // who can write there could replace the library itself.
  void add_own_installation(const std::string& library);

  // Why a file or folder is not trusted: "belongs to user 1001", "may be written by group 50 (mode 0775)", "may be
  // written by everybody (mode 0777)"; "" if it is trusted.
  std::string refusal(const struct stat& info) const;
  // The same for a folder of the path. In a sticky folder, users cannot replace files of others; a group with the
  // number of its owner is that user's private group.
  std::string refusal_on_the_way(const struct stat& info) const;
  // The same for a link, which has no mode.
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
  bool to_installation = true;  // false: within one, where every folder must be as trusted as the file
  mode_t make = 0;              // mode for creating missing folders; 0: none are created
};

// Opens `path`, absolute or below the open folder `from` with path `from_path`, if every folder and link of the path is
// trusted. The caller checks the last part by fstat(). The descriptor can be used for fstat() and openat(), not for
// reading. On failure it is closed and `reason` says why in one line, or is "" if nothing exists at the path.
Descriptor open_trusted(const std::string& path, const Way& way, std::string& reason, const Descriptor* from = nullptr,
                        const std::string& from_path = "");

}  // namespace tessera::cuda
