// A bound score program as kernels get it.
#pragma once

#include <algorithm>

#include "core/score/bound.hpp"
#include "core/score/facts.hpp"
#include "tessera/attention/score/program_params.hpp"

namespace tessera::cuda {

static_assert(kProgramTensors == core::score::kMaxTensors && kProgramScalars == core::score::kMaxScalars &&
                  kProgramRank == core::score::kMaxRank,
              "a kernel's limits are the language's");
static_assert(static_cast<int>(ElementType::kFloat32) == TESSERA_FLOAT32 &&
                  static_cast<int>(ElementType::kFloat16) == TESSERA_FLOAT16 &&
                  static_cast<int>(ElementType::kBFloat16) == TESSERA_BFLOAT16 &&
                  static_cast<int>(ElementType::kInt8) == TESSERA_INT8 &&
                  static_cast<int>(ElementType::kInt16) == TESSERA_INT16 &&
                  static_cast<int>(ElementType::kInt32) == TESSERA_INT32 &&
                  static_cast<int>(ElementType::kInt64) == TESSERA_INT64 &&
                  static_cast<int>(ElementType::kUInt8) == TESSERA_UINT8 &&
                  static_cast<int>(ElementType::kBool) == TESSERA_BOOL,
              "the text has tessera_dtype's numbers");

static_assert(
    static_cast<int>(GradientPattern::kHead) == static_cast<int>(core::score::GradientPattern::kHead) &&
        static_cast<int>(GradientPattern::kRow) == static_cast<int>(core::score::GradientPattern::kRow) &&
        static_cast<int>(GradientPattern::kColumn) == static_cast<int>(core::score::GradientPattern::kColumn) &&
        static_cast<int>(GradientPattern::kDiagonal) == static_cast<int>(core::score::GradientPattern::kDiagonal) &&
        static_cast<int>(GradientPattern::kElement) == static_cast<int>(core::score::GradientPattern::kElement) &&
        static_cast<int>(GradientPattern::kGather) == static_cast<int>(core::score::GradientPattern::kGather),
    "the text has the language's numbers");

inline ProgramTensor program_tensor(const core::score::BoundTensor& bound) {
  constexpr int64_t kIndices = int64_t{1} << 31;  // of an int32, from 0
  ProgramTensor tensor{};
  tensor.data = bound.data;
  for (size_t axis = 0; axis < static_cast<size_t>(bound.rank); ++axis) {
    tensor.stride_bytes[axis] = bound.stride_bytes[axis];
    tensor.extent[axis] = static_cast<uint32>(std::min(bound.shape[axis], kIndices));
  }
  return tensor;
}

// `read_outside`: an int of the device, or NULL.
inline ScoreProgramParams program_params(const core::score::Bound& bound, int* read_outside) {
  ScoreProgramParams params{};
  const core::score::Program& program = bound.program();
  for (size_t n = 0; n < program.tensors.size(); ++n) params.tensors[n] = program_tensor(bound.tensors[n]);
  for (size_t n = 0; n < program.scalars.size(); ++n) {
    const bool real = program.scalars[n].type == core::score::Type::kFloat;
    if (real) params.scalars[n].real = static_cast<float>(bound.scalars[n]);
    if (!real) params.scalars[n].integer = static_cast<int>(bound.scalars[n]);
  }
  params.read_outside = read_outside;
  return params;
}

}  // namespace tessera::cuda
