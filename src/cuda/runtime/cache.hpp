// Compiled kernels on disk, by content. Many threads and processes may use one folder at once: entries appear by rename,
// whole or not at all, and what does not add up to its own checksum is compiled again. So is what a stranger may have written:
// a checksum guards against accidents, owners and modes against people (trust.hpp).
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

// A compiled kernel and what the compiler said of it.
struct Binary {
  std::string symbol;  // "tessera_fwd_sm80"
  std::string config;  // "tessera::FwdConfig{...}"
  std::string cubin;
  int32_t arch = 0;  // 90
  int32_t registers = 0, spill_bytes = 0, stack_bytes = 0;
  int32_t wgmma_serialized = 0;  // ptxas gave up on overlapping wgmma
};

struct CacheKey {
  Digest content;        // of everything but the compiler
  int32_t compiler = 0;  // NVRTC's version, 1000 * major + 10 * minor; 0: unknown, any will do

  std::string file_name() const;  // "0123...cdef-13.0.cubin"
};

class Cache {
 public:
  using Compile = std::function<tessera_status(Binary&)>;

  // The user's own: nobody else may write it or read it. `folder` "": in memory only. Nothing is opened before the first call.
  explicit Cache(std::string folder) : folder_(std::move(folder)) {}
  // A set that others read, too, in an installation that belongs to `writers`.
  Cache(std::string folder, Writers writers)
      : folder_(std::move(folder)), writers_(std::move(writers)), personal_(false) {}

  // TESSERA_CACHE_DIR, else XDG_CACHE_HOME/tessera, else HOME/.cache/tessera, else "".
  static std::string default_folder();

  // False: there is none that can be trusted.
  bool load(const CacheKey& key, Binary& binary) const;
  // False: it cannot be written here, now.
  bool store(const CacheKey& key, const Binary& binary);

  // From the folder, or by `compile`, which one thread of the process runs for a key while others that want it wait.
  // INVALID_ARGUMENT where the folder's path is relative.
  tessera_status get(const CacheKey& key, const Compile& compile, Binary& binary, bool* compiled = nullptr);

  struct Entry {
    std::string file;
    CacheKey key;
    Binary binary;  // without cubin
    int64_t bytes = 0;
    double age_seconds = 0;
    std::string fault;  // "damaged", or why it is not trusted; "" when it would be loaded
  };
  std::vector<Entry> list() const;

  struct Cleared {
    int64_t files = 0, bytes = 0;
  };
  // Takes away entries and leftovers of writers, and nothing else that lies there.
  Cleared clear();

  const std::string& folder() const { return folder_; }
  // Why nothing can be kept in the folder, "" when it can. Makes the folder.
  std::string unwritable() const;
  // Why nothing is read from it, "" when it is or would be if it were there.
  std::string refusal() const;

 private:
  struct Flight;  // a compilation that others wait for

  // The folder, trusted. Closed: `reason` says why, "" where there is none.
  Descriptor open_folder(bool make, std::string& reason) const;
  void sweep(const Descriptor& folder);

  std::string folder_;
  Writers writers_;
  bool personal_ = true;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Flight>> flights_;
  std::map<std::string, Binary> unstored_;  // what the folder would not take
  std::atomic<bool> swept_{false};
};

}  // namespace tessera::cuda
