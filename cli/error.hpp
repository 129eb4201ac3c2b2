// The two ways in which the program stops early; main() prints one line and exits. Their messages may contain names
// from files, escaped so that they are printable.
#pragma once

#include <stdexcept>
#include <string>

#include "printable.hpp"

namespace tessera::cli {

// Invalid input from the user: exit code 2. The message names the argument, the given value and the accepted values.
struct WrongUse : std::runtime_error {
  explicit WrongUse(const std::string& message) : std::runtime_error(printable(message)) {}
};

// A valid request failed: exit code 1.
struct Failure : std::runtime_error {
  explicit Failure(const std::string& message) : std::runtime_error(printable(message)) {}
};

}  // namespace tessera::cli
