// What the plan's numbers mean to execution: shared by schedule.cpp, which sizes, and run.cpp, which runs.
#pragma once

#include "cpu/params.hpp"

namespace tessera::cpu {

// Which way a sequence of `sq` queries goes: by its own rows alone, whatever else is in the batch.
enum Way {
  kDecode,      // few rows: by the decode kernel
  kPackedTile,  // the query heads that share a KV head stand in one tile, because a head alone would not fill it
  kTile,
  kWays,
};
Way way_of(const tessera_plan& plan, int64_t sq);

// Parts of the keys of a sequence in decoding, where all that are decoded have `keys` in use: as many as keep the cores
// busy, long ones more than short ones. With batch_invariant a fixed size, so that a sequence's parts are its own affair.
int64_t decode_parts(const tessera_plan& plan, int64_t sk, int64_t keys);
// Keys that the kernel which decodes takes at once.
int32_t decode_keys(const tessera_plan& plan);
// A plan is made for the longest keys that its tensors hold; what a call's keys are split into follows the longest that are
// in use: at most plan.num_splits, and those of a plan made for that length.
struct KeySplits {
  int32_t count;
  int64_t keys;  // a split, a multiple of block_n
};
KeySplits key_splits(const tessera_plan& plan, int64_t longest);
// Query heads that share a KV head.
int64_t group_size(const tessera_plan& plan);
// Forward in float32: rows of K and V share so few sets of the first cache that they are copied block by block.
bool rows_collide(const tessera_plan& plan);
// d_q itself is the float32 accumulator.
bool accumulates_in_place(const tessera_plan& plan);

// How many sequences and KV heads one backward item owns: all that share rows of d_bias.
struct BackwardOwners {
  int64_t batch, heads;
  int64_t count;  // of owners
};
BackwardOwners backward_owners(const tessera_plan& plan);

struct SharedMemory {
  Sequence*
      sequences[kWays];  // of the whole batch, those that go another way without queries. Backward: the last alone
  float *partial_o, *partial_lse, *partial_lse_low;
  float *decode_o, *decode_lse, *decode_lse_low;
  char* packed_keys;  // forward by AMX: of the ways of tiles, one after the other
  float *row_shift, *row_lse, *row_delta, *acc_dq;
  double* program_sums;  // [chains][sums of one]: ProgramCall
  int64_t bytes;
};
// With base NULL: only the size.
SharedMemory carve_shared(char* base, const tessera_plan& plan);

}  // namespace tessera::cpu
