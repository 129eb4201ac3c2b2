// While an object exists, a kernel's access to unmapped memory ends its grid instead of the process.
#pragma once

#include <signal.h>

#include "block.hpp"

namespace tessera::emulated {

class Faults {
 public:
  Faults() {
    struct sigaction action {};
    action.sa_sigaction = tell;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before_[0]);
    sigaction(SIGBUS, &action, &before_[1]);
  }
  ~Faults() {
    sigaction(SIGSEGV, &before_[0], nullptr);
    sigaction(SIGBUS, &before_[1], nullptr);
  }
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

 private:
  static void tell(int number, siginfo_t* info, void*) {
    if (running.block) running.block->fail("an access to memory at %p, which is not there", info->si_addr);
    signal(number, SIG_DFL);  // the default: the fault recurs and ends the process
  }

  struct sigaction before_[2];
};

}  // namespace tessera::emulated
