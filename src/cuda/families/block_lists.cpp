#include "cuda/families/block_lists.hpp"

#include <algorithm>

#include "core/geometry.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

int64_t masks(const tessera_problem& problem) { return problem.block_mask.shape[0] * problem.block_mask.shape[1]; }

BlockListsParams params_of(const tessera_plan& plan, const BlockLists& lists, const tessera_buffers& buffers) {
  BlockListsParams p{};
  fill_problem_params(p, plan, buffers);
  p.lists = lists;
  p.batches = static_cast<int>(plan.problem.block_mask.shape[0]);
  p.heads = static_cast<int>(plan.problem.block_mask.shape[1]);
  return p;
}

// Queries or keys of a warpgroup's product. The size of a mask block must be a multiple of it.
constexpr int64_t kListedRows = 64;

}  // namespace

std::string refuse_block_lists(const tessera_problem& p) {
  if (!core::present(p.block_mask)) return "";
  if (core::packed_q(p) || core::packed_k(p) || core::paged(p) || core::present(p.seqused_k)) {
    return "block_mask: of packed, paged or partly used sequences";
  }
  if (core::present(p.causal_seqs)) return "block_mask: not taken beside causal_seqs";
  if (core::present(p.tree_mask)) return "block_mask: not taken beside tree_mask";
  if (p.mask_block_q % kListedRows != 0 || p.mask_block_k % kListedRows != 0) {
    return "block_mask: blocks of " + std::to_string(p.mask_block_q) + " x " + std::to_string(p.mask_block_k) +
           ", must be multiples of " + std::to_string(kListedRows);
  }
  return "";
}

int64_t lists_count(const tessera_problem& problem, const BlockLists& lists) {
  return std::max<int64_t>(masks(problem) * lists.tiles, 1);
}

BlockLists block_lists_of(const tessera_problem& problem, int64_t tiles, int64_t most) {
  const int64_t* shape = problem.block_mask.shape;
  BlockLists lists{};
  lists.tiles = static_cast<int>(tiles), lists.most = static_cast<int>(most);
  lists.head = shape[1] > 1 ? lists.tiles : 0;
  lists.batch = shape[0] > 1 ? static_cast<int>(shape[1]) * lists.tiles : 0;
  return lists;
}

int64_t block_lists_bytes(const tessera_problem& problem, const BlockLists& lists) {
  return lists_count(problem, lists) * lists.stride() * int64_t{sizeof(int)};
}

BlockLists list_blocks(const tessera_plan& plan, const BlockListsConfig& config, BlockLists lists,
                       const tessera_buffers& buffers, void* memory, LaunchList& launches,
                       const ListCounters& counters) {
  lists.words = static_cast<int*>(memory);
  BlockListsParams p = params_of(plan, lists, buffers);
  p.long_lists = counters.long_lists, p.tile_counter = counters.tile_counter;
  launch_block_lists(config, p, launches);
  return lists;
}

int64_t block_turns_bytes(const tessera_problem& problem, const BlockLists& lists) {
  return (lists_count(problem, lists) + masks(problem)) * lists.most * int64_t{sizeof(int)};
}

BlockTurns list_turns(const tessera_plan& plan, const BlockListsConfig& config, const BlockLists& lists,
                      const tessera_buffers& buffers, void* memory, LaunchList& launches) {
  BlockListsParams p = params_of(plan, lists, buffers);
  p.turns = {static_cast<int*>(memory), static_cast<int>(lists_count(plan.problem, lists)), lists.most};
  launch_bwd_sm90_turns(config, p, launches);
  return p.turns;
}

}  // namespace tessera::cuda
