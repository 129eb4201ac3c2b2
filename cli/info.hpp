// Information about this machine and the parts of it that Tessera uses: for the program and, without its libraries, for
// Python.
#pragma once

#include <string>

#include "tessera/tessera.h"

namespace tessera::cli {

std::string info_text(const tessera_device& cpu);
std::string info_json(const tessera_device& cpu);

}  // namespace tessera::cli
