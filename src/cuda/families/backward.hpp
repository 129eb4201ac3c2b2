// Common parts of the backward families: what a call stores for each query between its kernels, and the kernels'
// inputs.
#pragma once

#include <cstdint>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// Offsets in bytes; see BwdParams.
struct BwdWorkspace {
  int64_t row_lse_log2, row_delta, dq_accum, dq_semaphore, ticket;
  int64_t bytes;
};

// The workspace for `tiles` tiles of block_m queries, over all heads.
BwdWorkspace backward_workspace(int64_t tiles, int block_m, int head_dim, bool deterministic);

// The magnitude of the LSE, in log2 units, from which on one float of it is too inexact to compute P
// (attention/backward/rows.cuh). Below it the error of P is less than 2^-15 for 16-bit types, and for float32 less than
// that of a score rounded to float32.
constexpr float far_lse_log2(const tessera_problem& problem) {
  return problem.q.dtype == TESSERA_FLOAT32 ? 0x1p7f : 0x1p10f;
}

// Fills in everything except how keys and queries are cut into tiles. `workspace` may be NULL if nothing is launched.
void fill_backward_params(BwdParams& p, const tessera_plan& plan, const BwdWorkspace& at,
                          const tessera_buffers& buffers, void* workspace);

// Whether dQ, dK and dV are float32 sums (kernels/tessera/attention/backward/sums.cuh): where a call accumulates, and
// where they are float32 beside 16-bit inputs.
inline bool writes_sums(const tessera_problem& problem) {
  return problem.accumulate || problem.d_q.dtype != problem.q.dtype;
}

// The decisions of bwd_sm80 for a problem.
struct BwdSm80Plan {
  BwdConfig config;    // aligned only for calls in which every row of q, k, v and dO starts at a multiple of 16 bytes
  BwdRowsConfig rows;  // likewise, of o and dO
  int tiles, q_tiles, q_slots, owned_batches, owned_heads;  // see BwdParams
  Grid before, products, after;
  BwdWorkspace workspace;
  int program_words;  // of the lists of a score program's mask, which are after `workspace`; 0: none
};

// Appends a step of bwd_sm80 to a plan of a problem that it supports.
void add_bwd_sm80(tessera_plan& plan);

}  // namespace tessera::cuda
