// A view's elements are of a type that has a DType.
#include "tessera/tessera.hpp"

const char* wrong(tessera::TensorView<char> view) { return view.data(); }
