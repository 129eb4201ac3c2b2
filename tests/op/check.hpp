// Checks a case on every kernel and in every place that supports it.
#pragma once

#include <string>
#include <vector>

#include "case.hpp"
#include "place.hpp"

namespace tessera::testing {

struct CheckOptions {
  std::vector<Place> places;
  bool check_repeats = true;  // same bits again, and with 2 and 3 threads; on a GPU gradients when they are to be so
  bool check_oracle = true;   // the oracle against the plain computation in float64
  bool comparison = false;    // on a GPU: only the kernels for comparison
};

// The faults, one line each; empty if the case is right. Checks, for every kernel that supports the case:
//   outputs against the oracle: error, maximum and RMS, at most 2 x the plain computation's;
//   queries that see nothing and keys that nobody sees: exactly 0 and -inf; NaN and Inf where the oracle has them;
//   nothing but outputs written; the same bits every time and for every number of threads.
std::vector<std::string> check_case(const Case& c, const CheckOptions& options);

// The arguments that run a case alone: "tests/tessera_fuzz --case '...'", and --backend unless it was the CPU alone.
std::string replay(const Case& c, const std::vector<Place>& places);

// What --case does: checks the case that `text` describes in every place of the backend (places_of), prints the faults.
// The exit status: 0 without faults, 1 with faults, 2 for an invalid case or backend.
int replay_main(const std::string& text, const std::string& backend);

// What --cases does: the same once for each line of a file (# starts a comment), each call made once.
int replay_file_main(const std::string& path, const std::string& backend);

}  // namespace tessera::testing
