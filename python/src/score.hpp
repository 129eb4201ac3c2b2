// Score programs for Python: made from text, kept by the calls and the plans that use them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::python {

using ProgramHandle = std::shared_ptr<tessera_program>;

struct ScoreProgram {
  ProgramHandle handle;
};

// One name of a program, of a rank, or of TESSERA_SCALAR_RANK.
struct DeclaredName {
  std::string name, type;
  int32_t rank;
};

// Throws Error, which points into a text. Does not need the GIL.
ProgramHandle make_program(const std::string& score, const std::string& mask, const std::vector<DeclaredName>& names);

void add_score(nanobind::module_& m);

}  // namespace tessera::python
