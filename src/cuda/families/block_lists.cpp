#include "cuda/families/block_lists.hpp"

#include <algorithm>

#include "core/asking.hpp"
#include "core/geometry.hpp"
#include "core/score/cuda_text.hpp"
#include "core/score/facts.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/cluster_kernels.hpp"
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

// The queries, or the keys, of a plan's sequences.
struct Side {
  bool packed;
  int64_t batch, rows, longest;  // rows: of all sequences if packed, else of each; longest: of a sequence
  // Tiles of a sequence, or padded tile indices of the batch.
  int tiles(int64_t of_rows) const {
    return static_cast<int>(tiles_of(packed, batch, packed ? rows : longest, 1, of_rows));
  }
};

// Pairs of a tile and a block that are visible by causal and the window: for each tile the blocks that its rows see.
int64_t visible_blocks(const tessera_plan& plan, const ProgramListsConfig& config, const BlockLists& lists) {
  const double all = static_cast<double>(lists.tiles) * lists.most;
  const double edges = 3.0 * lists.tiles * (1 + config.rows / config.cols);
  return static_cast<int64_t>(std::min(all, all * visible_part(plan) + edges));
}

// The most entries of a program's lists if the problem does not say.
int64_t default_capacity(int64_t lists) {
  constexpr int64_t kBytes = int64_t{64} << 20, kEntriesOfList = 64;
  return std::max(kBytes / int64_t{sizeof(int)}, kEntriesOfList * lists);
}

}  // namespace

namespace {
bool find_lists_program(const tessera_plan& plan) {
  constexpr int64_t kLeastQueries = 128, kLeastKeys = 256;
  const tessera_problem& p = plan.problem;
  if (!core::score::has_program(plan)) return false;
  if (core::present(p.block_mask)) return true;
  // With batch_invariant the lengths of the other sequences may not decide which kernel serves one.
  const bool any_lengths = p.batch_invariant && varies_in_length(p);
  if (!any_lengths && (plan.max_seqlen_q < kLeastQueries || plan.max_seqlen_k < kLeastKeys)) return false;
  if (core::score::bind(plan).program().mask < 0) return false;
  // A mixed batch, or a shared prefix, is served by two kernels, which see different lengths.
  const bool one_kernel = plan.decode_queries == 0 && !is_part(plan);
  return one_kernel && plan.batch > 0 && !core::present(p.causal_seqs);
}
}  // namespace

bool lists_program(const tessera_plan& plan) {
  static thread_local core::Once<bool> once;
  return once(plan, find_lists_program);
}

ProgramListsConfig program_lists_config(const tessera_plan& plan, int rows, int cols, bool transposed, bool ordered) {
  ProgramListsConfig config{};
  config.rows = rows, config.cols = cols, config.transposed = transposed;
  config.varlen = varies_in_length(plan.problem), config.paged = core::paged(plan.problem);
  config.ordered = ordered && !config.varlen;
  const ScoreConfig score = score_config(plan);
  config.score.program = true, config.score.places = score.places, config.score.sequence_places = score.sequence_places;
  return config;
}

ProgramListsShape program_lists_of(const tessera_plan& plan, const ProgramListsConfig& config) {
  constexpr int64_t kMostWords = int64_t{1} << 30;
  using core::score::Op;
  const tessera_problem& p = plan.problem;
  const core::score::Bound bound = core::score::bind(plan);
  const core::score::InputSet inputs = core::score::facts_of(*bound.checked).mask_inputs;
  const core::score::MaskValues values = core::score::mask_values(bound.program());
  const bool of_batch = config.varlen || config.score.sequence_places || (inputs & input_bit(Op::kB)) != 0 ||
                        (core::present(p.block_mask) && p.block_mask.shape[0] > 1);
  const bool of_head = (inputs & (input_bit(Op::kH) | input_bit(Op::kHkv))) != 0 ||
                       (core::present(p.block_mask) && p.block_mask.shape[1] > 1);
  const core::Sizes size = core::sizes(p);
  const Side queries{core::packed_q(p), plan.batch, size.rows_q, plan.max_seqlen_q};
  const Side keys{core::packed_k(p), plan.batch, size.rows_k, plan.max_seqlen_k};
  const Side &rows = config.transposed ? keys : queries, &cols = config.transposed ? queries : keys;
  const int batches = of_batch ? static_cast<int>(plan.batch) : 1;
  ProgramListsShape shape{};
  shape.heads = of_head ? static_cast<int>(plan.heads_q) : 1;
  shape.row_masks = shape.heads * (rows.packed ? 1 : batches);
  shape.lists.tiles = rows.tiles(config.rows);
  shape.lists.most = static_cast<int>(divide_up(cols.longest, config.cols));
  shape.lists.head = shape.heads > 1 ? shape.lists.tiles : 0;
  shape.lists.batch = batches > 1 && !rows.packed ? shape.heads * shape.lists.tiles : 0;
  shape.column_masks = shape.heads * (cols.packed ? 1 : batches);
  shape.column_blocks = cols.tiles(config.cols);
  shape.column_groups = cols.tiles(config.cols * kBoundsGroup);
  const int64_t count = shape.count();
  const int64_t bounds = int64_t{shape.column_masks} * (shape.column_blocks + shape.column_groups);
  constexpr int64_t kBoundBytes = 8;
  shape.bounds_bytes =
      padded_to((config.transposed ? values.row : values.column) * kBoundBytes * bounds, kWorkspaceAlignment);
  const int64_t capacity = p.list_capacity > 0 ? p.list_capacity : default_capacity(count);
  // With batch_invariant every list has room: a list that other sequences left none would change the last bits.
  const int64_t pool = p.batch_invariant
                           ? count * shape.lists.most
                           : std::min(shape.row_masks * visible_blocks(plan, config, shape.lists), capacity);
  shape.words = std::min<int64_t>(program_pool_at(count) + pool, kMostWords);
  return shape;
}

std::string refuse_block_lists(const tessera_problem& p) {
  if (!core::present(p.block_mask)) return "";
  if (core::packed_q(p) || core::packed_k(p) || core::paged(p) || core::present(p.seqused_k)) {
    return "block_mask: of packed, paged or partly used sequences";
  }
  if (core::present(p.causal_seqs)) return "block_mask: not supported with causal_seqs";
  if (core::present(p.places)) return "block_mask: not supported with places";
  if (core::present(p.tree_mask)) return "block_mask: not supported with tree_mask";
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

BlockLists list_program(const tessera_plan& plan, const ProgramListsConfig& config, int words,
                        const tessera_buffers& buffers, void* memory, LaunchList& launches,
                        const ListCounters& counters) {
  const ProgramListsShape shape = program_lists_of(plan, config);
  ProgramListsParams p{};
  fill_problem_params(p, plan, buffers);
  p.lists = shape.lists;
  p.lists.words = memory ? reinterpret_cast<int*>(static_cast<char*>(memory) + shape.bounds_bytes) : nullptr;
  p.heads = shape.heads;
  p.column_masks = shape.column_masks, p.column_blocks = shape.column_blocks, p.column_groups = shape.column_groups;
  p.bounds = memory, p.end_word = words;
  p.long_lists = counters.long_lists, p.tile_counter = counters.tile_counter;
  launch_program_lists(config, p, shape.count(), launches);
  return p.lists;
}

int64_t dq_order_bytes(const tessera_problem& problem, const BlockLists& lists) {
  return block_lists_bytes(problem, lists) + masks(problem) * lists.most * int64_t{sizeof(int)};
}

DqOrder order_blocks(const tessera_plan& plan, const BlockListsConfig& config, const BlockLists& lists,
                     const tessera_buffers& buffers, LaunchList& launches) {
  DqOrderParams p{};
  fill_problem_params(p, plan, buffers);
  p.lists = lists;
  p.order.beside = lists_count(plan.problem, lists) * lists.stride();
  p.order.adders = lists.words ? lists.words + 2 * p.order.beside : nullptr;
  p.heads = static_cast<int>(plan.problem.block_mask.shape[1]);
  p.masks = static_cast<int>(masks(plan.problem)), p.blocks = lists.most;
  p.last_keys_first = last_keys_first(p);
  launch_dq_order({config.rows, config.cols, false, false}, p, launches);
  return p.order;
}

DqOrder order_program(const tessera_plan& plan, const ProgramListsConfig& config, int words, const BlockLists& lists,
                      const tessera_buffers& buffers, bool last_keys_first, LaunchList& launches) {
  const ProgramListsShape shape = program_lists_of(plan, config);
  DqOrderParams p{};
  fill_problem_params(p, plan, buffers);
  p.lists = lists;
  p.order.beside = words - program_pool_at(shape.count());
  p.heads = shape.heads;
  p.masks = shape.column_masks, p.blocks = shape.column_blocks;
  p.last_keys_first = last_keys_first;
  launch_dq_order({config.rows, config.cols, config.varlen, true}, p, launches);
  return p.order;
}

}  // namespace tessera::cuda
