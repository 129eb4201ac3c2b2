// The two ways in which the program stops early; main() prints one line and exits. What they say may hold names out of
// files: it stands there printable.
#pragma once

#include <stdexcept>
#include <string>

#include "printable.hpp"

namespace tessera::cli {

// The user gave what cannot be: exit code 2. The message names the argument, what it was and what is accepted.
struct WrongUse : std::runtime_error {
  explicit WrongUse(const std::string& message) : std::runtime_error(printable(message)) {}
};

// What was asked is right but could not be done: exit code 1.
struct Failure : std::runtime_error {
  explicit Failure(const std::string& message) : std::runtime_error(printable(message)) {}
};

}  // namespace tessera::cli
