// A status does not convert to bool, which could silently enter arithmetic or an assignment.
#include "tessera/tessera.hpp"

bool wrong(tessera::Status status) { return status; }
