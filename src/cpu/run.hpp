// What the plan's numbers mean to execution: shared by schedule.cpp, which sizes, and run.cpp, which runs.
#pragma once

#include "cpu/params.hpp"

namespace tessera::cpu {

// Query heads that share a KV head stand in one tile, because a head alone would not fill it.
bool packs_heads(const tessera_plan& plan);
// Keys a split, a multiple of block_n.
int64_t split_keys(const tessera_plan& plan);
// d_q itself is the float32 accumulator.
bool accumulates_in_place(const tessera_plan& plan);

// How many sequences and KV heads one backward item owns: all that share rows of d_bias.
struct BackwardOwners {
  int64_t batch, heads;
  int64_t count;  // of owners
};
BackwardOwners backward_owners(const tessera_plan& plan);

struct SharedMemory {
  Sequence* sequences;
  float *partial_o, *partial_lse;
  float *row_lse, *row_delta, *acc_dq;
  int64_t bytes;
};
// With base NULL: only the size.
SharedMemory carve_shared(char* base, const tessera_plan& plan);

}  // namespace tessera::cpu
