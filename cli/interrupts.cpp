#include "interrupts.hpp"

#include <atomic>
#include <csignal>

namespace tessera::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

std::atomic<int> received{0};  // 0: none
static_assert(std::atomic<int>::is_always_lock_free, "a signal's handler may do no more than this");

}  // namespace

Interrupts::Interrupts() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { received = signal; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second signal finds the default
  for (const int signal : kSignals) {
    struct sigaction before {};
    // A signal that the caller ignores stays ignored, as after nohup.
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;
    sigaction(signal, &action, nullptr);
  }
}

Interrupts::~Interrupts() {
  for (const int signal : kSignals) {
    struct sigaction now {};
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) std::signal(signal, SIG_DFL);
  }
}

tessera_executor interruptible_executor() {
  tessera_executor executor{};
  executor.cancel = [](void*) -> int32_t { return received.load(std::memory_order_relaxed); };
  return executor;
}

void throw_if_interrupted() {
  if (const int signal = received; signal != 0) throw Interrupted{signal};
}

}  // namespace tessera::cli
