// The workspace is bytes.
#include <span>

#include "tessera/tessera.hpp"

void wrong(const tessera::Plan& plan, std::span<float> workspace) { tessera::forward(plan, {}, workspace); }
