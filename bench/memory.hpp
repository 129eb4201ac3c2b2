// Memory that a call holds beyond its inputs and outputs, as the kernel accounts it.
#pragma once

#include "attention.hpp"
#include "contest.hpp"

namespace bench {

// Tessera's against standard attention's, both on all threads; each sampler returns 1 / bytes.
Contest memory_contest(const Settings& settings, const Shape& shape);

}  // namespace bench
