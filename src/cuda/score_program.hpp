// A bound score program as kernels get it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/score/bound.hpp"
#include "core/score/cuda_text.hpp"
#include "core/score/facts.hpp"
#include "cuda/runtime/launches.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/program_sums/config.hpp"

namespace tessera::cuda {

class LaunchList;

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
        static_cast<int>(GradientPattern::kGather) == static_cast<int>(core::score::GradientPattern::kGather) &&
        static_cast<int>(LoadSum::kProducts) == static_cast<int>(core::score::LoadSum::kProducts) &&
        static_cast<int>(LoadSum::kDiagonals) == static_cast<int>(core::score::LoadSum::kDiagonals) &&
        static_cast<int>(LoadSum::kPairs) == static_cast<int>(core::score::LoadSum::kPairs),
    "the text has the language's numbers");

// `read_outside`: an int of the device, or NULL.
ScoreProgramParams program_params(const core::score::Bound& bound, int* read_outside);

// Why no kernel can be compiled with a plan's program; "" if it can.
std::string refuse_program(const tessera_plan& plan);

// The program of a call, for kernels that are compiled with it.
struct KernelProgram {
  KernelProgram(const core::score::Bound& bound, const tessera_problem& problem);
  // For a kernel that reads no more than the mask: `mask` is that of `whole`, which has more.
  KernelProgram(const KernelProgram& whole, std::shared_ptr<const core::score::Checked> mask);

  ScoreProgramParams params;
  std::shared_ptr<const core::score::Checked> checked;
  std::vector<int32_t> dtypes;  // of its tensors
  core::score::StrideFacts strides;
  uint64_t hash;  // of all that determines the text

  std::string text() const;
};

// ---- gradients of the program's tensors, summed in the last bytes of the workspace that blocks share ----

// Their bytes, at the end of the plan's shared_bytes. Only the steps of bwd_sm80 and bwd_sm90 have them.
int64_t program_sums_bytes(const tessera_plan& plan);

// Of what the requested gradients of the program's tensors are made (core::score::LoadSum).
struct CapturedSums {
  bool products, diagonals, pairs;
  bool any() const { return products || diagonals || pairs; }
};
CapturedSums captured_sums(const tessera_plan& plan);

class ProgramSums {
 public:
  // Nothing is summed or written if the call requests no gradient.
  ProgramSums(const tessera_plan& plan, const core::score::Bound& bound, void* workspace);

  void enter(ScoreProgramParams& params) const;
  void clear(const tessera_plan& plan, LaunchList& launches) const;  // before the backward kernels
  void write(const tessera_plan& plan, LaunchList& launches) const;  // after them

 private:
  static Grid grid_of(const tessera_plan& plan, int64_t items);

  ProgramSumsConfig config_{};
  ProgramSumsParams params_{};
  std::array<void*, kProgramTensors> sums_{};
  int64_t most_ = 0;  // elements of the largest tensor
};

}  // namespace tessera::cuda
