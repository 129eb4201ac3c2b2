// A writable view cannot be made from a read-only one.
#include "tessera/tessera.hpp"

tessera::TensorView<float> wrong(tessera::TensorView<const float> view) { return view; }
