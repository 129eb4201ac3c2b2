// A grid for a unit test; the test contains the kernel's body.
#pragma once

#include "grid.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera::emulated {

// Returns 0 on success. Each call has another seed, the same in each run of the program.
template <class Body>
int run_blocks(EmulatedDim grid, int threads, int64 smem_bytes, const Body& body) {
  static unsigned seed = 0;
  EmulatedLaunch launch;
  launch.grid[0] = grid.x, launch.grid[1] = grid.y, launch.grid[2] = grid.z;
  launch.block[0] = static_cast<unsigned>(threads);
  launch.smem_bytes = static_cast<unsigned>(smem_bytes);
  launch.multiprocessors = 4;
  launch.seed = seed++;
  return run_grid(launch, "a test's kernel", body);
}

}  // namespace tessera::emulated
