// Compiled kernels on disk, addressed by content. Many threads and processes may use one folder at once: entries are
// created by rename, complete or not at all, and an entry that fails its checksum is compiled again. So is an entry
// that an untrusted user may have written: checksums guard against accidents, owners and modes against people
// (trust.hpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/runtime/hash.hpp"
#include "cuda/runtime/trust.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// A compiled kernel and the compiler's report on it, which of PTX says nothing.
struct Binary {
  std::string symbol;  // "tessera_fwd_sm80"
  std::string config;  // "tessera::FwdSm80Config{...}"
  std::string cubin;
  int32_t arch = 0;  // 90
  bool ptx = false;  // `cubin` is PTX of the virtual architecture
  int32_t registers = 0, spill_bytes = 0, stack_bytes = 0;
  int32_t wgmma_serialized = 0;  // ptxas could not overlap wgmma instructions
};

struct CacheKey {
  Digest content;        // of everything except the compiler
  int32_t compiler = 0;  // NVRTC's version, 1000 * major + 10 * minor; 0: any version is accepted

  std::string file_name() const;  // "0123...cdef-13.0.cubin"
};

class Cache {
 public:
  using Compile = std::function<tessera_status(Binary&)>;

  // The user's own cache: no other user may read or write it. `folder` "": in memory only. Nothing is opened before the
  // first call.
  explicit Cache(std::string folder) : folder_(std::move(folder)) {}
  // A shared set of kernels in an installation that belongs to `writers`; others may read it.
  Cache(std::string folder, Writers writers)
      : folder_(std::move(folder)), writers_(std::move(writers)), personal_(false) {}

  // TESSERA_CACHE_DIR, otherwise XDG_CACHE_HOME/tessera, otherwise HOME/.cache/tessera, otherwise "".
  static std::string default_folder();

  // Returns false if there is no trusted entry.
  bool load(const CacheKey& key, Binary& binary) const;
  // Returns false if it cannot be written now.
  bool store(const CacheKey& key, const Binary& binary);

  // Reads the entry, or calls `compile`: one thread of the process compiles a key while the other threads that need it
  // wait. INVALID_ARGUMENT if the folder's path is relative.
  tessera_status get(const CacheKey& key, const Compile& compile, Binary& binary, bool* compiled = nullptr);

  struct Entry {
    std::string file;
    CacheKey key;
    Binary binary;  // without cubin
    int64_t bytes = 0;
    double age_seconds = 0;
    std::string fault;  // "damaged", or why it is not trusted; "" if it would be loaded
  };
  std::vector<Entry> list() const;

  struct Cleared {
    int64_t files = 0, bytes = 0;
  };
  // Removes entries and the files of killed writers, and no other files.
  Cleared clear();

  const std::string& folder() const { return folder_; }
  // Why the folder cannot be written, or "" if it can. Makes the folder.
  std::string unwritable() const;
  // Why the folder is not read, or "" if it is, or would be if it existed.
  std::string refusal() const;

 private:
  struct Flight;  // a compilation that other threads wait for

  // Opens the folder if it is trusted. Otherwise returns a closed descriptor; `reason` says why, or is "" if there is
  // no folder.
  Descriptor open_folder(bool make, std::string& reason) const;
  void sweep(const Descriptor& folder);

  std::string folder_;
  Writers writers_;
  bool personal_ = true;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Flight>> flights_;
  std::map<std::string, Binary> unstored_;  // entries that could not be written to the folder
  std::atomic<bool> swept_{false};
};

}  // namespace tessera::cuda
