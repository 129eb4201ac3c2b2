// A crash reports the current case.
#pragma once

#include <vector>

#include "case.hpp"
#include "place.hpp"

namespace tessera::testing {

// From now on a crash (a signal, or a sanitizer's end) prints the line that replays the current case.
void install_crash_report();

// The case that is about to run, and where.
void set_current_case(const Case& c, const std::vector<Place>& places);

}  // namespace tessera::testing
