#include "cuda/score_program.hpp"

#include "core/geometry.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace tessera::cuda {
namespace {

namespace score = core::score;

constexpr uint32_t kElementTypes = bits({TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16, TESSERA_INT32,
                                         TESSERA_BOOL, TESSERA_INT64, TESSERA_INT8, TESSERA_INT16, TESSERA_UINT8});

// Whether the gradient of a tensor is a sum: its elements are in the workspace. A tensor that is not read has none.
bool is_summed(const score::Bound& bound, size_t tensor) {
  if (!bound.gradients[tensor].needed) return false;
  for (const score::LoadGradient& load : bound.gradient().loads) {
    if (static_cast<size_t>(load.tensor) == tensor) return true;
  }
  return false;
}

int64_t bytes_of_sum(const tessera_plan& plan) {
  return plan.problem.deterministic ? static_cast<int64_t>(sizeof(ExactSum)) : static_cast<int64_t>(sizeof(float));
}

ProgramTensor program_tensor(const score::BoundTensor& bound) {
  constexpr int64_t kIndices = int64_t{1} << 31;  // of an int32, from 0
  ProgramTensor tensor{};
  tensor.data = bound.data;
  for (size_t axis = 0; axis < static_cast<size_t>(bound.rank); ++axis) {
    const int64_t stride = bound.stride_bytes[axis];
    tensor.stride[axis] = {static_cast<int>(stride), static_cast<int>(stride >> 32)};
    tensor.extent[axis] = static_cast<uint32>(std::min(bound.shape[axis], kIndices));
  }
  return tensor;
}

ProgramWhole program_whole(const tessera_problem& problem) {
  const core::WholeHeads whole = core::whole_heads(problem);
  const core::Place place = core::place_of(problem, 0, 0);
  return {static_cast<int>(whole.first_sequence), static_cast<int>(whole.first_head),
          Divisor(static_cast<int>(whole.group)), static_cast<int>(place.total_q), static_cast<int>(place.total_k)};
}

// Calls visit(tensor, offset) for the sums of each tensor that has them; returns their bytes.
template <class Visit>
int64_t for_each_sums(const tessera_plan& plan, const score::Bound& bound, const Visit& visit) {
  int64_t bytes = 0;
  for (size_t n = 0; n < static_cast<size_t>(bound.num_tensors); ++n) {
    if (!is_summed(bound, n)) continue;
    visit(n, bytes);
    bytes += padded_to(bound.tensors[n].elements() * bytes_of_sum(plan), kWorkspaceAlignment);
  }
  return bytes;
}

int64_t program_sums_bytes(const tessera_plan& plan, const score::Bound& bound) {
  return for_each_sums(plan, bound, [](size_t, int64_t) {});
}

}  // namespace

ScoreProgramParams program_params(const score::Bound& bound, int* read_outside) {
  ScoreProgramParams params{};
  const score::Program& program = bound.program();
  for (size_t n = 0; n < program.tensors.size(); ++n) params.tensors[n] = program_tensor(bound.tensors[n]);
  for (size_t n = 0; n < program.scalars.size(); ++n) {
    const bool real = program.scalars[n].type == score::Type::kFloat;
    if (real) params.scalars[n].real = static_cast<float>(bound.scalars[n]);
    if (!real) params.scalars[n].integer = static_cast<int>(bound.scalars[n]);
  }
  params.read_outside = read_outside;
  return params;
}

std::string refuse_program(const tessera_plan& plan) {
  const score::Bound bound = score::bind(plan);
  const score::Program& program = bound.program();
  for (size_t n = 0; n < program.tensors.size(); ++n) {
    const int32_t dtype = bound.tensors[n].dtype;
    if (kElementTypes >> dtype & 1) continue;
    return program.tensors[n].text + ": " + tessera_dtype_name(dtype) +
           ", must be of at most 32 bits or int64 on a GPU";
  }
  return "";
}

KernelProgram::KernelProgram(const score::Bound& bound, const tessera_problem& problem)
    : params(program_params(bound, nullptr)), checked(bound.checked) {
  params.whole = program_whole(problem);
  for (size_t n = 0; n < bound.program().tensors.size(); ++n) {
    const score::BoundTensor& tensor = bound.tensors[n];
    dtypes.push_back(tensor.dtype);
    for (const int64_t stride : tensor.stride_bytes) {
      strides.near = strides.near && stride >= INT32_MIN && stride <= INT32_MAX;
    }
    const auto size = static_cast<int64_t>(tessera_dtype_bytes(static_cast<tessera_dtype>(tensor.dtype)));
    const bool dense = tensor.rank > 0 && tensor.stride_bytes[static_cast<size_t>(tensor.rank) - 1] == size;
    strides.dense_rows |= static_cast<uint32_t>(dense) << n;
  }
  hash = score::cuda_text_hash(*checked, dtypes, strides);
}

KernelProgram::KernelProgram(const KernelProgram& whole, std::shared_ptr<const score::Checked> mask)
    : params{}, checked(std::move(mask)) {
  params.whole = whole.params.whole;
  strides.near = whole.strides.near;
  const auto place = [](const std::vector<score::Name>& names, const score::Name& name) {
    return static_cast<size_t>(std::ranges::find(names, name.text, &score::Name::text) - names.begin());
  };
  const score::Program &own = checked->program, &all = whole.checked->program;
  for (size_t n = 0; n < own.tensors.size(); ++n) {
    const size_t tensor = place(all.tensors, own.tensors[n]);
    params.tensors[n] = whole.params.tensors[tensor];
    strides.dense_rows |= (whole.strides.dense_rows >> tensor & 1) << n;
    dtypes.push_back(whole.dtypes[tensor]);
  }
  for (size_t n = 0; n < own.scalars.size(); ++n) {
    params.scalars[n] = whole.params.scalars[place(all.scalars, own.scalars[n])];
  }
  hash = score::cuda_text_hash(*checked, dtypes, strides);
}

std::string KernelProgram::text() const { return score::cuda_text(*checked, dtypes, strides); }

int64_t program_sums_bytes(const tessera_plan& plan) {
  return score::has_program(plan) ? program_sums_bytes(plan, score::bind(plan)) : 0;
}

CapturedSums captured_sums(const tessera_plan& plan) {
  CapturedSums sums{};
  if (!score::has_program(plan) || plan.problem.direction != TESSERA_BACKWARD) return sums;
  const score::Bound bound = score::bind(plan);
  const std::vector<score::LoadSum> of_loads = score::load_sums(*bound.checked);
  for (size_t n = 0; n < of_loads.size(); ++n) {
    if (!bound.gradients[static_cast<size_t>(bound.gradient().loads[n].tensor)].needed) continue;
    sums.products = sums.products || of_loads[n] == score::LoadSum::kProducts;
    sums.diagonals = sums.diagonals || of_loads[n] == score::LoadSum::kDiagonals;
    sums.pairs = sums.pairs || of_loads[n] == score::LoadSum::kPairs;
  }
  return sums;
}

ProgramSums::ProgramSums(const tessera_plan& plan, const score::Bound& bound, void* workspace) {
  if (plan.problem.direction != TESSERA_BACKWARD || !bound.wants_gradients()) return;
  const int64_t bytes = program_sums_bytes(plan, bound);
  char* const sums = workspace ? static_cast<char*>(workspace) + plan.shared_bytes - bytes : nullptr;
  config_.exact = plan.problem.deterministic != 0;
  params_.sums = reinterpret_cast<SumWords*>(sums);
  params_.words = bytes / static_cast<int64_t>(sizeof(SumWords));
  for_each_sums(plan, bound, [&](size_t n, int64_t offset) { sums_[n] = sums ? sums + offset : nullptr; });
  for (size_t n = 0; n < static_cast<size_t>(bound.num_tensors); ++n) {
    const score::BoundGradient& gradient = bound.gradients[n];
    if (!gradient.needed || bound.tensors[n].elements() == 0) continue;
    ProgramGradientParams& to = params_.gradients[params_.count++];
    to.sums = sums_[n], to.data = gradient.data, to.type = static_cast<ElementType>(gradient.dtype);
    to.elements = bound.tensors[n].elements(), to.rank = bound.tensors[n].rank;
    to.has_sums = is_summed(bound, n);
    for (size_t axis = 0; axis < static_cast<size_t>(to.rank); ++axis) {
      to.shape[axis] = bound.tensors[n].shape[axis], to.stride_bytes[axis] = gradient.stride_bytes[axis];
    }
    most_ = std::max(most_, bound.tensors[n].elements());
  }
}

void ProgramSums::enter(ScoreProgramParams& params) const {
  for (size_t n = 0; n < sums_.size(); ++n) params.sums[n] = sums_[n];
}

void ProgramSums::clear(const tessera_plan& plan, LaunchList& launches) const {
  ProgramSumsConfig config = config_;
  config.write = false;
  launch_program_sums(config, params_, grid_of(plan, params_.words), launches);
}

void ProgramSums::write(const tessera_plan& plan, LaunchList& launches) const {
  ProgramSumsConfig config = config_;
  config.write = true;
  Grid grid = grid_of(plan, params_.count > 0 ? most_ : 0);
  grid.y = static_cast<uint32_t>(params_.count);
  launch_program_sums(config, params_, grid, launches);
}

Grid ProgramSums::grid_of(const tessera_plan& plan, int64_t items) {
  constexpr int64_t kBlocksPerCore = 8;
  const int64_t blocks = std::min(divide_up(items, kProgramSumsThreads), kBlocksPerCore * plan.device.cores);
  return {static_cast<uint32_t>(blocks), 1, 1};
}

}  // namespace tessera::cuda
