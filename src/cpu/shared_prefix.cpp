// Shared prefixes on the CPU: each part is a call of the other kernels with the same threads and scratch, and their
// results are merged.
#include "core/shared_prefix.hpp"

#include <algorithm>

#include "core/dtypes.hpp"
#include "core/problem_view.hpp"
#include "core/score/bound.hpp"
#include "cpu/cpu.hpp"
#include "cpu/runner.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {
namespace {

constexpr core::PrefixPart kParts[] = {core::kPrefix, core::kSuffix};
constexpr int64_t kMergeRowsPerItem = 64;

}  // namespace

std::string refuse_shared_prefix(const tessera_plan& plan) {
  if (!core::shares_prefixes(plan.problem)) return "no prefix_groups";
  if (plan.problem.q.dtype == TESSERA_FLOAT64) return "float64: computes in float32";
  if (core::is_8bit(plan.problem.k.dtype)) return "keys and values of 8 bits: not supported";
  return core::refuse_prefixes(plan.problem);
}

void configure_shared_prefix(tessera_plan& plan) {
  for (const core::PrefixPart n : kParts) {
    tessera_plan part = core::plan_of(plan, n);
    part.scratch_bytes = 0;
    const Kernel& kernel = *find_kernel(refuse_decode(part).empty() ? "decode" : "tiled");
    core::set_family(part, kernel);
    kernel.configure(part);
    core::keep_steps(plan, part);
    plan.scratch_bytes = std::max(plan.scratch_bytes, part.scratch_bytes);
  }
  const int64_t at = core::carve_prefix(nullptr, plan).bytes;  // the parts run one after the other, in the same memory
  for (int32_t n = 0; n < plan.num_steps; ++n) plan.steps[n].workspace_at = at;
}

void forward_shared_prefix(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                           void* workspace, const tessera_executor& executor, core::Cancel& cancel) {
  char* const base = static_cast<char*>(workspace);
  const core::PrefixMemory memory = core::carve_prefix(base, plan);
  core::fill_prefix_indices(plan, buffers, memory);
  for (const core::PrefixPart n : kParts) {
    tessera_plan part = core::plan_of(plan, n);
    core::set_family(part, *find_kernel(part.steps[0].family));
    part.shared_bytes = plan.shared_bytes - memory.bytes;  // the threads' scratch follows the larger of the two
    forward(part, core::buffers_of(plan, n, buffers, memory), bound, base + memory.bytes, executor, cancel);
    if (cancel.asked()) return;
  }
  CombineParams c = combine_params(core::merge_of(plan, buffers, memory));
  if (core::present(plan.problem.sink)) c.sink = buffers.sink, c.sink_head = plan.problem.sink.strides[0] * 4;
  const int64_t rows = c.batch * c.rows * c.heads;
  const KernelTable& table = kernel_table(plan.device.isa);
  const Runner runner(plan.device.threads, base + plan.shared_bytes, plan.scratch_bytes, executor, cancel, false);
  runner.run((rows + kMergeRowsPerItem - 1) / kMergeRowsPerItem, [&](int64_t item, char*) {
    const int64_t begin = item * kMergeRowsPerItem;
    table.combine(c, begin, std::min(rows, begin + kMergeRowsPerItem));
  });
}

}  // namespace tessera::cpu
