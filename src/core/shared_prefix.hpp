// Sequences that share a prefix, as two problems of attention: the queries of every group, as those of one sequence, against
// the group's prefix, and every sequence's queries against its other keys. What they compute is merged (tessera_combine).
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

// Why the parts of a validated problem are none that a kernel could read; "" where they are.
std::string refuse_prefixes(const tessera_problem& problem);

// Where the keys of every sequence lie: of sequence b they begin at entry b * a_sequence, or where the problem's own offsets
// (cu_seqlens_k, page_indptr) say. An entry is `keys` of them: a row of k, or a page of the table.
struct KeyPlaces {
  int64_t a_sequence;  // 0: by the problem's offsets
  int64_t entries;     // of all sequences
  int64_t keys;
};
KeyPlaces key_places(const tessera_problem& problem);

// Causal or of a tree of drafted tokens, as far as the problem tells: a sequence that hides no key before its first query.
constexpr bool hides_keys(const tessera_problem& problem, bool causal) { return causal || present(problem.tree_mask); }

// The queries of all sequences as those of one: [T, Hq, D]. Of what refuse_prefixes takes.
tessera_layout joined_queries(const tessera_problem& problem);

// A part as a plan of its own: its problem and sizes, and, once they are known, its kernel and numbers.
tessera_plan plan_of(const tessera_plan& plan, PrefixPart part);
// Keeps what was decided for a part.
void keep_part(tessera_plan& plan, PrefixPart part, const tessera_plan& decided);

// What a call's parts are made of, in its workspace. T: the queries of the whole batch.
struct PrefixMemory {
  char* o[kPrefixParts];         // [T, Hq, Dv], of q's dtype
  float* lse[kPrefixParts];      // [Hq, T]
  float* lse_low[kPrefixParts];  // [Hq, T]
  int32_t* group_queries;        // [G + 1]: cu_seqlens_q of the groups
  int32_t* group_keys;           // [G + 1]: the entry of its first key
  int32_t* group_lens;           // [G]: the keys of it that are read once
  int32_t* suffix_keys;          // [B + 1]: the entry of a sequence's first key after these
  int32_t* suffix_lens;          // [B]
  ChunkMemory chunks;
  int64_t bytes;
};
// With base NULL: only the size.
PrefixMemory carve_prefix(char* base, const tessera_plan& plan);

tessera_buffers buffers_of(const tessera_plan& plan, PrefixPart part, const tessera_buffers& buffers,
                           const PrefixMemory& memory);

// The merge of the parts: what tessera_combine reads and writes, and a sink is the caller's to add. Packed rows are one sequence's.
tessera_combine_call merge_of(const tessera_plan& plan, const tessera_buffers& buffers, const PrefixMemory& memory);

// prefix_groups and prefix_lens against what the sequences have. The other index tensors have been checked.
tessera_status check_prefixes(const tessera_plan& plan, const tessera_buffers& buffers);

// Fills in the five arrays of indices, from index tensors that the host sees and that have been checked.
void fill_prefix_indices(const tessera_plan& plan, const tessera_buffers& buffers, const PrefixMemory& memory);

}  // namespace tessera::core
