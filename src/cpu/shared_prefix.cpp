// Shared prefixes on the CPU: each part is a call of the other kernels over the same threads and scratch, and their results are
// merged.
#include "core/shared_prefix.hpp"

#include <algorithm>

#include "core/problem_view.hpp"
#include "cpu/cpu.hpp"
#include "cpu/runner.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {
namespace {

constexpr core::PrefixPart kParts[] = {core::kPrefix, core::kSuffix};
constexpr int64_t kMergeRowsPerItem = 64;

CombineParams merge_params(const tessera_plan& plan, const tessera_buffers& buffers, const core::PrefixMemory& memory) {
  const tessera_problem& problem = plan.problem;
  const bool packed = core::packed_q(problem);
  const int64_t rows = core::rows_total(problem);
  const core::TensorView<core::RowStrides> o = core::row_view(problem.o, buffers.o);
  const core::TensorView<core::LseStrides> lse = core::lse_view(problem.lse, buffers.lse);
  CombineParams c{};
  c.parts = core::kPrefixParts, c.batch = packed ? 1 : plan.batch, c.rows = packed ? rows : problem.q.shape[1];
  c.heads = plan.heads_q, c.head_dim_v = plan.head_dim_v;
  c.part_dtype = c.dtype = problem.o.dtype;
  c.o_parts = memory.o[0], c.o_part = memory.o[1] - memory.o[0];
  c.o_part_head = plan.head_dim_v * o.elem_bytes, c.o_part_row = plan.heads_q * c.o_part_head;
  c.o_part_batch = c.rows * c.o_part_row;
  c.lse_parts = reinterpret_cast<const char*>(memory.lse[0]);
  c.lse_part = (memory.lse[1] - memory.lse[0]) * 4;
  c.lse_part_row = 4, c.lse_part_head = rows * 4, c.lse_part_batch = c.rows * 4;
  c.o = static_cast<char*>(o.data);
  c.o_batch = o.stride.batch * o.elem_bytes, c.o_row = o.stride.row * o.elem_bytes;
  c.o_head = o.stride.head * o.elem_bytes;
  c.lse = static_cast<char*>(lse.data);
  c.lse_batch = lse.stride.batch * 4, c.lse_head = lse.stride.head * 4, c.lse_row = lse.stride.row * 4;
  if (core::present(problem.sink)) c.sink = buffers.sink, c.sink_head = problem.sink.strides[0] * 4;
  return c;
}

}  // namespace

std::string refuse_shared_prefix(const tessera_plan& plan) {
  if (!core::shares_prefixes(plan.problem)) return "no prefix_groups";
  if (plan.problem.q.dtype == TESSERA_FLOAT64) return "float64: computes in float32";
  return core::refuse_prefixes(plan.problem);
}

void configure_shared_prefix(tessera_plan& plan) {
  int64_t shared_bytes = 0;
  for (const core::PrefixPart n : kParts) {
    tessera_plan part = core::plan_of(plan, n);
    const bool decode = refuse_decode(part).empty();
    part.kernel = decode ? TESSERA_KERNEL_DECODE : TESSERA_KERNEL_TILED;
    (decode ? configure_decode : configure_tiled)(part);
    core::keep_part(plan, n, part);
    plan.num_items += part.num_items;
    plan.scratch_bytes = std::max(plan.scratch_bytes, part.scratch_bytes);
    shared_bytes = std::max(shared_bytes, part.shared_bytes);
  }
  plan.shared_bytes = core::carve_prefix(nullptr, plan).bytes + shared_bytes;
}

void forward_shared_prefix(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                           const tessera_executor& executor, core::Cancel& cancel) {
  char* const base = static_cast<char*>(workspace);
  const core::PrefixMemory memory = core::carve_prefix(base, plan);
  core::fill_prefix_indices(plan, buffers, memory);
  for (const core::PrefixPart n : kParts) {
    tessera_plan part = core::plan_of(plan, n);
    part.shared_bytes = plan.shared_bytes - memory.bytes;  // the threads' scratch comes after the larger one's
    forward(part, core::buffers_of(plan, n, buffers, memory), base + memory.bytes, executor, cancel);
    if (cancel.asked()) return;
  }
  const CombineParams c = merge_params(plan, buffers, memory);
  const int64_t rows = c.batch * c.rows * c.heads;
  const KernelTable& table = kernel_table(plan.device.isa);
  const Runner runner(plan.device.threads, base + plan.shared_bytes, plan.scratch_bytes, executor, cancel, false);
  runner.run((rows + kMergeRowsPerItem - 1) / kMergeRowsPerItem, [&](int64_t item, char*) {
    const int64_t begin = item * kMergeRowsPerItem;
    table.combine(c, begin, std::min(rows, begin + kMergeRowsPerItem));
  });
}

}  // namespace tessera::cpu
