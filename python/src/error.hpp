// tessera.Error: one line that names the argument, what was given and what is accepted.
#pragma once

#include <stdexcept>
#include <string>

#include "tessera/tessera.h"

namespace tessera::python {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(const tessera_status& status) {
  if (status.code != TESSERA_OK) throw Error(status.message);
}

}  // namespace tessera::python
