// What the emulated compiler says of a kernel beside its code, as a symbol of the shared object, SYMBOL_info.
#pragma once

#include <cstddef>

struct EmulatedKernelInfo {
  static constexpr unsigned kMostParams = 4;

  unsigned max_threads, min_blocks;  // __launch_bounds__
  unsigned cluster;                  // __cluster_dims__(cluster, 1, 1); 1 without
  unsigned params;
  size_t param_bytes[kMostParams];
};

template <class... Params>
constexpr EmulatedKernelInfo emulated_kernel_info(void (*)(Params...), unsigned max_threads, unsigned min_blocks,
                                                  unsigned cluster) {
  static_assert(sizeof...(Params) <= EmulatedKernelInfo::kMostParams);
  return {max_threads, min_blocks, cluster, sizeof...(Params), {sizeof(Params)...}};
}
