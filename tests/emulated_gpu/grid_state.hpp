// State shared by the blocks of a grid, and by those of a cluster.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "launch.hpp"
#include "random.hpp"

namespace tessera::emulated {

class Block;

struct GridState {
  const EmulatedLaunch& launch;
  const char* kernel;
  const std::function<void()>& body;  // code of a thread
  Random random;
  bool failed = false;
  std::string text{};  // the reason

  int threads() const { return static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2]); }
  void fail(const std::string& what) {
    failed = true;
    text = std::string(kernel) + ", " + what;
  }
};

// Blocks that run at the same time and can access each other's shared memory.
struct Cluster {
  std::vector<Block*> blocks{};
  // The cluster's barrier: the number of threads that must arrive, and of completed phases.
  int threads = 0, arrived = 0;
  uint64_t phase = 0;

  void arrive() {
    ++arrived;
    end_phase();
  }
  // The barrier does not wait for threads that have ended.
  void end(int count) {
    threads -= count;
    if (threads > 0) end_phase();
  }

 private:
  void end_phase() {
    if (arrived < threads) return;
    arrived = 0;
    ++phase;
  }
};

}  // namespace tessera::emulated
