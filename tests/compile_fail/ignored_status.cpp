// A function named try_... answers with a status, which must be looked at.
#include "tessera/tessera.hpp"

void wrong(const tessera::Plan& plan) { tessera::try_forward(plan, {}, {}); }
