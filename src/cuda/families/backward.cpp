#include "cuda/families/backward.hpp"

#include "core/geometry.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {

BwdWorkspace backward_workspace(int64_t tiles, int block_m, int head_dim, bool deterministic) {
  constexpr int64_t kAlignment = 64;
  const int64_t rows = tiles * block_m;
  BwdWorkspace w{};
  const auto take = [&w](int64_t bytes) {
    const int64_t at = w.bytes;
    w.bytes += padded_to(bytes, kAlignment);
    return at;
  };
  w.row_lse_log2 = take(rows * 4);
  w.row_delta = take(rows * 4);
  w.dq_accum = take(rows * head_dim * 4);
  if (deterministic) {
    w.dq_semaphore = take(tiles * 4);
    w.ticket = take(4);
  }
  return w;
}

namespace {

void fill_gradients(BwdParams& p, const tessera_problem& problem, const tessera_buffers& buffers) {
  p.o = row_tensor(problem.o, buffers.o);
  p.d_o = row_tensor(problem.d_o, buffers.d_o);
  p.d_q = row_tensor(problem.d_q, buffers.d_q);
  p.d_k = row_tensor(problem.d_k, buffers.d_k);
  p.d_v = row_tensor(problem.d_v, buffers.d_v);
  p.d_q_aligned = rows_aligned(problem.d_q, buffers.d_q);
  p.d_k_aligned = rows_aligned(problem.d_k, buffers.d_k);
  p.d_v_aligned = rows_aligned(problem.d_v, buffers.d_v);
  p.lse = stat_tensor(problem.lse, buffers.lse), p.lse_low = stat_tensor(problem.lse_low, buffers.lse_low);
  p.d_lse = stat_tensor(problem.d_lse, buffers.d_lse);
  p.far_lse_log2 = far_lse_log2(problem);
  p.accumulate = static_cast<int>(problem.accumulate);
  if (core::present(problem.d_bias)) {
    p.d_bias = score_tensor(problem.d_bias, buffers.d_bias);
    p.d_bias_batches = static_cast<int>(problem.d_bias.shape[0]);
    p.d_bias_heads = static_cast<int>(problem.d_bias.shape[1]);
    p.d_bias_rows = static_cast<int>(problem.d_bias.shape[2]);
    p.d_bias_cols = static_cast<int>(problem.d_bias.shape[3]);
  }
  if (core::present(problem.d_sink)) {
    p.d_sink = buffers.d_sink;
    p.d_sink_head = problem.d_sink.strides[0];
  }
}

}  // namespace

void fill_backward_params(BwdParams& p, const tessera_plan& plan, const BwdWorkspace& at,
                          const tessera_buffers& buffers, void* workspace) {
  fill_problem_params(p, plan, buffers);
  fill_gradients(p, plan.problem, buffers);
  const auto pointer = [workspace](int64_t offset) {
    return workspace ? static_cast<char*>(workspace) + offset : nullptr;
  };
  p.row_lse_log2 = reinterpret_cast<float*>(pointer(at.row_lse_log2));
  p.row_delta = reinterpret_cast<float*>(pointer(at.row_delta));
  p.dq_accum = reinterpret_cast<float*>(pointer(at.dq_accum));
  if (plan.problem.deterministic) {
    p.dq_semaphore = reinterpret_cast<int*>(pointer(at.dq_semaphore));
    p.ticket = reinterpret_cast<int*>(pointer(at.ticket));
  }
}

}  // namespace tessera::cuda
