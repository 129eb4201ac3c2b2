// What the backward families share: what a call keeps for each query between its kernels, and what their kernels read.
#pragma once

#include <cstdint>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// Offsets in bytes; BwdParams has what they are.
struct BwdWorkspace {
  int64_t row_lse_log2, row_delta, dq_accum, dq_semaphore, ticket;
  int64_t bytes;
};

// `tiles`: of block_m queries, of all heads.
BwdWorkspace backward_workspace(int64_t tiles, int block_m, int head_dim, bool deterministic);

// The LSE in log2 units from which on one float of it is too little for P (attention/far_rows.cuh): the error of P is below 2^-15 for types
// of 16 bits, and below that of a score rounded to float32 for float32.
constexpr float far_lse_log2(const tessera_problem& problem) {
  return problem.q.dtype == TESSERA_FLOAT32 ? 0x1p7f : 0x1p10f;
}

// All but how keys and queries are cut into tiles. `workspace` may be NULL: nothing is launched then.
void fill_backward_params(BwdParams& p, const tessera_plan& plan, const BwdWorkspace& at,
                          const tessera_buffers& buffers, void* workspace);

// All that bwd_sm80 has decided for a problem.
struct BwdSm80Plan {
  BwdConfig config;              // where every row of q, k, v and dO starts at a multiple of 16 bytes
  BwdConfig unaligned;           // elsewhere
  BwdRowsConfig rows;            // where every row of o and dO does
  BwdRowsConfig unaligned_rows;  // elsewhere
  int tiles, q_tiles, q_slots, owned_batches, owned_heads;  // BwdParams has what they are
  Grid before, products, after;
  BwdWorkspace workspace;
};

// Of a problem that it takes; `plan` has its sizes filled in.
BwdSm80Plan plan_bwd_sm80(const tessera_plan& plan);

tessera_status list_bwd_sm80(const tessera_plan& plan, const BwdSm80Plan& own, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches);

}  // namespace tessera::cuda
