// A grid's run. What it takes is compiled once, not with every kernel (grid.cpp).
#pragma once

#include <functional>

#include "launch.hpp"

namespace tessera::emulated {

// 0, or 1 with the reason told. body(): what a thread does.
int run_grid(const EmulatedLaunch& launch, const char* kernel, const std::function<void()>& body);

}  // namespace tessera::emulated
