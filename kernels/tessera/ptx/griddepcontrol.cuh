// Programmatic dependent launch: a kernel launched with the attribute may start before the previous kernel of the
// stream has ended.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// GPUs before Hopper lack such launches.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Waits until the previous kernels have ended and their writes are visible. Without the attribute it returns at once.
TESSERA_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may start once every block has executed this or ended.
TESSERA_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
TESSERA_DEVICE void griddepcontrol_wait() {}
TESSERA_DEVICE void griddepcontrol_launch_dependents() {}
#endif

}  // namespace tessera::ptx
