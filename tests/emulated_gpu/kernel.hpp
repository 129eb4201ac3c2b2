// Included before a kernel's source: the extensions of CUDA C++ over C++, and the macro that turns such a kernel into a
// function of the host.
#pragma once

#include <tuple>
#include <utility>

#include "grid.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera::emulated {

template <class... Params>
struct KernelParams {
  static constexpr size_t kBytes[] = {sizeof(Params)..., 0};
  static constexpr EmulatedKernelInfo kInfo{sizeof...(Params), kBytes};

  template <size_t... kIndices>
  static int run(const char* name, void (*kernel)(Params...), const EmulatedLaunch* launch,
                 std::index_sequence<kIndices...>) {
    std::tuple<std::remove_const_t<Params>...> params;
    (std::memcpy(static_cast<void*>(&std::get<kIndices>(params)), launch->params[kIndices], sizeof(Params)), ...);
    return run_grid(*launch, name, [&] { kernel(std::get<kIndices>(params)...); });
  }
};
template <class... Params>
int run_kernel(const char* name, void (*kernel)(Params...), const EmulatedLaunch* launch) {
  return KernelParams<Params...>::run(name, kernel, launch, std::index_sequence_for<Params...>());
}
template <class... Params>
constexpr EmulatedKernelInfo kernel_info(void (*)(Params...)) {
  return KernelParams<Params...>::kInfo;
}

}  // namespace tessera::emulated

#define TESSERA_EMULATED_KERNEL(symbol)                                                                   \
  extern "C" __attribute__((visibility("default"))) int symbol##_emulated(const EmulatedLaunch* launch) { \
    return tessera::emulated::run_kernel(#symbol, symbol, launch);                                        \
  }                                                                                                       \
  extern "C" __attribute__((visibility("default"))) constexpr EmulatedKernelInfo symbol##_info =          \
      tessera::emulated::kernel_info(symbol);
