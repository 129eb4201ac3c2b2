#include "cuda/runtime/trust.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace tessera::cuda {
namespace {

template <class T>
bool contains(const std::vector<T>& values, const T& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}
template <class T>
void add(std::vector<T>& values, const T& value) {
  if (!contains(values, value)) values.push_back(value);
}

std::string text_of(const char* what, unsigned number) { return what + std::to_string(number); }

std::string text_of_mode(const struct stat& info) {
  char text[32];
  std::snprintf(text, sizeof text, " (mode %04o)", static_cast<unsigned>(info.st_mode & 07777));
  return text;
}

// In a user namespace, such as that of a rootless container, files of the outer root appear to belong to the overflow
// user.
bool root_outside(uid_t user) {
  constexpr uid_t kOverflow = 65534;
  constexpr long long kAllUsers = 4294967295;
  if (user != kOverflow) return false;
  long long first = 0, outside = 0, count = kAllUsers;
  std::ifstream("/proc/self/uid_map") >> first >> outside >> count;
  return first != 0 || outside != 0 || count != kAllUsers;
}

// Judges a folder or file by the mode `judged`; the message states its actual mode.
std::string judge(bool foreign, mode_t judged, bool group_is_known, const struct stat& info) {
  if (foreign) return text_of("belongs to user ", info.st_uid);
  if (judged & S_IWOTH) return "may be written by everybody" + text_of_mode(info);
  if ((judged & S_IWGRP) && !group_is_known) {
    return text_of("may be written by group ", info.st_gid) + text_of_mode(info);
  }
  return "";
}

}  // namespace

bool Descriptor::close_now() {
  const int closing = std::exchange(number_, -1);
  return closing < 0 || close(closing) == 0;
}

Writers::Writers() : users_{0} { add(users_, geteuid()); }

void Writers::add_installation(const std::string& path) { add_writers(path, false); }
void Writers::add_own_installation(const std::string& library) { add_writers(library, true); }

void Writers::add_writers(const std::string& path, bool own) {
  char* const resolved = realpath(path.c_str(), nullptr);
  const std::string real = resolved ? resolved : "";
  std::free(resolved);
  for (size_t end = real.empty() ? std::string::npos : 0; end != std::string::npos; end = real.find('/', end + 1)) {
    struct stat info;
    if (stat(end == 0 ? "/" : real.substr(0, end).c_str(), &info) != 0) continue;
    add(users_, info.st_uid);
    if ((info.st_mode & S_IWGRP) && !(info.st_mode & S_ISVTX)) add(groups_, info.st_gid);
    if (own) add(own_way_, Identity{info.st_dev, info.st_ino});
  }
  struct stat info;
  if (real.empty() || stat(real.c_str(), &info) != 0) return;
  add(users_, info.st_uid);
  if (info.st_mode & S_IWGRP) add(groups_, info.st_gid);
}

std::string Writers::refusal_of_link(const struct stat& info) const {
  return judge(!contains(users_, info.st_uid), 0, true, info);
}

std::string Writers::refusal(const struct stat& info) const {
  return judge(!contains(users_, info.st_uid), info.st_mode, contains(groups_, info.st_gid), info);
}

std::string Writers::refusal_on_the_way(const struct stat& info) const {
  if (contains(own_way_, {info.st_dev, info.st_ino})) return "";
  const bool foreign = !contains(users_, info.st_uid) && !root_outside(info.st_uid);
  const bool group_is_known = contains(groups_, info.st_gid) || info.st_gid == info.st_uid;
  return judge(foreign, info.st_mode & S_ISVTX ? 0 : info.st_mode, group_is_known, info);
}

Descriptor open_trusted(const std::string& path, const Way& way, std::string& reason, const Descriptor* from,
                        const std::string& from_path) {
  constexpr int kMostLinks = 40;
  constexpr int kFolder = O_PATH | O_DIRECTORY | O_CLOEXEC;
  reason.clear();
  const auto refuse = [&reason](const std::string& where, const std::string& why) {
    reason = where + " " + why;
    return Descriptor();
  };
  Descriptor at(from ? openat(from->get(), ".", kFolder) : open("/", kFolder));
  std::string rest = path, walked = from_path;  // `rest`: the part of the path not walked yet
  struct stat info;
  if (!at || fstat(at.get(), &info) != 0) return refuse("/", std::strerror(errno));
  bool within = !way.to_installation;  // false until a link leads out of the installation
  for (int links = 0;;) {
    const size_t begin = rest.find_first_not_of('/');
    if (begin == std::string::npos) return at;
    const size_t end = std::min(rest.find('/', begin), rest.size());
    const std::string part = rest.substr(begin, end - begin);
    // Checks the folder reached so far, which is not the last part.
    const std::string foreign = within ? way.writers.refusal(info) : way.writers.refusal_on_the_way(info);
    if (!foreign.empty()) return refuse(walked.empty() ? "/" : walked, foreign);
    const std::string here = walked + "/" + part;
    const bool not_made = way.make != 0 && mkdirat(at.get(), part.c_str(), way.make) != 0 && errno != EEXIST;
    const int why = errno;
    Descriptor next(openat(at.get(), part.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (!next || fstat(next.get(), &info) != 0) {
      if (not_made) return refuse(here, std::string("cannot be made: ") + std::strerror(why));
      return errno == ENOENT ? Descriptor() : refuse(here, std::string("cannot be opened: ") + std::strerror(errno));
    }
    rest.erase(0, end);
    if (S_ISLNK(info.st_mode)) {
      if (const std::string whose = way.writers.refusal_of_link(info); !whose.empty()) return refuse(here, whose);
      char target[PATH_MAX];
      const ssize_t length = readlinkat(next.get(), "", target, sizeof target);
      if (length <= 0 || ++links > kMostLinks) return refuse(here, "leads nowhere");
      rest = std::string(target, static_cast<size_t>(length)) + rest;
      if (target[0] == '/') at = Descriptor(open("/", kFolder)), walked.clear(), within = false;
      if (!at || fstat(at.get(), &info) != 0) return refuse(here, std::strerror(errno));
      continue;
    }
    if (rest.find_first_not_of('/') != std::string::npos && !S_ISDIR(info.st_mode)) return refuse(here, "is no folder");
    at = std::move(next), walked = here;
  }
}

}  // namespace tessera::cuda
