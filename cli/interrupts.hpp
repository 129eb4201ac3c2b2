// Ctrl-C while the program computes: the call is cancelled, incomplete files are removed, and the program ends by the
// signal.
#pragma once

#include "tessera/tessera.h"

namespace tessera::cli {

// Thrown when work is stopped. main() ends the process by that signal, so that a shell sees the cause.
struct Interrupted {
  int signal;
};

// While one exists, the first SIGINT or SIGTERM only requests the work to stop; a second one ends the process at once.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
};

// The library's threads, cancelled by a signal.
tessera_executor interruptible_executor();

// Throws Interrupted if a signal came.
void throw_if_interrupted();

}  // namespace tessera::cli
