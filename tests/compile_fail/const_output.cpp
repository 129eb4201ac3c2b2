// An output cannot be memory that may only be read.
#include "tessera/tessera.hpp"

tessera::Buffers wrong(const float* o) { return tessera::Buffers{.o = o}; }
