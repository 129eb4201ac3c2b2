// The log-sum-exp is float32, whatever the inputs are.
#include "tessera/tessera.hpp"

tessera::Buffers wrong(double* lse) { return tessera::Buffers{.lse = lse}; }
