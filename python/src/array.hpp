// Arrays of any framework as the library's layouts: DLPack or the buffer protocol, zero copies.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "tessera/tessera.h"

namespace tessera::python {

enum class Access { kRead, kWrite };

struct Array {
  tessera_layout layout{};
  void* data = nullptr;
  nanobind::ndarray<nanobind::ro> owner;  // keeps what a producer exported alive; empty where `source` itself does
};

// The memory of `source`, which must outlive the result. Throws Error, naming the argument and the `accepted` dtypes.
Array import_array(const char* name, nanobind::handle source, Access access, const char* accepted_dtypes);

}  // namespace tessera::python
