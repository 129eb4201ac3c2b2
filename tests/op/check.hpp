// Does a case come out right, on every kernel and ISA that takes it?
#pragma once

#include <string>
#include <vector>

#include "case.hpp"

namespace tessera::testing {

struct CheckOptions {
  std::vector<int32_t> isas;  // tessera_isa
  bool check_repeats = true;  // same bits again, and with 2 and 3 threads
  bool check_oracle = true;   // the oracle against the plain computation in float64
};

// What is wrong, one line each; empty: the case is right. Checks, for every kernel that takes the case:
//   outputs against the oracle: error, maximum and RMS, at most 2 x the plain computation's;
//   queries that see nothing and keys that nobody sees: exactly 0 and -inf; NaN and Inf where the oracle has them;
//   nothing but outputs written; the same bits every time and for every number of threads.
std::vector<std::string> check_case(const Case& c, const CheckOptions& options);

// The arguments that run a case alone: "tests/tessera_fuzz --case '...'".
std::string replay(const Case& c);

// What --case does: checks the case that `text` describes on every ISA, prints what is wrong. The exit status: 0 when
// nothing is, 1 when something is, 2 when it is no case.
int replay_main(const std::string& text);

}  // namespace tessera::testing
