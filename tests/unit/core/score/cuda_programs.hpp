// The score programs whose CUDA text is tested: all definitions and some drawn programs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/score/checked.hpp"

namespace tessera::testing {

struct CudaProgram {
  std::string what;  // its definition's name, or its text
  std::shared_ptr<const core::score::Checked> checked;
  std::vector<int32_t> dtypes;  // of its tensors
};

// Begins `what` of programs some of whose pairs read outside their tensors.
inline constexpr const char* kOutside = "outside: ";

// The definitions, programs that read outside, and `drawn` drawn ones.
std::vector<CudaProgram> cuda_programs(int drawn);
inline constexpr int kDrawnForHost = 60, kDrawnForNvrtc = 12;

}  // namespace tessera::testing
