// What `python -m tessera` says in the program's words: info, support and plan.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void add_program(nanobind::module_& m);

}  // namespace tessera::python
