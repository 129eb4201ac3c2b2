#include "cuda/families/split_keys.hpp"

#include "core/geometry.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

int64_t o_bytes(const tessera_plan& plan, int num_splits) {
  return padded_to(int64_t{num_splits} * plan.heads_q * rows_total(plan) * plan.head_dim_v * 4, kWorkspaceAlignment);
}

// Of at most so many rows and more parts than these, each row is merged by a block. One warp a row takes 0.5 us for
// every 8 parts and 128 columns: 1 x 2048 keys, 32 heads over 2 of D 256, took 10.9 us in 16 parts and 13.4 in 32.
constexpr int64_t kFewRows = 4096;
constexpr int kFewParts = 4;

// Bytes of one of the LSE's two floats.
int64_t lse_bytes(const tessera_plan& plan, int num_splits) {
  return int64_t{num_splits} * plan.heads_q * rows_total(plan) * 4;
}

}  // namespace

bool merges_parts(const tessera_problem& problem, int num_splits) {
  return num_splits > 1 || problem.accumulate || problem.o.dtype != problem.q.dtype;
}

int64_t split_parts_bytes(const tessera_plan& plan, int num_splits) {
  return o_bytes(plan, num_splits) + 2 * lse_bytes(plan, num_splits);
}

SplitParts split_parts_at(const tessera_plan& plan, int num_splits, void* workspace) {
  if (!workspace) return {};
  char* const lse = static_cast<char*>(workspace) + o_bytes(plan, num_splits);
  return {static_cast<float*>(workspace), reinterpret_cast<float*>(lse),
          reinterpret_cast<float*>(lse + lse_bytes(plan, num_splits))};
}

tessera_status merge_split_parts(const tessera_plan& plan, int num_splits, const SplitParts& parts,
                                 const tessera_buffers& buffers, LaunchList& launches) {
  const tessera_problem& problem = plan.problem;
  ProblemParams p{};
  fill_problem_params(p, plan, buffers);
  CombineParams c{};
  const bool packed = core::packed_q(problem);
  c.parts = num_splits, c.batch = packed ? 1 : p.batch, c.rows = Divisor(packed ? p.rows_q : p.seqlen_q);
  c.heads = Divisor(p.heads_q), c.head_dim_v = p.head_dim_v;
  c.o_parts = parts.o;
  c.o_part_row = p.head_dim_v, c.o_part_batch = int64_t{c.rows.value} * c.o_part_row;
  c.o_part_head = p.rows_total * c.o_part_row, c.o_part = p.heads_q * c.o_part_head;
  c.lse_parts = {parts.lse, p.heads_q * p.rows_total, c.rows.value, p.rows_total, 1};
  c.lse_low_parts = c.lse_parts, c.lse_low_parts.data = parts.lse_low;
  c.o = row_tensor(problem.o, buffers.o);
  c.lse = stat_tensor(problem.lse, buffers.lse), c.lse_low = stat_tensor(problem.lse_low, buffers.lse_low);
  c.sink = p.sink, c.sink_head = p.sink_head;
  if (problem.accumulate) {
    const RowTensor from = core::present(problem.o_accum) ? row_tensor(problem.o_accum, buffers.o_accum) : c.o;
    c.chunks.own_o = from.data, c.chunks.own_o_batch = from.batch;
    c.chunks.own_o_row = from.row, c.chunks.own_o_head = from.head;
  }
  const CombineConfig config{static_cast<Dtype>(problem.o.dtype), Dtype::kFloat32, false, problem.accumulate != 0};
  c.by_block = combines_by_block(config) && num_splits > kFewParts && rows_total(plan) * plan.heads_q <= kFewRows;
  if (packed) c.rows_begin = p.cu_seqlens_q, c.rows_end = p.cu_seqlens_q + p.batch * p.cu_seqlens_q_stride;
  return launch_combine(config, c, launches);
}

}  // namespace tessera::cuda
