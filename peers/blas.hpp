// OpenBLAS, opened at run time: environment variables that choose its kernels by hand (OPENBLAS_CORETYPE,
// OPENBLAS_L2_SIZE) are read when it is loaded, and with the wrong values halve its speed. A fair peer ignores them,
// and has the kernels of this CPU where OpenBLAS does not know its model.
#pragma once

#include <cblas.h>

namespace tessera::peers {

struct Blas {
  decltype(&cblas_sgemm) sgemm;
  void (*set_num_threads)(int);
  const char* config;  // OpenBLAS's own description of itself
};

// Loads OpenBLAS on the first call. Throws std::runtime_error if it cannot be loaded.
const Blas& blas();

}  // namespace tessera::peers
