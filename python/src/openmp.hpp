// The OpenMP threads that a framework has already started, as an executor for the library's work.
#pragma once

#include "tessera/tessera.h"

namespace tessera::python {

// Empty if the process has no OpenMP runtime, and in a forked child, where the runtime would wait for threads that do
// not exist.
tessera_executor openmp_executor();

}  // namespace tessera::python
