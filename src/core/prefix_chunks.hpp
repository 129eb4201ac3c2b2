// Splits the keys of shared prefixes into chunks, for a kernel that would otherwise have too few tiles. The queries of
// a group with one chunk of its prefix form one sequence, and the chunks' results are merged with those of the
// sequences' own keys. The query heads of a KV head become rows of one head, so that a tile of keys is multiplied by
// all of them at once.
//
// For T queries, G groups and C chunks, there are rows [C, T, group] for each KV head. With one group, a chunk is a
// sequence with all of these rows: the host knows every work tile, and a static grid has one per multiprocessor. Rows
// that belong to no group are computed as well, and the merge ignores them. With several groups the sequences are
// packed as [C, G, 2]: the second of each pair ends the keys of the first and has the rows, if any, up to the next
// group's, and no keys.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

// Number of chunks; 1: the prefixes are not split.
int64_t prefix_chunks(const tessera_plan& plan);

int64_t chunk_sequences(int64_t chunks, int64_t groups);

// The entries (rows of k, or pages) of a chunk are a multiple of this number; an entry is keys_an_entry keys.
int64_t chunk_unit(int64_t keys_an_entry);

// The problem of the prefixes' part (packed queries, one sequence per group), split into chunks.
tessera_problem chunked(const tessera_problem& part, int64_t chunks, int64_t keys_an_entry);

// Part of the workspace; all NULL without chunks.
struct ChunkMemory {
  char *q, *o;           // [C * T * group, Hkv, D or Dv]
  float *lse, *lse_low;  // [Hkv, C * T * group]
  int32_t* rows;         // [sequences + 1]: cu_seqlens_q; NULL with one group
  int32_t* keys;         // [sequences + 1]: the entry of a sequence's first key
  int32_t* lens;         // [sequences]
};

}  // namespace tessera::core
