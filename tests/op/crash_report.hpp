// A crash says which case it was in.
#pragma once

#include "case.hpp"

namespace tessera::testing {

// From now on a crash (a signal, or a sanitizer's end) prints the line that replays the current case.
void install_crash_report();

// The case that is about to run.
void set_current_case(const Case& c);

}  // namespace tessera::testing
