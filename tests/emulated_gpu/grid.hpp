// A grid of blocks.
#pragma once

#include <functional>

#include "launch.hpp"

namespace tessera::emulated {

// Runs the grid; each thread calls body(). Returns 0, or 1 after reporting the reason, like SYMBOL_emulated.
int run_grid(const EmulatedLaunch& launch, const char* kernel, const std::function<void()>& body);

}  // namespace tessera::emulated
