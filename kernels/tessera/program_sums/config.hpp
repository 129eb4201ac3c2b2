// The sums of the gradients of a score program's tensors: they are cleared before the backward pass, and the gradients
// are written after it.
#pragma once

#include "tessera/attention/score/config.hpp"

namespace tessera {

struct ProgramSumsConfig {
  bool write;  // the gradients from the sums; otherwise the sums are cleared
  bool exact;  // the sums are ExactSum, otherwise float
};
TESSERA_CONFIG_FIELDS(ProgramSumsConfig, write, exact)

inline constexpr int kProgramSumsThreads = 256;

struct ProgramGradientParams {
  const void* sums;  // [elements], contiguous
  void* data;        // the gradient, with any strides
  int64 elements;
  int64 shape[kProgramRank], stride_bytes[kProgramRank];
  int rank;
  int has_sums;      // 0: the program does not read the tensor, and the gradient is 0
  ElementType type;  // of the gradient: float32, float16 or bfloat16
};

struct alignas(16) SumWords {
  uint32 word[4];
};

struct ProgramSumsParams {
  SumWords* sums;  // of all tensors
  int64 words;     // to clear
  ProgramGradientParams gradients[kProgramTensors];
  int count;
};

}  // namespace tessera
