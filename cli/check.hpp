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

// Computes the same in float64 by the reference kernel and compares. The tolerance is measured: the oracle runs a
// second time on inputs that are each moved by one rounding error of their dtype, at random. A correct computation in
// that dtype stays below kAllowedRoundings times the resulting change plus the rounding of the output.
std::vector<OutputCheck> check_outputs(const AttentionTensors& tensors, const AttentionOptions& options,
                                       const tessera_device& device, bool backward);

inline constexpr double kAllowedRoundings = 8;

}  // namespace tessera::cli
