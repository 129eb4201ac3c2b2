#include "cuda/runtime/cache.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

#include "core/status.hpp"
#include "cuda/runtime/environment.hpp"

namespace tessera::cuda {
namespace {

constexpr char kMagic[8] = {'T', 'E', 'S', 'S', 'E', 'R', 'A', '\n'};
constexpr uint32_t kFormat = 2;
constexpr const char* kSuffix = ".cubin";
constexpr const char* kTemporary = ".writing-";
constexpr double kLeftoverSeconds = 3600;  // a writer needs milliseconds
constexpr uint64_t kMostPayloadBytes = uint64_t{256} << 20;

struct FileHeader {
  char magic[8];
  uint32_t format;
  int32_t compiler;
  Digest content;
  uint64_t payload_bytes;
  Digest payload_hash;
};
static_assert(sizeof(FileHeader) == 56);

Digest hash_of(const std::string& data) {
  Hasher hasher;
  hasher.bytes(data);
  return hasher.digest();
}

bool read_all(int file, char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = read(file, data, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    data += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

// If a write exceeds the limit on file sizes, the default signal would end the process; blocked, it is an ordinary
// write error.
class FileSizeSignalBlocked {
 public:
  FileSizeSignalBlocked() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~FileSizeSignalBlocked() {
    const timespec now{};
    if (!was_pending_) sigtimedwait(&signal_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  FileSizeSignalBlocked(const FileSizeSignalBlocked&) = delete;
  FileSizeSignalBlocked& operator=(const FileSizeSignalBlocked&) = delete;

 private:
  sigset_t signal_, before_;
  bool was_pending_;
};

bool write_all(int file, const std::string& data) {
  const FileSizeSignalBlocked blocked;
  size_t done = 0;
  while (done < data.size()) {
    const ssize_t wrote = write(file, data.data() + done, data.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    done += static_cast<size_t>(wrote);
  }
  return true;
}

// ---- payload: lengths and bytes, in order ----

void put(std::string& out, int64_t value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); }
void put(std::string& out, const std::string& text) {
  put(out, static_cast<int64_t>(text.size()));
  out += text;
}

class Reader {
 public:
  explicit Reader(const std::string& data) : data_(data) {}
  bool get(int32_t& value) {
    int64_t wide = 0;
    if (!get(wide)) return false;
    value = static_cast<int32_t>(wide);
    return true;
  }
  bool get(int64_t& value) {
    if (data_.size() - at_ < sizeof value) return false;
    std::memcpy(&value, data_.data() + at_, sizeof value);
    at_ += sizeof value;
    return true;
  }
  bool get(std::string& text) {
    int64_t size = 0;
    if (!get(size) || size < 0 || static_cast<uint64_t>(size) > data_.size() - at_) return false;
    text.assign(data_, at_, static_cast<size_t>(size));
    at_ += static_cast<size_t>(size);
    return true;
  }
  bool at_end() const { return at_ == data_.size(); }

 private:
  const std::string& data_;
  size_t at_ = 0;
};

std::string pack(const Binary& binary) {
  std::string out;
  put(out, binary.symbol);
  put(out, binary.config);
  for (const int32_t value : {binary.arch, int32_t{binary.ptx}, binary.registers, binary.spill_bytes,
                              binary.stack_bytes, binary.wgmma_serialized}) {
    put(out, int64_t{value});
  }
  put(out, binary.cubin);
  return out;
}

bool unpack(const std::string& payload, Binary& binary) {
  Reader reader(payload);
  int32_t ptx = 0;
  const bool whole = reader.get(binary.symbol) && reader.get(binary.config) && reader.get(binary.arch) &&
                     reader.get(ptx) && reader.get(binary.registers) && reader.get(binary.spill_bytes) &&
                     reader.get(binary.stack_bytes) && reader.get(binary.wgmma_serialized) &&
                     reader.get(binary.cubin) && reader.at_end();
  binary.ptx = ptx != 0;
  return whole;
}

// Returns "" if the entry is complete, unchanged since it was written, and writable by `writers` only; otherwise the
// reason. `key` is read from the entry.
std::string read_entry(const Descriptor& folder, const std::string& name, const Writers& writers, CacheKey& key,
                       Binary& binary) {
  constexpr const char* kDamaged = "damaged";
  const Descriptor file(openat(folder.get(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat info;
  if (!file || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return kDamaged;
  if (std::string foreign = writers.refusal(info); !foreign.empty()) return foreign;
  FileHeader header;
  if (!read_all(file.get(), reinterpret_cast<char*>(&header), sizeof header)) return kDamaged;
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.format != kFormat) return kDamaged;
  if (header.payload_bytes > kMostPayloadBytes ||
      static_cast<uint64_t>(info.st_size) != sizeof header + header.payload_bytes) {
    return kDamaged;
  }
  std::string payload(header.payload_bytes, '\0');
  if (!read_all(file.get(), payload.data(), payload.size())) return kDamaged;
  if (!(hash_of(payload) == header.payload_hash)) return kDamaged;
  key = {header.content, header.compiler};
  return unpack(payload, binary) && key.file_name() == name ? "" : kDamaged;
}

// A temporary name, unique among all writers.
std::string temporary_name() {
  static std::atomic<uint64_t> counter{0};
  const uint64_t now = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  char name[96];
  std::snprintf(name, sizeof name, "%s%ld-%llx-%llx", kTemporary, static_cast<long>(getpid()),
                static_cast<unsigned long long>(now), static_cast<unsigned long long>(counter++));
  return name;
}

bool write_entry(const Descriptor& folder, const std::string& name, const std::string& data, mode_t mode) {
  const std::string temporary = temporary_name();
  {
    Descriptor file(
        openat(folder.get(), temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode));
    if (!file) return false;
    if (!write_all(file.get(), data) || !file.close_now()) {
      unlinkat(folder.get(), temporary.c_str(), 0);
      return false;
    }
  }
  const auto rename_it = [&] { return renameat(folder.get(), temporary.c_str(), folder.get(), name.c_str()) == 0; };
  if (rename_it()) return true;
  // An empty folder may be in the way.
  if (unlinkat(folder.get(), name.c_str(), AT_REMOVEDIR) == 0 && rename_it()) return true;
  unlinkat(folder.get(), temporary.c_str(), 0);
  return false;
}

std::vector<std::string> names_in(const Descriptor& folder) {
  std::vector<std::string> names;
  const int listed = folder ? openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  DIR* const stream = listed < 0 ? nullptr : fdopendir(listed);
  if (!stream) {
    if (listed >= 0) close(listed);
    return names;
  }
  while (const dirent* entry = readdir(stream)) names.emplace_back(entry->d_name);
  closedir(stream);
  return names;
}

constexpr size_t kHexDigits = 32;

// "<32 hexadecimal digits>-<compiler>.cubin"
bool entry_name(const std::string& name) {
  return name.size() > kHexDigits + 1 && name[kHexDigits] == '-' && name.ends_with(kSuffix) &&
         name.find_first_not_of("0123456789abcdef") == kHexDigits;
}

bool stat_of(const Descriptor& folder, const std::string& name, struct stat& info) {
  return fstatat(folder.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
}

constexpr mode_t kOwnersAlone = 0700, kRightsOfOthers = 0077;

// True if an older version or the user made the folder for the cache: all files in it that the user owns are entries.
bool made_for_entries(const Descriptor& folder) {
  for (const std::string& name : names_in(folder)) {
    struct stat info;
    if (name == "." || name == ".." || entry_name(name) || name.starts_with(kTemporary)) continue;
    if (stat_of(folder, name, info) && info.st_uid == geteuid()) return false;
  }
  return true;
}

// At least 0: a file system's clock may be a tick ahead of time()'s, and a copied folder's files may be of any time.
double age_of(const struct stat& info) { return std::max(0.0, std::difftime(std::time(nullptr), info.st_mtime)); }

}  // namespace

std::string CacheKey::file_name() const {
  return content.hex() + "-" + std::to_string(compiler / 1000) + "." + std::to_string(compiler % 1000 / 10) + kSuffix;
}

std::string Cache::default_folder() {
  if (const std::string folder = environment_variable(kCacheFolder); !folder.empty()) return folder;
  // The specification says to ignore relative paths: https://specifications.freedesktop.org/basedir-spec/latest/
  if (const std::string folder = environment_variable("XDG_CACHE_HOME"); folder.starts_with('/'))
    return folder + "/tessera";
  if (const std::string home = environment_variable("HOME"); home.starts_with('/')) return home + "/.cache/tessera";
  return "";
}

Descriptor Cache::open_folder(bool make, std::string& reason) const {
  reason.clear();
  if (folder_.empty()) {
    reason = "none of TESSERA_CACHE_DIR, XDG_CACHE_HOME and HOME names a folder";
    return {};
  }
  if (!folder_.starts_with('/')) {
    reason = "TESSERA_CACHE_DIR: '" + folder_ + "' is relative, accepted an absolute path";
    return {};
  }
  const mode_t mode = personal_ ? kOwnersAlone : 0755;
  Descriptor folder = open_trusted(folder_, {.writers = writers_, .make = make ? mode : 0}, reason);
  struct stat info;
  if (!folder || fstat(folder.get(), &info) != 0) return {};
  // A sticky folder, such as /tmp, is shared.
  const bool too_open = personal_ && info.st_uid == geteuid() && (info.st_mode & kRightsOfOthers);
  if (too_open && !(info.st_mode & S_ISVTX) && S_ISDIR(info.st_mode) && made_for_entries(folder) &&
      fchmodat(folder.get(), ".", kOwnersAlone, 0) == 0) {
    fstat(folder.get(), &info);
  }
  if (!S_ISDIR(info.st_mode)) reason = folder_ + " is no folder";
  if (const std::string foreign = writers_.refusal(info); !foreign.empty()) reason = folder_ + " " + foreign;
  return reason.empty() ? std::move(folder) : Descriptor();
}

std::string Cache::unwritable() const {
  std::string reason;
  const Descriptor folder = open_folder(true, reason);
  if (folder && faccessat(folder.get(), ".", W_OK | X_OK, AT_EACCESS) != 0) {
    reason = folder_ + " cannot be written: " + std::strerror(errno);
  }
  return reason;
}

std::string Cache::refusal() const {
  std::string reason;
  open_folder(false, reason);
  return reason;
}

bool Cache::load(const CacheKey& key, Binary& binary) const {
  std::string reason;
  const Descriptor folder = open_folder(false, reason);
  if (!folder) return false;
  const auto try_file = [&](const std::string& name) {
    CacheKey found;
    Binary read;
    if (!read_entry(folder, name, writers_, found, read).empty() || !(found.content == key.content)) return false;
    binary = std::move(read);
    return true;
  };
  if (key.compiler != 0) return try_file(key.file_name());
  const std::string prefix = key.content.hex() + "-";
  for (const std::string& name : names_in(folder)) {
    if (name.starts_with(prefix) && try_file(name)) return true;
  }
  return false;
}

bool Cache::store(const CacheKey& key, const Binary& binary) {
  std::string reason;
  const Descriptor folder = open_folder(true, reason);
  if (!folder) return false;
  sweep(folder);
  const std::string payload = pack(binary);
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.format = kFormat;
  header.compiler = key.compiler;
  header.content = key.content;
  header.payload_bytes = payload.size();
  header.payload_hash = hash_of(payload);
  std::string data(reinterpret_cast<const char*>(&header), sizeof header);
  return write_entry(folder, key.file_name(), data + payload, personal_ ? 0600 : 0644);
}

// Removes the files of killed writers, once per process.
void Cache::sweep(const Descriptor& folder) {
  if (swept_.exchange(true)) return;
  for (const std::string& name : names_in(folder)) {
    struct stat info;
    if (name.starts_with(kTemporary) && stat_of(folder, name, info) && S_ISREG(info.st_mode) &&
        age_of(info) > kLeftoverSeconds) {
      unlinkat(folder.get(), name.c_str(), 0);
    }
  }
}

struct Cache::Flight {
  std::mutex mutex;
  std::condition_variable landed;
  bool done = false;
  tessera_status status{};
  Binary binary;
};

tessera_status Cache::get(const CacheKey& key, const Compile& compile, Binary& binary, bool* compiled) {
  if (compiled) *compiled = false;
  if (!folder_.empty() && !folder_.starts_with('/')) return invalid("%s", refusal().c_str());
  const std::string name = key.file_name();
  std::shared_ptr<Flight> flight;
  bool ours = false;
  {
    const std::lock_guard lock(mutex_);
    if (const auto kept = unstored_.find(name); kept != unstored_.end()) {
      binary = kept->second;
      return ok();
    }
    std::shared_ptr<Flight>& slot = flights_[name];
    ours = !slot;
    if (ours) slot = std::make_shared<Flight>();
    flight = slot;
  }
  if (!ours) {
    std::unique_lock lock(flight->mutex);
    flight->landed.wait(lock, [&] { return flight->done; });
    if (flight->status.code == TESSERA_OK) binary = flight->binary;
    return flight->status;
  }

  tessera_status status = ok();
  bool stored = true;
  try {
    if (!load(key, flight->binary)) {
      flight->binary = {};
      status = compile(flight->binary);
      if (status.code == TESSERA_OK) {
        stored = store(key, flight->binary);
        if (compiled) *compiled = true;
      }
    }
    if (status.code == TESSERA_OK) binary = flight->binary;
  } catch (const std::exception& error) {
    status = internal("kernel cache: %s", error.what());
  }
  {
    const std::lock_guard lock(mutex_);
    flights_.erase(name);
    if (status.code == TESSERA_OK && !stored) unstored_[name] = flight->binary;
  }
  {
    const std::lock_guard lock(flight->mutex);
    flight->status = status;
    flight->done = true;
  }
  flight->landed.notify_all();
  return status;
}

std::vector<Cache::Entry> Cache::list() const {
  std::vector<Entry> entries;
  std::string reason;
  const Descriptor folder = open_folder(false, reason);
  for (const std::string& name : names_in(folder)) {
    struct stat info;
    if (!entry_name(name) || !stat_of(folder, name, info)) continue;
    Entry entry;
    entry.file = name;
    entry.bytes = info.st_size;
    entry.age_seconds = age_of(info);
    entry.fault = read_entry(folder, name, writers_, entry.key, entry.binary);
    entry.binary.cubin.clear();
    entries.push_back(std::move(entry));
  }
  return entries;
}

Cache::Cleared Cache::clear() {
  Cleared cleared;
  std::string reason;
  const Descriptor folder = open_folder(false, reason);
  for (const std::string& name : names_in(folder)) {
    if (!entry_name(name) && !name.starts_with(kTemporary)) continue;
    struct stat info;
    if (!stat_of(folder, name, info) || S_ISDIR(info.st_mode) || unlinkat(folder.get(), name.c_str(), 0) != 0) continue;
    ++cleared.files;
    cleared.bytes += info.st_size;
  }
  const std::lock_guard lock(mutex_);
  unstored_.clear();
  return cleared;
}

}  // namespace tessera::cuda
