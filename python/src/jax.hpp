// JAX: the handlers that XLA calls to compute attention, by its foreign function interface.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

// Adds jax_handlers, capsules of the handlers by platform, and check_layouts, which refuses a traced call.
void add_jax(nanobind::module_& m);

}  // namespace tessera::python
