// What one call launches: its kernel family writes the list once, and three consumers take the same one: submit puts it into a
// stream, prepare compiles or loads its kernels ahead, collect tells which they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "cuda/runtime/codegen.hpp"
#include "cuda/runtime/launches.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// One kernel: what it is compiled for, and what it reads.
struct Launch {
  static constexpr size_t kMaxConfigBytes = 128, kMaxParamsBytes = 2048, kParamsAlignment = 64;

  const char* name;     // a literal, by which and by `values` it is found in memory
  ConfigValues values;  // the config's
  Grid grid;
  KernelSpec (*spec_of)(const void* config);
  alignas(8) char config[kMaxConfigBytes];
  alignas(kParamsAlignment) char params[kMaxParamsBytes];  // its one argument

  KernelSpec spec() const { return spec_of(config); }
};

class LaunchList {
 public:
  static constexpr int kMaxLaunches = Launches::kMaxKernels;

  // `driver` makes the tensor maps that some params have. Null: the data's addresses are not known, and nothing is submitted.
  explicit LaunchList(const Driver* driver = nullptr) : driver_(driver) {}
  LaunchList(const LaunchList&) = delete;
  LaunchList& operator=(const LaunchList&) = delete;

  const Driver* driver() const { return driver_; }

  // A word of memory becomes 0, before the kernels. At most one.
  void clear(void* word) { cleared_ = word; }
  void* cleared() const { return cleared_; }

  // After those before it. Without blocks there is nothing to launch. `SpecOf`: how a kernel of that config is compiled.
  template <class Config, class Params>
  void add(const char* name, const Config& config, KernelSpec (*spec_of)(const void* config), const Grid& grid,
           const Params& params) {
    static_assert(sizeof(Config) <= Launch::kMaxConfigBytes && std::is_trivially_copyable_v<Config>);
    static_assert(sizeof(Params) <= Launch::kMaxParamsBytes && alignof(Params) <= Launch::kParamsAlignment);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    Launch& launch = launches_[count_++];
    launch.name = name, launch.values = config_values(config), launch.grid = grid, launch.spec_of = spec_of;
    new (launch.config) Config(config);
    std::memcpy(launch.params, &params, sizeof params);
  }

  int size() const { return count_; }
  const Launch& operator[](int index) const { return launches_[index]; }
  const Launch* begin() const { return launches_; }
  const Launch* end() const { return launches_ + count_; }

 private:
  const Driver* driver_;
  void* cleared_ = nullptr;
  int count_ = 0;
  Launch launches_[kMaxLaunches];
};

// Into the stream of `launches`, which has begun; what is not in memory is loaded or compiled at once, each kernel in a thread
// of its own.
tessera_status submit(const LaunchList& list, Launches& launches);

// Into memory, or, for a GPU that is not here, into the cache on disk.
tessera_status prepare(const LaunchList& list, const tessera_device& device);

// Each kernel's spec, in order.
std::vector<KernelSpec> collect(const LaunchList& list);

}  // namespace tessera::cuda
