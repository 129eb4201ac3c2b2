// The two ways in which the program stops early; main() prints one line and exits.
#pragma once

#include <stdexcept>

namespace tessera::cli {

// The user gave what cannot be: exit code 2. The message names the argument, what it was and what is accepted.
struct WrongUse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What was asked is right but could not be done: exit code 1.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tessera::cli
