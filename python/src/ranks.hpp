// Plans for many ranks, for tessera.torch.context_parallel and `tessera.plan_ranks`.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void add_ranks(nanobind::module_& m);

}  // namespace tessera::python
