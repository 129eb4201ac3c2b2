// A view that may write cannot be had from one that may only read.
#include "tessera/tessera.hpp"

tessera::TensorView<float> wrong(tessera::TensorView<const float> view) { return view; }
