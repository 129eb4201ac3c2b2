// A status is no bool that could slip into arithmetic or an assignment.
#include "tessera/tessera.hpp"

bool wrong(tessera::Status status) { return status; }
