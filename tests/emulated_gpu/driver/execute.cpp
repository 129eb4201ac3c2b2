// Executes work. If a kernel fails (it accesses unmapped memory, its blocks deadlock), its context is lost, as on a
// GPU.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "device.hpp"
#include "kernel.hpp"
#include "memory.hpp"
#include "work.hpp"

namespace tessera::emulated {
namespace {

// EMULATED_GPU_SEED determines the order of threads and everything else that a GPU leaves unspecified; by default 0: in
// order, and copies at once. Each launch of a process derives another order from the seed.
unsigned next_seed() {
  static const char* const text = std::getenv("EMULATED_GPU_SEED");
  static const unsigned first = text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : 0;
  static unsigned launches = 0;
  constexpr unsigned kOdd = 0x9E3779B9;  // 2^32 / golden ratio
  return first == 0 ? 0 : (first + ++launches * kOdd) | 1u;
}

// With EMULATED_GPU_DEPENDENCIES=late, a kernel that may start before the previous one has ended finds memory as it was
// before that one, until no thread of it can go on without.
class Dependencies {
 public:
  static Dependencies& get() {
    static Dependencies& it = *new Dependencies;
    return it;
  }

  void begin(bool early) {
    if (!late_) return;
    std::vector<Content> now = contents();
    if (early && after_kernel_) {
      for (const Content& written : now) hide(written);
    }
    hides_ = hidden_.empty() ? 0 : 1;
    before_ = std::move(now), after_kernel_ = true;
  }
  // Shows what begin() has hidden.
  void complete() {
    for (const Hidden& byte : hidden_) *byte.at = byte.value;
    hidden_.clear();
    hides_ = 0;
  }
  const int* hides() const { return &hides_; }
  void other_work() { after_kernel_ = false; }

 private:
  struct Content {
    char* at = nullptr;
    std::vector<char> bytes{};
  };
  struct Hidden {
    char* at;
    char value;
  };

  static std::vector<Content> contents() {
    std::vector<Content> all;
    for (const Allocation& allocation : allocations()) {
      char* const at = reinterpret_cast<char*>(allocation.address);
      all.push_back({at, {at, at + allocation.bytes}});
    }
    return all;
  }
  void hide(const Content& written) {
    for (const Content& old : before_) {
      if (old.at != written.at || old.bytes.size() != written.bytes.size()) continue;
      for (size_t n = 0; n < old.bytes.size(); ++n) {
        if (old.bytes[n] == written.bytes[n]) continue;
        hidden_.push_back({written.at + n, written.bytes[n]});
        written.at[n] = old.bytes[n];
      }
    }
  }

  const bool late_ = [] {
    const char* const text = std::getenv("EMULATED_GPU_DEPENDENCIES");
    return text && std::strcmp(text, "late") == 0;
  }();
  bool after_kernel_ = false;
  int hides_ = 0;
  std::vector<Content> before_{};  // the last kernel
  std::vector<Hidden> hidden_{};
};

// Prints the reason of a failure to standard error.
CUresult run(KernelWork& work) {
  const Kernel& kernel = *work.kernel;
  std::vector<void*> params = work.arguments.pointers();
  EmulatedLaunch launch;
  for (int i = 0; i < 3; ++i) launch.grid[i] = work.grid[i], launch.block[i] = work.block[i];
  launch.cluster[0] = kernel.bounds.cluster;
  launch.smem_bytes = work.smem_bytes;
  launch.params = params.data();
  launch.multiprocessors = static_cast<unsigned>(multiprocessors()) * kernel.bounds.min_blocks;
  launch.seed = next_seed();
  Dependencies::get().begin(work.early);
  const int failed = kernel.run(&launch);
  Dependencies::get().complete();
  return failed ? kLaunchFailed : kSuccess;
}

CUresult run(const MemsetWork& work) {
  Dependencies::get().other_work();
  auto* const at = reinterpret_cast<std::byte*>(work.address);
  if (work.element_bytes == 1) {
    std::memset(at, static_cast<int>(work.value), work.count);
  } else {
    for (size_t i = 0; i < work.count; ++i) std::memcpy(at + i * work.element_bytes, &work.value, work.element_bytes);
  }
  return kSuccess;
}

CUresult run(const CopyWork& work) {
  Dependencies::get().other_work();
  return std::memcpy(work.to, work.from, work.bytes), kSuccess;
}

}  // namespace

CUresult execute(Work& work, Context& context) {
  static std::mutex one;
  const std::lock_guard lock(one);
  if (context.lost != kSuccess) return context.lost;
  const CUresult result = std::visit([](auto& of) { return run(of); }, work);
  context.lost = result;  // reported by the next call, not by the one that launched the kernel
  return kSuccess;
}

}  // namespace tessera::emulated

// Declared in launch.hpp.
extern "C" __attribute__((visibility("default"))) const int* emulated_dependency() {
  return tessera::emulated::Dependencies::get().hides();
}
extern "C" __attribute__((visibility("default"))) void emulated_complete_dependency() {
  tessera::emulated::Dependencies::get().complete();
}
