// The keys of shared prefixes in chunks, for a kernel that has enough tiles only then: every group's queries against a chunk of its
// prefix are one sequence, and the chunks' results are merged with those of the sequences' own keys. There the query heads of a KV head are rows
// of one head, so that a tile of keys is multiplied by all of them at once.
//
// Of T queries, G groups and C chunks: rows [C, T, group] of KV heads. With one group a chunk is a sequence with all of these rows,
// so that the host knows every work tile and a static grid has one a multiprocessor; rows of no group are computed, too, and the
// merge leaves them out. With several the sequences are packed, [C, G, 2], of which the second ends the keys of the first and has
// the rows, if any, up to the next group's, and no keys.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

// 1: the prefixes are read as they are.
int64_t prefix_chunks(const tessera_plan& plan);

int64_t chunk_sequences(int64_t chunks, int64_t groups);

// Entries (rows of k, or pages) that a chunk's are a multiple of, where keys_an_entry keys are an entry.
int64_t chunk_unit(int64_t keys_an_entry);

// The problem of the prefixes' part (packed queries, a sequence a group) in chunks.
tessera_problem chunked(const tessera_problem& part, int64_t chunks, int64_t keys_an_entry);

// Of the workspace; all NULL without chunks.
struct ChunkMemory {
  char *q, *o;           // [C * T * group, Hkv, D or Dv]
  float *lse, *lse_low;  // [Hkv, C * T * group]
  int32_t* rows;         // [sequences + 1]: cu_seqlens_q; NULL with one group
  int32_t* keys;         // [sequences + 1]: the entry of a sequence's first key
  int32_t* lens;         // [sequences]
};

}  // namespace tessera::core
