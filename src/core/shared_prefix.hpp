// Splits sequences that share a prefix into two problems of attention: the queries of every group, as one sequence,
// with the group's prefix; and every sequence's queries with its other keys. The results are merged (tessera_combine).
#pragma once

#include <cstdint>
#include <string>

#include "core/buffers.hpp"
#include "core/geometry.hpp"
#include "core/prefix_chunks.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

enum PrefixPart { kPrefix, kSuffix, kPrefixParts };

constexpr bool shares_prefixes(const tessera_problem& problem) { return present(problem.prefix_groups); }
constexpr int64_t prefix_groups(const tessera_problem& problem) { return problem.prefix_groups.shape[0] - 1; }

// Why no kernel can compute the parts of a validated problem; empty if one can.
std::string refuse_prefixes(const tessera_problem& problem);

// The places of all sequences' keys: those of sequence b begin at entry b * a_sequence, or at the problem's offsets
// (cu_seqlens_k, page_indptr). An entry is `keys` keys: one row of k, or one page of the table.
struct KeyPlaces {
  int64_t a_sequence;  // 0: given by the problem's offsets
  int64_t entries;     // of all sequences
  int64_t keys;
};
KeyPlaces key_places(const tessera_problem& problem);

// True if a sequence may hide keys from its first query on: it is causal or, as far as the problem tells, has a tree of
// drafted tokens.
constexpr bool hides_keys(const tessera_problem& problem, bool causal) { return causal || present(problem.tree_mask); }

// The queries of all sequences as one sequence: [T, Hq, D]. Needs a problem that refuse_prefixes accepts.
tessera_layout joined_queries(const tessera_problem& problem);

// The step of a part.
constexpr int32_t step_keys(PrefixPart part) {
  return part == kPrefix ? TESSERA_STEP_PREFIXES : TESSERA_STEP_OTHER_KEYS;
}
// A part as a plan of its own: its problem and sizes, and its steps, if there are some. `chunks`: of a prefix's keys.
tessera_plan plan_of(const tessera_plan& plan, PrefixPart part, int64_t chunks);
tessera_plan plan_of(const tessera_plan& plan, PrefixPart part);
// Appends a part's steps to those of the plan.
void keep_steps(tessera_plan& plan, const tessera_plan& part);

// The buffers of a call's parts, in its workspace. T: the queries of the whole batch.
struct PrefixMemory {
  char* o[kPrefixParts];         // [T, Hq, Dv], of q's dtype
  float* lse[kPrefixParts];      // [Hq, T]
  float* lse_low[kPrefixParts];  // [Hq, T]
  int32_t* group_queries;        // [G + 1]: cu_seqlens_q of the groups
  int32_t* group_keys;           // [G + 1]: the entry of each group's first key
  int32_t* group_lens;           // [G]: the number of a group's keys that are read once
  int32_t* suffix_keys;          // [B + 1]: the entry of a sequence's first key after these
  int32_t* suffix_lens;          // [B]
  ChunkMemory chunks;
  int64_t bytes;
};
// base NULL: computes only the size.
PrefixMemory carve_prefix(char* base, const tessera_plan& plan);

tessera_buffers buffers_of(const tessera_plan& plan, PrefixPart part, const tessera_buffers& buffers,
                           const PrefixMemory& memory);

// The merge of the parts as arguments of tessera_combine; the caller adds a sink. Packed rows form one sequence.
tessera_combine_call merge_of(const tessera_plan& plan, const tessera_buffers& buffers, const PrefixMemory& memory);

// Checks prefix_groups and prefix_lens against the sequences' lengths. The other index tensors are already checked.
tessera_status check_prefixes(const tessera_plan& plan, const tessera_buffers& buffers);

// Fills in the five index arrays from checked index tensors in host memory.
void fill_prefix_indices(const tessera_plan& plan, const tessera_buffers& buffers, const PrefixMemory& memory);

}  // namespace tessera::core
