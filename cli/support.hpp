// Lists what each back end supports, by planning a small problem for every option, dtype and direction: for the program
// and, without its libraries, for Python.
#pragma once

#include <string>

namespace tessera::cli {

std::string support_text();      // a table of options and back ends
std::string support_markdown();  // a page: the kernels by dtype, and what is refused
std::string support_json();      // every answer, refusals with their reasons

}  // namespace tessera::cli
