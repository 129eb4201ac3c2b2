// Block lists that kernels/tessera/block_lists builds from a block mask: their shape, memory and launch.
#pragma once

#include <string>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// Why the kernels that read block lists do not support the problem's block mask; "" if they do, or if there is none.
std::string refuse_block_lists(const tessera_problem& problem);

// The shape of the lists, without memory: `tiles` tiles of rows with at most `most` blocks each, for every batch entry
// and head that has a mask of its own.
BlockLists block_lists_of(const tessera_problem& problem, int64_t tiles, int64_t most);

int64_t block_lists_bytes(const tessera_problem& problem, const BlockLists& lists);

// ---- lists of a score program's mask, which kernels/tessera/block_lists/program_lists makes for every call ----

// Whether a kernel that reads block lists gets such lists: the program has a mask, or a block mask is beside it; there
// are enough blocks of keys to skip some; and no two kernels share the sequences.
bool lists_program(const tessera_plan& plan);

// The part of the blocks that a program's lists leave, for estimates: only the data tell.
inline double listed_part(bool listed) { return listed ? 0.5 : 1.0; }

// The shape of the lists, and their memory: what the columns' bounds take, then the lists' heads and their pool.
struct ProgramListsShape {
  BlockLists lists;  // without memory
  int heads;         // that have lists of their own
  int row_masks;     // of lists.tiles lists each; this and the following: ProgramListsParams
  int column_masks, column_blocks, column_groups;
  int64_t bounds_bytes;
  int64_t words;  // of the heads and the pool
  int count() const { return row_masks * lists.tiles; }
  int64_t bytes() const { return bounds_bytes + words * int64_t{sizeof(int)}; }
  // Of the order of deterministic additions, stored after the lists: a place for each entry of the pool.
  int64_t order_bytes() const { return (words - program_pool_at(count())) * int64_t{sizeof(int)}; }
};
// Tiles of `rows` rows and blocks of `cols` columns: queries and keys, or transposed keys and queries.
// ordered: of dense sequences, the tiles are ordered by the lengths of their lists.
ProgramListsConfig program_lists_config(const tessera_plan& plan, int rows, int cols, bool transposed,
                                        bool ordered = false);
ProgramListsShape program_lists_of(const tessera_plan& plan, const ProgramListsConfig& config);

// The number of lists.
int64_t lists_count(const tessera_problem& problem, const BlockLists& lists);

// Counters that the kernel also writes, for a scheduler; see BlockListsParams.
struct ListCounters {
  int *long_lists, *tile_counter;
};

// Adds the kernel to the launches. The lists are stored in `memory`, which holds block_lists_bytes bytes.
BlockLists list_blocks(const tessera_plan& plan, const BlockListsConfig& config, BlockLists lists,
                       const tessera_buffers& buffers, void* memory, LaunchList& launches,
                       const ListCounters& counters = {});

// Adds the kernels that make a program's lists. `words`: ProgramListsShape::words of when the plan was made; `memory`
// holds its bytes().
BlockLists list_program(const tessera_plan& plan, const ProgramListsConfig& config, int words,
                        const tessera_buffers& buffers, void* memory, LaunchList& launches,
                        const ListCounters& counters = {});

// The order in which deterministic kernels add to dQ, made from a block mask's transposed lists. It is stored after the
// lists.
int64_t dq_order_bytes(const tessera_problem& problem, const BlockLists& lists);
DqOrder order_blocks(const tessera_plan& plan, const BlockListsConfig& config, const BlockLists& lists,
                     const tessera_buffers& buffers, LaunchList& launches);
// The same of a program's lists; its memory has ProgramListsShape::order_bytes more. last_keys_first: the main kernel's
// blocks start with the last keys.
DqOrder order_program(const tessera_plan& plan, const ProgramListsConfig& config, int words, const BlockLists& lists,
                      const tessera_buffers& buffers, bool last_keys_first, LaunchList& launches);

}  // namespace tessera::cuda
