// A dtype is a tessera::DType; the C interface's numbers are not.
#include "tessera/tessera.hpp"

tessera::Layout wrong() { return tessera::layout(TESSERA_FLOAT32, {1, 2, 3, 4}); }
