// Score programs for Python: made from text, kept by the calls and the plans that use them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "tessera/tessera.h"

namespace tessera::python {

using ProgramHandle = std::shared_ptr<tessera_program>;

struct ScoreProgram {
  ProgramHandle handle;
};

void add_score(nanobind::module_& m);

}  // namespace tessera::python
