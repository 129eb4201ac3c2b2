// The meaning of a plan's numbers: shared by schedule.cpp, which chooses sizes, and run.cpp, which runs.
#pragma once

#include <new>

#include "core/steps.hpp"
#include "cpu/params.hpp"

namespace tessera::cpu {

// What the CPU's kernels keep in a step.
struct CpuStep {
  int32_t tiles_per_item;  // query tiles (decode: KV heads) that share one pass over keys and values
  int32_t use_dot;         // 1: bf16 products by special instructions, the dot product or AMX tiles
  // decode: an upper bound of the parts that the keys of all sequences are split into; each part has its own partial
  // results
  int64_t parts;
};
static_assert(sizeof(CpuStep) <= TESSERA_PLAN_CONFIG_BYTES &&
              offsetof(tessera_plan_step, config) % alignof(CpuStep) == 0);
inline CpuStep& own_of(tessera_plan_step& step) { return *std::launder(reinterpret_cast<CpuStep*>(step.config)); }
inline const CpuStep& own_of(const tessera_plan_step& step) {
  return *std::launder(reinterpret_cast<const CpuStep*>(step.config));
}
// The step of the tiled kernel, or of the decode kernel if it serves all sequences.
inline tessera_plan_step& step_of(tessera_plan& plan) { return plan.steps[0]; }
inline const tessera_plan_step& step_of(const tessera_plan& plan) { return plan.steps[0]; }
// The step of the decode kernel. Needs a plan with decode_queries above 0.
inline tessera_plan_step& decode_step_of(tessera_plan& plan) { return plan.steps[plan.num_steps - 1]; }
inline const tessera_plan_step& decode_step_of(const tessera_plan& plan) { return plan.steps[plan.num_steps - 1]; }

// The path of a sequence of `sq` queries, which depends only on its own rows, not on the rest of the batch.
enum Way {
  kDecode,      // few rows: the decode kernel
  kPackedTile,  // the query heads of a KV head are rows of one tile, because one head alone would not fill it
  kTile,
  kWays,
};
Way way_of(const tessera_plan& plan, int64_t sq);

// The number of parts of a sequence's keys in decoding, if the decoded sequences have `keys` keys in use altogether:
// enough to keep the cores busy, with more parts for longer sequences. With batch_invariant, parts have a fixed size,
// so that they depend only on their own sequence.
int64_t decode_parts(const tessera_plan& plan, int64_t sk, int64_t keys);
// Keys that the decode kernel processes at once.
int32_t decode_keys(const tessera_plan& plan);
// A plan is made for the longest keys that its tensors hold. The splits of a call's keys follow the longest that are in
// use: at most the step's num_splits, and the same as those of a plan made for that length.
struct KeySplits {
  int32_t count;
  int64_t keys;  // keys of a split, a multiple of block_n
};
KeySplits key_splits(const tessera_plan& plan, int64_t longest);
// Query heads of a KV head.
int64_t group_size(const tessera_plan& plan);
// Forward in float32: rows of K and V map to so few sets of the L1 cache that they are copied block by block.
bool rows_collide(const tessera_plan& plan);
// d_q itself is the float32 accumulator.
bool accumulates_in_place(const tessera_plan& plan);

// The number of sequences and KV heads that one backward item owns: all that add to the same rows of d_bias.
struct BackwardOwners {
  int64_t batch, heads;
  int64_t count;  // number of owners
};
BackwardOwners backward_owners(const tessera_plan& plan);

struct SharedMemory {
  Sequence*
      sequences[kWays];  // of the whole batch; sequences with another path have no queries. Backward: only the last
  float *partial_o, *partial_lse, *partial_lse_low;
  float *decode_o, *decode_lse, *decode_lse_low;
  char* packed_keys;  // forward with AMX: for the tiled paths, one after another
  float *row_shift, *row_lse, *row_delta, *acc_dq;
  double* program_sums;  // [chains][sums of one chain]: ProgramCall
  int64_t bytes;
};
// With base NULL it computes only the size.
SharedMemory carve_shared(char* base, const tessera_plan& plan);

}  // namespace tessera::cpu
