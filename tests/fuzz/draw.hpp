// Random cases of attention.
#pragma once

#include <cstdint>

#include "op/case.hpp"

namespace tessera::testing {

// Case `index` of those that `seed` gives: always the same one.
Case draw_case(uint64_t seed, uint64_t index);

// The simplest case found by simplifying `c` one field at a time for as long as `fails` says so.
template <class Fails>
Case shrink(Case c, Fails fails) {
  constexpr int kMaxTries = 400;
  int tries = 0;
  for (bool simplified = true; simplified && tries < kMaxTries;) {
    simplified = false;
    for (const Case& simpler : simpler_cases(c)) {
      if (++tries > kMaxTries) break;
      if (!fails(simpler)) continue;
      c = simpler;
      simplified = true;
      break;
    }
  }
  return c;
}

}  // namespace tessera::testing
