// Ranks as threads of one process: messages are copies between their memories.
#pragma once

#include <memory>
#include <vector>

#include "core/exchange.hpp"

namespace tessera::distributed {

// One for each rank.
std::vector<std::unique_ptr<core::Transport>> make_thread_transports(int32_t ranks);

}  // namespace tessera::distributed
