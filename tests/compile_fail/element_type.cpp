// A view's element type must have a DType.
#include "tessera/tessera.hpp"

const char* wrong(tessera::TensorView<char> view) { return view.data(); }
