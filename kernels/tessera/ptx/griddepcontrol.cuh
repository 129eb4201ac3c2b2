// Programmatic dependent launch: a kernel that was launched with the attribute may begin before the one ahead of it in the
// stream has ended.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// GPUs before Hopper have no such launches.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Until the kernels ahead have ended and their writes are visible. Without the attribute it returns at once.
TESSERA_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Once every block has executed this or ended, the next kernel may begin.
TESSERA_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
TESSERA_DEVICE void griddepcontrol_wait() {}
TESSERA_DEVICE void griddepcontrol_launch_dependents() {}
#endif

}  // namespace tessera::ptx
