// tessera._core.ComparisonTable: the table of `python -m tessera compare`, shared with the program.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void add_comparison_table(nanobind::module_& m);

}  // namespace tessera::python
