// The launches of one call. Its kernel family writes the list once, and three consumers use it: submit launches it in a
// stream, prepare compiles or loads its kernels ahead of time, collect lists the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "cuda/runtime/codegen.hpp"
#include "cuda/runtime/launches.hpp"
#include "cuda/score_program.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// One kernel launch: the config that the kernel is compiled for, and its params.
struct Launch {
  static constexpr size_t kMaxConfigBytes = 128, kMaxParamsBytes = 3072, kParamsAlignment = 64;

  const char* name;     // a literal; with `values` it identifies the kernel in memory
  ConfigValues values;  // of the config
  Grid grid;
  KernelSpec (*spec_of)(const void* config);
  alignas(8) char config[kMaxConfigBytes];
  alignas(kParamsAlignment) char params[kMaxParamsBytes];  // the kernel's only argument

  const KernelProgram* program;  // that the kernel is compiled with; NULL: none
  int64_t program_params_bytes;

  KernelSpec spec() const;
};

class LaunchList {
 public:
  static constexpr int kMaxLaunches = Launches::kMaxKernels;

  // `driver` makes the tensor maps that some params have. NULL: the data's addresses are unknown, and nothing is
  // submitted.
  explicit LaunchList(const Driver* driver = nullptr) : driver_(driver) {}
  LaunchList(const LaunchList&) = delete;
  LaunchList& operator=(const LaunchList&) = delete;

  const Driver* driver() const { return driver_; }

  // The score program of the call, for the kernels whose config has one.
  void use(const KernelProgram& program) { program_.emplace(program), mask_.reset(); }

  // Sets a word of memory to 0 before the kernels. At most one.
  void clear(void* word) { cleared_ = word; }
  void* cleared() const { return cleared_; }

  // Appends a launch; a grid without blocks is skipped. `SpecOf`: how a kernel with that config is compiled.
  template <class Config, class Params>
  void add(const char* name, const Config& config, KernelSpec (*spec_of)(const void* config), const Grid& grid,
           const Params& params) {
    static_assert(sizeof(Config) <= Launch::kMaxConfigBytes && std::is_trivially_copyable_v<Config>);
    static_assert(alignof(Params) <= Launch::kParamsAlignment);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    Launch& launch = launches_[count_++];
    launch.name = name, launch.values = config_values(config), launch.grid = grid, launch.spec_of = spec_of;
    launch.program = nullptr, launch.program_params_bytes = 0;
    new (launch.config) Config(config);
    if constexpr (requires { config.score.program; }) {
      if (config.score.program) return keep_programmed(launch, params, program_of<Config>());
    }
    keep_params(launch, params);
  }

  int size() const { return count_; }
  const Launch& operator[](int index) const { return launches_[index]; }
  const Launch* begin() const { return launches_; }
  const Launch* end() const { return launches_ + count_; }

 private:
  template <class Params>
  static void keep_params(Launch& launch, const Params& params) {
    static_assert(sizeof(Params) <= Launch::kMaxParamsBytes);
    std::memcpy(launch.params, &params, sizeof params);
  }
  template <class Params>
  static void keep_programmed(Launch& launch, const Params& params, const KernelProgram& program) {
    ProgrammedParams<Params> programmed;
    static_cast<Params&>(programmed) = params;
    programmed.program = program.params;
    launch.program = &program, launch.program_params_bytes = sizeof programmed;
    append_values(launch.values, program.hash);
    keep_params(launch, programmed);
  }
  template <class Config>
  const KernelProgram& program_of() {
    const KernelProgram& whole = program_.value();
    if constexpr (requires { Config::kMaskAlone; }) {
      if (!mask_ && whole.checked->mask_alone) mask_.emplace(whole, whole.checked->mask_alone);
      if (mask_) return *mask_;
    }
    return whole;
  }

  const Driver* driver_;
  std::optional<KernelProgram> program_, mask_;  // mask_: of the same program, made when a kernel needs it
  void* cleared_ = nullptr;
  int count_ = 0;
  Launch launches_[kMaxLaunches];
};

// Launches the list in the stream of `launches`, for which begin() was called. Kernels that are not in memory are
// loaded or compiled at the same time, each in its own thread.
tessera_status submit(const LaunchList& list, Launches& launches);

// Loads the kernels into memory or, for a GPU that is not in this machine, compiles them into the cache on disk.
tessera_status prepare(const LaunchList& list, const tessera_device& device);

// The spec of each kernel that is compiled without a program, in order.
std::vector<KernelSpec> collect(const LaunchList& list);

}  // namespace tessera::cuda
