// `tessera run --check`: every output against the float64 oracle.
#pragma once

#include <string>
#include <vector>

#include "attention_call.hpp"
#include "peers/exact.hpp"

namespace tessera::cli {

struct OutputCheck {
  std::string name;
  peers::ErrorStats error;
  peers::ErrorStats allowed;  // max_abs and rms

  bool passed() const { return error.max_abs <= allowed.max_abs && error.rms <= allowed.rms; }
};

// Computes the same in float64 by the reference kernel and compares. What is allowed is measured, not guessed: the
// oracle runs a second time on inputs that have each been moved by one rounding error of their own dtype, at random;
// kAllowedRoundings times the change that this makes, and the rounding of the output itself, is what a sound
// computation in that dtype stays below.
std::vector<OutputCheck> check_outputs(const AttentionTensors& tensors, const AttentionOptions& options,
                                       const tessera_device& device, bool backward);

inline constexpr double kAllowedRoundings = 8;

}  // namespace tessera::cli
