// Clears the sums of the gradients of a score program's tensors, or writes the gradients from them.
//
// Grid: any number of blocks; when writing, grid.y is the number of tensors. Each thread takes every n-th element.
#pragma once

#include "tessera/attention/score/program.cuh"
#include "tessera/program_sums/config.hpp"
#include "tessera/tile/fragment.cuh"

namespace tessera {

template <ProgramSumsConfig kCfg>
TESSERA_DEVICE void program_sums(const ProgramSumsParams& p) {
  const int64 first = static_cast<int64>(blockIdx.x) * kProgramSumsThreads + threadIdx.x,
              step = static_cast<int64>(gridDim.x) * kProgramSumsThreads;
  if constexpr (!kCfg.write) {
    for (int64 n = first; n < p.words; n += step) p.sums[n] = SumWords{};
    return;
  }
  const ProgramGradientParams& to = p.gradients[blockIdx.y];
  for (int64 n = first; n < to.elements; n += step) {
    float x = 0.0f;
    if (to.has_sums) {
      if constexpr (kCfg.exact) {
        x = static_cast<float>(value_of(static_cast<const ExactSum*>(to.sums)[n]));
      } else {
        x = static_cast<const float*>(to.sums)[n];
      }
    }
    int64 offset = 0, rest = n;
#pragma unroll
    for (int axis = kProgramRank - 1; axis >= 0; --axis) {
      if (axis >= to.rank) continue;
      offset += rest % to.shape[axis] * to.stride_bytes[axis];
      rest /= to.shape[axis];
    }
    char* const at = static_cast<char*>(to.data) + offset;
    if (to.type == ElementType::kFloat32) store_element<Dtype::kFloat32>(at, 0, x);
    if (to.type == ElementType::kFloat16) store_element<Dtype::kFloat16>(at, 0, x);
    if (to.type == ElementType::kBFloat16) store_element<Dtype::kBFloat16>(at, 0, x);
  }
}

}  // namespace tessera
