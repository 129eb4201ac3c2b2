// The program's commands info, support and plan for `python -m tessera`.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void add_program(nanobind::module_& m);

}  // namespace tessera::python
