// A function named try_... returns a status, which must not be ignored.
#include "tessera/tessera.hpp"

void wrong(const tessera::Plan& plan) { tessera::try_forward(plan, {}, {}); }
