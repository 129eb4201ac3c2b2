// A grid of blocks.
#pragma once

#include <functional>

#include "launch.hpp"

namespace tessera::emulated {

// Runs it; body() is what a thread does. 0, or 1 with the reason told, as SYMBOL_emulated.
int run_grid(const EmulatedLaunch& launch, const char* kernel, const std::function<void()>& body);

}  // namespace tessera::emulated
