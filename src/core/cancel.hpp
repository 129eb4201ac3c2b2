// Cancellation of a call: calls the executor's `cancel` from all working threads.
#pragma once

#include <atomic>
#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

class Cancel {
 public:
  explicit Cancel(const tessera_executor& executor) : ask_(executor.cancel), context_(executor.cancel_context) {}

  bool can_be_asked() const { return ask_ != nullptr; }

  // Once true, it stays true.
  bool asked() noexcept {
    if (!ask_) return false;
    if (was_asked_.load(std::memory_order_relaxed)) return true;
    bool now = true;
    try {
      now = ask_(context_) != 0;
    } catch (...) {  // on any thread: no caller could catch it
    }
    if (now) was_asked_.store(true, std::memory_order_relaxed);
    return now;
  }

  // The same by pointer, for kernels compiled for other instruction sets.
  static int32_t ask(void* cancel) noexcept { return static_cast<Cancel*>(cancel)->asked() ? 1 : 0; }

 private:
  int32_t (*const ask_)(void* context);
  void* const context_;
  std::atomic<bool> was_asked_{false};
};

}  // namespace tessera::core
