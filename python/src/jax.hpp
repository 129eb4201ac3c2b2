// JAX: the handlers that XLA calls to compute attention, by its foreign function interface.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

// Adds jax_handlers, capsules of the handlers by platform, check_layouts, which refuses a traced call, and
// workspace_on_gpus, the size of its scratch memory.
void add_jax(nanobind::module_& m);

}  // namespace tessera::python
