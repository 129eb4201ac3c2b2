// The launch bounds in a kernel's declaration, SYMBOL_bounds in the shared object; the emulated compiler writes it.
#pragma once

struct EmulatedLaunchBounds {
  unsigned threads, min_blocks;  // __launch_bounds__
  unsigned cluster;              // __cluster_dims__(cluster, 1, 1); by default 1
};
