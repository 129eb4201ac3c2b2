// The thread that runs now: only one among all blocks of all grids.
#pragma once

struct EmulatedDim {
  unsigned x = 1, y = 1, z = 1;
};

namespace tessera::emulated {

class Block;

struct Running {
  Block* block = nullptr;
  int thread = 0;
  EmulatedDim block_index{0, 0, 0}, grid, threads;
};
inline Running running;

}  // namespace tessera::emulated

#define threadIdx (EmulatedDim{static_cast<unsigned>(tessera::emulated::running.thread), 0, 0})
#define blockIdx tessera::emulated::running.block_index
#define gridDim tessera::emulated::running.grid
#define blockDim tessera::emulated::running.threads
