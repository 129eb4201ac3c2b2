// The lists that kernels/tessera/block_lists makes of a block mask: their shape, their memory, their launch.
#pragma once

#include <string>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// Why kernels that walk lists do not take the problem's block mask; "": they do, or there is none.
std::string refuse_block_lists(const tessera_problem& problem);

// Of `tiles` tiles of rows, of at most `most` blocks each, for every batch entry and head that the mask tells apart. Without memory.
BlockLists block_lists_of(const tessera_problem& problem, int64_t tiles, int64_t most);

int64_t block_lists_bytes(const tessera_problem& problem, const BlockLists& lists);

// How many lists there are.
int64_t lists_count(const tessera_problem& problem, const BlockLists& lists);

// What the kernel also leaves for a scheduler: BlockListsParams has what these are.
struct ListCounters {
  int *long_lists, *tile_counter;
};

// The kernel joins the launches. `memory`: block_lists_bytes of it; the lists lie there.
BlockLists list_blocks(const tessera_plan& plan, const BlockListsConfig& config, BlockLists lists,
                       const tessera_buffers& buffers, void* memory, LaunchList& launches,
                       const ListCounters& counters = {});

// Deterministic, of transposed lists: likewise.
int64_t block_turns_bytes(const tessera_problem& problem, const BlockLists& lists);
BlockTurns list_turns(const tessera_plan& plan, const BlockListsConfig& config, const BlockLists& lists,
                      const tessera_buffers& buffers, void* memory, LaunchList& launches);

}  // namespace tessera::cuda
