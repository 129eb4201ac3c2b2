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

// The same for the order in which deterministic kernels add to dQ, made from transposed lists.
int64_t block_turns_bytes(const tessera_problem& problem, const BlockLists& lists);
BlockTurns list_turns(const tessera_plan& plan, const BlockListsConfig& config, const BlockLists& lists,
                      const tessera_buffers& buffers, void* memory, LaunchList& launches);

}  // namespace tessera::cuda
