// Launches of kernels of the emulated GPU: the interface between the emulated driver and a kernel's shared object.
//
// The emulated compiler appends TESSERA_EMULATED_KERNEL(SYMBOL) (kernel.hpp) to the source of a kernel
//   extern "C" __global__ void SYMBOL(const __grid_constant__ Params p, ...)
// which defines
//   extern "C" int SYMBOL_emulated(const EmulatedLaunch*)
//   extern "C" const EmulatedKernelInfo SYMBOL_info
// The first runs the whole grid and returns 0 on success. Otherwise the error is written to `error_text`, if not NULL,
// and to standard error.
#pragma once

#include <cstddef>
#include <cstdint>

struct EmulatedLaunch {
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1},
           cluster[3] = {1, 1, 1};  // grid in blocks; cluster: __cluster_dims__
  unsigned smem_bytes = 0;          // dynamic
  void* const* params = nullptr;    // as for cuLaunchKernel
  unsigned multiprocessors = 1;     // maximum of resident blocks; the blocks of a cluster are resident together
  unsigned seed = 0;                // of all unspecified behaviour; 0: in order, and copies at once
  char* error_text = nullptr;
  size_t error_bytes = 0;
};

using EmulatedKernel = int (*)(const EmulatedLaunch*);

struct EmulatedKernelInfo {
  unsigned param_count;
  const size_t* param_bytes;  // size of each parameter
};

// True if all of global memory from `address` on is allocated. Defined by the driver; without it every address counts
// as allocated.
extern "C" __attribute__((weak)) bool emulated_is_mapped(uint64_t address, size_t bytes);

// What a kernel must wait for that may start before the previous one has ended: *emulated_dependency() is 1 while what
// that one has written is not there, until emulated_complete_dependency(), which is called when no thread can go on
// without. Defined by the driver.
extern "C" __attribute__((weak)) const int* emulated_dependency();
extern "C" __attribute__((weak)) void emulated_complete_dependency();
