#include "cuda/cache.hpp"

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

namespace tessera::cuda {
namespace {

constexpr char kMagic[8] = {'T', 'E', 'S', 'S', 'E', 'R', 'A', '\n'};
constexpr uint32_t kFormat = 1;
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

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() { close_now(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }
  bool close_now() {
    const int closing = std::exchange(descriptor_, -1);
    return closing < 0 || close(closing) == 0;
  }

 private:
  int descriptor_;
};

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

// A limit on the size of files would end the process by a signal; here it is one more reason that a write fails.
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
  for (const int32_t value :
       {binary.arch, binary.registers, binary.spill_bytes, binary.stack_bytes, binary.wgmma_serialized}) {
    put(out, int64_t{value});
  }
  put(out, binary.cubin);
  return out;
}

bool unpack(const std::string& payload, Binary& binary) {
  Reader reader(payload);
  return reader.get(binary.symbol) && reader.get(binary.config) && reader.get(binary.arch) &&
         reader.get(binary.registers) && reader.get(binary.spill_bytes) && reader.get(binary.stack_bytes) &&
         reader.get(binary.wgmma_serialized) && reader.get(binary.cubin) && reader.at_end();
}

// Whole and unchanged since it was written; `key` is what it says of itself.
bool read_entry(const std::string& path, CacheKey& key, Binary& binary) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat info;
  if (!file.is_open() || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  FileHeader header;
  if (!read_all(file.get(), reinterpret_cast<char*>(&header), sizeof header)) return false;
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.format != kFormat) return false;
  if (header.payload_bytes > kMostPayloadBytes ||
      static_cast<uint64_t>(info.st_size) != sizeof header + header.payload_bytes) {
    return false;
  }
  std::string payload(header.payload_bytes, '\0');
  if (!read_all(file.get(), payload.data(), payload.size())) return false;
  if (!(hash_of(payload) == header.payload_hash)) return false;
  key = {header.content, header.compiler};
  return unpack(payload, binary);
}

bool make_folders(const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const std::string part = path.substr(0, slash);
    if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST && slash == std::string::npos) return false;
    if (slash == std::string::npos) return true;
  }
}

// A name that no other writer has.
std::string temporary_name() {
  static std::atomic<uint64_t> counter{0};
  const uint64_t now = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  char name[96];
  std::snprintf(name, sizeof name, "%s%ld-%llx-%llx", kTemporary, static_cast<long>(getpid()),
                static_cast<unsigned long long>(now), static_cast<unsigned long long>(counter++));
  return name;
}

bool write_entry(const std::string& folder, const std::string& name, const std::string& data) {
  const std::string temporary = folder + "/" + temporary_name(), path = folder + "/" + name;
  {
    File file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!file.is_open()) return false;
    if (!write_all(file.get(), data) || !file.close_now()) {
      unlink(temporary.c_str());
      return false;
    }
  }
  if (rename(temporary.c_str(), path.c_str()) == 0) return true;
  // An empty folder may have taken the place.
  if (rmdir(path.c_str()) == 0 && rename(temporary.c_str(), path.c_str()) == 0) return true;
  unlink(temporary.c_str());
  return false;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* stream = folder.empty() ? nullptr : opendir(folder.c_str());
  if (!stream) return names;
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

double age_of(const struct stat& info) { return std::difftime(std::time(nullptr), info.st_mtime); }

}  // namespace

std::string CacheKey::file_name() const {
  return content.hex() + "-" + std::to_string(compiler / 1000) + "." + std::to_string(compiler % 1000 / 10) + kSuffix;
}

std::string Cache::default_folder() {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value ? value : "";
  };
  if (const std::string folder = variable("TESSERA_CACHE_DIR"); !folder.empty()) return folder;
  // Relative paths are to be ignored there: https://specifications.freedesktop.org/basedir-spec/latest/
  if (const std::string folder = variable("XDG_CACHE_HOME"); folder.starts_with('/')) return folder + "/tessera";
  if (const std::string home = variable("HOME"); home.starts_with('/')) return home + "/.cache/tessera";
  return "";
}

std::string Cache::unwritable() const {
  if (folder_.empty()) return "none of TESSERA_CACHE_DIR, XDG_CACHE_HOME and HOME names a folder";
  if (!make_folders(folder_)) return folder_ + " cannot be made: " + std::strerror(errno);
  if (access(folder_.c_str(), W_OK | X_OK) != 0) return folder_ + " cannot be written: " + std::strerror(errno);
  return "";
}

bool Cache::load(const CacheKey& key, Binary& binary) const {
  if (folder_.empty()) return false;
  const auto try_file = [&](const std::string& name) {
    CacheKey found;
    Binary read;
    if (!read_entry(folder_ + "/" + name, found, read) || !(found.content == key.content)) return false;
    if (found.file_name() != name) return false;
    binary = std::move(read);
    return true;
  };
  if (key.compiler != 0) return try_file(key.file_name());
  const std::string prefix = key.content.hex() + "-";
  for (const std::string& name : names_in(folder_)) {
    if (name.starts_with(prefix) && try_file(name)) return true;
  }
  return false;
}

bool Cache::store(const CacheKey& key, const Binary& binary) {
  if (folder_.empty() || !make_folders(folder_)) return false;
  sweep();
  const std::string payload = pack(binary);
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.format = kFormat;
  header.compiler = key.compiler;
  header.content = key.content;
  header.payload_bytes = payload.size();
  header.payload_hash = hash_of(payload);
  std::string data(reinterpret_cast<const char*>(&header), sizeof header);
  return write_entry(folder_, key.file_name(), data + payload);
}

// What writers that were killed have left, once a process.
void Cache::sweep() {
  if (swept_.exchange(true)) return;
  for (const std::string& name : names_in(folder_)) {
    if (!name.starts_with(kTemporary)) continue;
    const std::string path = folder_ + "/" + name;
    struct stat info;
    if (lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && age_of(info) > kLeftoverSeconds) {
      unlink(path.c_str());
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
  for (const std::string& name : names_in(folder_)) {
    if (!entry_name(name)) continue;
    const std::string path = folder_ + "/" + name;
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) continue;
    Entry entry;
    entry.file = name;
    entry.bytes = info.st_size;
    entry.age_seconds = age_of(info);
    entry.intact = read_entry(path, entry.key, entry.binary) && entry.key.file_name() == name;
    entry.binary.cubin.clear();
    entries.push_back(std::move(entry));
  }
  return entries;
}

Cache::Cleared Cache::clear() {
  Cleared cleared;
  for (const std::string& name : names_in(folder_)) {
    if (!entry_name(name) && !name.starts_with(kTemporary)) continue;
    const std::string path = folder_ + "/" + name;
    struct stat info;
    if (lstat(path.c_str(), &info) != 0 || S_ISDIR(info.st_mode) || unlink(path.c_str()) != 0) continue;
    ++cleared.files;
    cleared.bytes += info.st_size;
  }
  const std::lock_guard lock(mutex_);
  unstored_.clear();
  return cleared;
}

}  // namespace tessera::cuda
