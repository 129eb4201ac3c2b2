#include "cuda/registry.hpp"

#include <algorithm>

#include "core/geometry.hpp"
#include "core/score/bound.hpp"
#include "core/status.hpp"
#include "cuda/score_program.hpp"

namespace tessera::cuda {
namespace {

constexpr const Family* kFamilies[] = {&kDecodeSm90, &kMixedSm90, &kFwdSm90,     &kFwdSm90Fp8,
                                       &kFwdSm80,    &kBwdSm90,   &kBwdSm80,     &kSharedPrefix,
                                       &kFwdFa1,     &kBwdFa1,    &kFwdStandard, &kBwdStandard};

std::string arch_text(int32_t arch) { return std::to_string(arch / 10) + "." + std::to_string(arch % 10); }

// "float16, bfloat16"
std::string dtypes_text(uint32_t dtypes) {
  std::string text;
  for (int dtype = 0; dtype < 32; ++dtype) {
    if (dtypes >> dtype & 1) text += (text.empty() ? "" : ", ") + std::string(tessera_dtype_name(dtype));
  }
  return text;
}

}  // namespace

std::span<const Family* const> families() { return kFamilies; }

const Family* find_family(std::string_view name) {
  const auto found = std::ranges::find_if(kFamilies, [name](const Family* family) { return family->name == name; });
  return found == std::end(kFamilies) ? nullptr : *found;
}

const Family* cheapest(std::span<const Family* const> among, const tessera_plan& plan) {
  const Family* best = nullptr;
  double least = 0;
  for (const Family* family : among) {
    if (!family->refuse(plan).empty()) continue;
    const double us = family->estimate_us(plan);
    if (!best || us < least) best = family, least = us;
  }
  return best;
}

tessera_status lower_step(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                          void* workspace, LaunchList& launches) {
  const Family* const family = find_family(step.family);
  if (!family) return invalid("plan: family '%.31s', accepted what tessera_make_plan fills in", step.family);
  void* const memory = workspace ? static_cast<char*>(workspace) + step.workspace_at : nullptr;
  return family->lower(plan, step, buffers, memory, launches);
}

void add_stand_in(tessera_plan& plan) {
  for (const tessera_plan_step& step : core::steps_of(plan)) {
    const Family* const family = find_family(step.family);
    if (!family || !family->alignment) continue;
    const int32_t steps = plan.num_steps;
    tessera_plan_step& stand_in = plan.steps[steps];
    family->alignment->add_stand_in(plan);
    if (plan.num_steps == steps) return;
    stand_in.keys = TESSERA_STEP_ALL_KEYS, stand_in.unaligned = 1;
    return;
  }
}

std::string refusal(const Supports& supports, const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (p.direction != supports.direction) {
    return supports.direction == TESSERA_FORWARD ? "a forward kernel" : "a backward kernel";
  }
  const int32_t arch = plan.device.arch, oldest = supports.oldest_arch, newest = supports.newest_arch;
  if (arch < oldest || arch > newest) {
    const std::string most = newest == oldest ? "" : newest == kAnyNewer ? " or newer" : " to " + arch_text(newest);
    return "compute capability " + arch_text(arch) + ", must be " + arch_text(oldest) + most;
  }
  if (!(supports.dtypes >> p.q.dtype & 1)) {
    return std::string(tessera_dtype_name(p.q.dtype)) + ", accepted " + dtypes_text(supports.dtypes);
  }
  if (core::score::has_program(plan)) {
    if (!supports.programs) return "score programs: not supported";
    if (std::string reason = refuse_program(plan); !reason.empty()) return reason;
  }
  if (p.k.dtype != p.q.dtype && !(supports.cache_dtypes >> p.k.dtype & 1)) {
    const std::string accepted = supports.cache_dtypes ? " and " + dtypes_text(supports.cache_dtypes) : "";
    return std::string("keys and values of ") + tessera_dtype_name(p.k.dtype) + ", accepted those of q's dtype" +
           accepted;
  }
  // Only shared_prefix reads them; it asks the other families for its parts.
  if (core::present(p.prefix_groups)) return "prefix_groups: not supported";
  const bool backward = p.direction == TESSERA_BACKWARD;
  if (!supports.partials && p.accumulate) return "accumulate: not supported";
  const tessera_layout& result = backward ? p.d_q : p.o;
  if (!supports.partials && result.dtype != p.q.dtype && tessera_dtype_bytes(p.q.dtype) > 1) {
    return std::string(backward ? "d_q" : "o") + ": " + tessera_dtype_name(result.dtype) + ", must be that of q";
  }
  if (core::present(p.places) && core::present(p.causal_seqs)) return "places: not supported with causal_seqs";
  for (int t = 0; t < core::kNumTensors; ++t) {
    const core::TensorField& field = core::kTensorFields[t];
    if (!(supports.tensors >> t & 1) && core::present(p.*field.layout))
      return std::string(field.name) + ": not supported";
  }
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  if (head_dim > supports.head_dim) {
    return "head size " + std::to_string(head_dim) + ", at most " + std::to_string(supports.head_dim);
  }
  return "";
}

std::string refuse_shared_memory(int64_t bytes, const tessera_plan& plan) {
  if (bytes <= plan.device.smem_bytes) return "";
  return "needs " + std::to_string(bytes >> 10) + " KiB of shared memory, a block may have " +
         std::to_string(plan.device.smem_bytes >> 10);
}

}  // namespace tessera::cuda
