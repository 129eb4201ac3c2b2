// The source of one kernel: a few lines that name a template and its config.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/config.hpp"

namespace tessera::cuda {

// The most that a kernel may take, on any architecture, by the compiler that the prebuilt kernels' rows hold for (prebuilt.hpp).
struct Limits {
  int32_t registers = 0;  // of a thread; 0: the row of its family says
  int32_t spill_bytes = 0, stack_bytes = 0;
};

// One kernel to be had: what its source says and what a launch of it needs.
struct KernelSpec {
  const char* name = "";    // "fwd_sm80": the template, and after "tessera_" the symbol
  const char* header = "";  // "tessera/fwd_sm80/kernel.cuh"
  const char* params = "";  // "FwdParams"
  std::string config;       // the template's argument, config_text() of it
  int32_t threads = 0, min_blocks_per_sm = 1;
  int32_t cluster = 1;     // blocks of a cluster; a launch's grid.x is a multiple
  int64_t smem_bytes = 0;  // dynamic
  Limits limits{};         // of one that is the same in all problems
  std::string claim;       // what host and device must agree on, asserted: "tessera::kCombineWarps == 4"
};

std::string symbol_of(const KernelSpec& spec);
std::string source_of(const KernelSpec& spec);

// "tessera::FwdConfig{.dtype = tessera::Dtype{1}, .head_dim = 64, ...}", for every config of tessera/config.hpp
template <class Config>
std::string config_text(const Config& config);

// The names of a config's fields, in their order.
template <class Config>
std::vector<std::string> config_fields(const Config& config);

// A config's fields as numbers: what a kernel is looked up by, free of the padding between the fields.
struct ConfigValues {
  std::array<int32_t, 40> value{};
  int32_t count = 0;
};
template <class Config>
ConfigValues config_values(const Config& config);

}  // namespace tessera::cuda
