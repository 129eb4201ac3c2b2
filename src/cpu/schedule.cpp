// The partition of a problem into tiles, items and splits, and the memory it needs. Every number here depends only on
// the problem and the machine, never on the number of threads, and so do the bits of a result.
#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "core/geometry.hpp"
#include "core/problem_view.hpp"
#include "core/score/bound.hpp"
#include "core/shared_prefix.hpp"
#include "core/steps.hpp"
#include "cpu/cpu.hpp"
#include "cpu/packed_keys.hpp"
#include "cpu/run.hpp"
#include "cpu/score/options.hpp"
#include "cpu/score/program_call.hpp"
#include "cpu/scratch.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {
namespace {

using core::divide_up;

// Items for each core, so that the last ones leave no core idle for long. A single core is never idle, and each item
// reads and packs its own K and V.
constexpr int64_t kItemsPerCore = 4;
// The fewest keys for which a split is worth its merge.
constexpr int64_t kMinSplitKeys = 512;
// The fewest keys of a part in decoding. Its partial results are then less than a hundredth of the keys and values that
// it reads, for as many rows as decoding supports.
constexpr int64_t kDecodePartKeys = 1024;
// The backward pass has one float32 dQ for each split, so it uses only as many splits as the cores need.
constexpr int64_t kMaxBackwardSplits = 16;
// Queries of one head that share a pass over keys and values: enough to make their conversion cheap.
constexpr int64_t kQueriesPerItem = 384, kQueriesPerItemAmx = 2048;
// Keys that AMX packs at a time: with their tiles of queries they stay in the L2 cache.
constexpr int32_t kBlockKeysAmx = 512;
// The least problems for AMX tiles if the device leaves the choice to the problem: query rows of a KV head's tiles,
// keys, and the sum of K's and V's head sizes. With 128 rows and keys, tiles reach 1.2 to 1.5 x the vectors' rate at D
// = 8 and 16, and 1.6 to 1.8 x at 24 and 32; with 512, 1.7 to 2.6 x (docs/lab/amx.md).
constexpr int64_t kAmxLeastRows = 128, kAmxLeastKeys = 128, kAmxLeastHeadDims = 16;
// Rows at this distance have their lines in the same set of the L1 cache.
constexpr int64_t kCollidingRows_bytes = 4096;
// Keys of a super-block of the backward pass, whose dK and dV should stay in the L2 cache together with the tiles that
// visit it.
constexpr int64_t kBackwardKeys = 384;
// With AMX, each visit of a tile of queries packs its Q and dO and unpacks its dQ, independently of the super-block's
// keys. Super-blocks are therefore long, but shorter if heads alone do not fill the cores, so that there are some to
// split.
constexpr int64_t kBackwardKeysAmx = 1024, kBackwardSplitKeysAmx = 512;
static_assert(kBlockKeysAmx <= kAmxMaxBlockKeys && kBackwardKeysAmx <= kAmxMaxBlockKeys);

// The most parts into which this number of keys is worth splitting.
int64_t most_forward_splits(int64_t keys) { return std::max<int64_t>(1, keys / kMinSplitKeys); }
int64_t most_decode_parts(int64_t keys) { return std::max<int64_t>(1, divide_up(keys, kDecodePartKeys)); }

int64_t rows_total(const tessera_plan& plan) { return core::rows_total(plan.problem); }

// Tiles of `per_tile` rows over the whole batch, with `factor` rows for each query; an upper bound when packed.
int64_t tiles_total(const tessera_plan& plan, int64_t per_tile, int64_t factor) {
  if (!core::packed_q(plan.problem)) return plan.batch * divide_up(plan.max_seqlen_q * factor, per_tile);
  return std::min(rows_total(plan) * factor / per_tile + plan.batch,
                  plan.batch * divide_up(plan.max_seqlen_q * factor, per_tile));
}

void configure_forward(tessera_plan& plan, const KernelTable& table, const AmxKernelTable* amx) {
  const tessera_problem& p = plan.problem;
  tessera_plan_step& step = step_of(plan);
  CpuStep& own = own_of(step);
  const bool copies = own.use_dot || p.q.dtype != TESSERA_FLOAT32 || core::paged(p) || rows_collide(plan);
  step.block_n = amx ? kBlockKeysAmx : own.use_dot ? 256 : 128;  // a tile of P must stay in the L1 cache
  own.tiles_per_item =
      static_cast<int32_t>(std::max<int64_t>(1, (amx ? kQueriesPerItemAmx : kQueriesPerItem) / step.block_m));
  const int64_t registers = program_floats(plan, step.block_m / table.lanes, table.lanes);
  const auto scratch_bytes = [&] {
    if (amx) {
      return carve_amx_forward(nullptr, {step.block_n, own.tiles_per_item, plan.head_dim, plan.head_dim_v,
                                         asks_for_options(p) ? kScoreTiles : 0, amx->tile_bytes})
          .bytes;
    }
    return carve_forward(nullptr,
                         {step.block_m, step.block_n, own.tiles_per_item, plan.head_dim, plan.head_dim_v, table.lanes,
                          copies, asks_for_options(p) ? kScoreTiles : 0, registers, table.tile_bytes})
        .bytes;
  };
  while (scratch_bytes() > (amx ? kMaxScratchAmx_bytes : kMaxScratch_bytes)) {
    if (own.tiles_per_item > 2)
      own.tiles_per_item /= 2;
    else if (step.block_n > (amx ? kAmxJobKeys : 32))
      step.block_n /= 2;
    else if (own.tiles_per_item > 1)
      own.tiles_per_item = 1;
    else
      break;
  }
  const int64_t group = group_size(plan);
  const bool pack = way_of(plan, plan.max_seqlen_q) == kPackedTile;
  const int64_t heads = pack ? plan.heads_kv : plan.heads_q;
  const auto items = [&] {
    return heads * tiles_total(plan, int64_t{step.block_m} * own.tiles_per_item, pack ? group : 1);
  };
  const int64_t cores = plan.device.cores, needed = cores == 1 ? 1 : kItemsPerCore * cores;
  while (own.tiles_per_item > 1 && items() < needed) own.tiles_per_item = (own.tiles_per_item + 1) / 2;
  step.num_splits = 1;
  if (items() < 2 * cores && !p.batch_invariant) {
    step.num_splits = static_cast<int32_t>(std::clamp<int64_t>(divide_up(needed, std::max<int64_t>(1, items())), 1,
                                                               most_forward_splits(plan.max_seqlen_k)));
  }
  step.num_items = items() * step.num_splits;
  plan.scratch_bytes = scratch_bytes();
}

// Whether equal items leave at most a seventh of the cores' time unused.
bool fills_cores(int64_t items, int64_t cores) {
  return items == 0 || items * 7 >= divide_up(items, cores) * cores * 6;
}

void configure_backward(tessera_plan& plan, const KernelTable& table, const AmxKernelTable* amx) {
  const tessera_problem& p = plan.problem;
  tessera_plan_step& step = step_of(plan);
  CpuStep& own = own_of(step);
  const int64_t option_tiles = asks_for_options(p) || core::present(p.d_bias) ? kScoreTiles + 2 : 0;
  const int64_t registers = program_floats(plan, step.block_m / table.lanes, table.lanes);
  const BackwardOwners owners = backward_owners(plan);
  const bool splits = !fills_cores(owners.count, plan.device.cores);
  step.block_n = static_cast<int32_t>(!amx ? kBackwardKeys : splits ? kBackwardSplitKeysAmx : kBackwardKeysAmx);
  const auto scratch_bytes = [&] {
    if (amx) {
      return carve_amx_backward(nullptr, {step.block_n, plan.head_dim, plan.head_dim_v, option_tiles, amx->tile_bytes})
          .bytes;
    }
    return carve_backward(nullptr, {step.block_m, step.block_n, plan.head_dim, plan.head_dim_v, table.lanes,
                                    own.use_dot != 0, option_tiles, registers, table.tile_bytes})
        .bytes;
  };
  const int32_t keys_a_step = static_cast<int32_t>(amx ? kAmxJobKeys : kKeyBlock);
  const int64_t most_bytes = amx ? kMaxScratchAmx_bytes : kMaxScratch_bytes;
  while (step.block_n > keys_a_step && scratch_bytes() > most_bytes) step.block_n -= keys_a_step;
  if (amx) {  // super-blocks of equal length
    const int64_t keys = std::max<int64_t>(1, plan.max_seqlen_k), blocks = divide_up(keys, step.block_n);
    step.block_n = static_cast<int32_t>(padded_to(divide_up(keys, blocks), keys_a_step));
  }
  own.tiles_per_item = 1;
  const int64_t most = std::min(kMaxBackwardSplits, divide_up(plan.max_seqlen_k, step.block_n));
  step.num_splits = 1;
  while (step.num_splits < most && !fills_cores(owners.count * step.num_splits, plan.device.cores)) ++step.num_splits;
  step.num_items = owners.count * step.num_splits;
  plan.scratch_bytes = scratch_bytes();
}

// Whether the device has vectors beside AMX tiles, or only vectors.
bool has_vectors(const tessera_plan& plan) {
  return plan.device.isa != TESSERA_ISA_AMX_BF16 || plan.device.vector_isa != 0;
}

// The first score option of the problem that AMX's stages lack; "": they have all of them.
template <class... Option>
std::string lacks_for_amx(OptionList<Option...>, const tessera_problem& problem) {
  const char* lacks = "";
  const auto look = [&]<class One>() {
    if (!InAmxStages<One> && One::asked(problem)) lacks = One::kName;
  };
  (look.template operator()<Option>(), ...);
  return lacks;
}
// Why AMX's tiles without vectors beside them cannot serve the plan; "": they can, or there are vectors.
std::string refuse_without_vectors(const tessera_plan& plan) {
  const std::string lacks = has_vectors(plan) ? "" : lacks_for_amx(ScoreOptions{}, plan.problem);
  return lacks.empty() ? "" : lacks + ": not by AMX's tiles";
}

// Uses the vectors if the plan's device has them beside AMX tiles and the tiles do not serve the plan.
void settle_isa(tessera_plan& plan) {
  if (plan.device.isa == TESSERA_ISA_AMX_BF16 && plan.device.vector_isa != 0 && !refuse_tiles(plan).empty()) {
    plan.device.isa = plan.device.vector_isa;
  }
}

}  // namespace

int64_t group_size(const tessera_plan& plan) { return plan.heads_q / std::max<int64_t>(1, plan.heads_kv); }

std::string refuse_tiles(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const bool few_rows = plan.kernel == TESSERA_KERNEL_DECODE;
  const bool decodes_codes = few_rows && has_codes_for_bfloat16(p) && can_multiply_codes();
  if (!is_bfloat16(p) && !decodes_codes) return "they support bfloat16";
  if (const std::string lacks = lacks_for_amx(ScoreOptions{}, p); !lacks.empty()) return lacks + ": not supported";
  const auto at_least = [](const char* what, int64_t given, int64_t least) {
    return given >= least ? std::string()
                          : std::string(what) + std::to_string(given) + ", from " + std::to_string(least) + " on";
  };
  std::string reason = at_least("head sizes of K and V together ", plan.head_dim + plan.head_dim_v, kAmxLeastHeadDims);
  if (!reason.empty() || few_rows || p.batch_invariant) return reason;  // lengths depend on the batch
  const bool pack = p.direction == TESSERA_FORWARD && plan.max_seqlen_q < kAmxBlockM;
  const int64_t group = group_size(plan);
  reason = at_least("query rows ", plan.max_seqlen_q * (pack ? group : 1), kAmxLeastRows);
  return reason.empty() ? at_least("keys ", plan.max_seqlen_k, kAmxLeastKeys) : reason;
}

bool rows_collide(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (p.q.dtype != TESSERA_FLOAT32 || p.direction == TESSERA_BACKWARD || core::paged(p)) return false;
  const auto collide = [](const tessera_layout& layout) {
    return core::row_strides(layout).row * static_cast<int64_t>(sizeof(float)) % kCollidingRows_bytes == 0;
  };
  return collide(p.k) || collide(p.v);
}

Way way_of(const tessera_plan& plan, int64_t sq) {
  if (plan.problem.direction == TESSERA_BACKWARD) return kTile;
  if (sq <= plan.decode_queries) return kDecode;
  return plan.heads_q > plan.heads_kv && sq < step_of(plan).block_m ? kPackedTile : kTile;
}

KeySplits key_splits(const tessera_plan& plan, int64_t longest) {
  const auto most =
      plan.problem.direction == TESSERA_BACKWARD ? step_of(plan).num_splits : most_forward_splits(longest);
  const int32_t count = static_cast<int32_t>(std::min<int64_t>(step_of(plan).num_splits, most));
  return {count, padded_to(divide_up(std::max<int64_t>(1, longest), count), step_of(plan).block_n)};
}

bool accumulates_in_place(const tessera_plan& plan) {
  return step_of(plan).num_splits == 1 && plan.problem.q.dtype == TESSERA_FLOAT32 && !plan.problem.accumulate &&
         plan.head_dim % kernel_table(plan.device.isa).lanes == 0;
}

BackwardOwners backward_owners(const tessera_plan& plan) {
  BackwardOwners owners{1, 1, 0};
  const tessera_layout& d_bias = plan.problem.d_bias;
  if (core::present(d_bias)) {
    if (d_bias.shape[0] == 1) owners.batch = std::max<int64_t>(1, plan.batch);
    if (d_bias.shape[1] == 1) owners.heads = std::max<int64_t>(1, plan.heads_kv);
  }
  owners.count = plan.batch / owners.batch * (plan.heads_kv / owners.heads);
  return owners;
}

SharedMemory carve_shared(char* base, const tessera_plan& plan) {
  Carver carver(base);
  SharedMemory shared{};
  const int64_t rows = plan.heads_q * rows_total(plan);
  for (int way = 0; way < kWays; ++way) {
    const bool forward_only = way != kTile;
    if (forward_only && plan.problem.direction == TESSERA_BACKWARD) continue;
    shared.sequences[way] = carver.take<Sequence>(plan.batch + 1);
  }
  if (plan.problem.direction == TESSERA_BACKWARD) {
    shared.row_shift = carver.take(rows);
    shared.row_lse = carver.take(rows);
    shared.row_delta = carver.take(rows);
    const int64_t ld = padded_to(plan.head_dim, kernel_table(plan.device.isa).lanes);
    if (!accumulates_in_place(plan)) shared.acc_dq = carver.take(step_of(plan).num_splits * rows * ld);
    if (core::score::has_program(plan)) {
      const ProgramCall program(plan);
      shared.program_sums = carver.take<double>(program.chains(plan) * program.sums());
    }
  } else {
    const bool partial = step_of(plan).num_splits > 1 || plan.problem.accumulate;
    const int64_t tiled = partial && plan.kernel == TESSERA_KERNEL_TILED ? step_of(plan).num_splits * rows : 0;
    shared.partial_o = carver.take(tiled * plan.head_dim_v);
    shared.partial_lse = carver.take(tiled);
    shared.partial_lse_low = carver.take(tiled);
    const int64_t decoded =
        plan.decode_queries > 0 ? own_of(decode_step_of(plan)).parts * plan.heads_q * plan.decode_queries : 0;
    shared.decode_o = carver.take(decoded * plan.head_dim_v);
    shared.decode_lse = carver.take(decoded);
    shared.decode_lse_low = carver.take(decoded);
    shared.packed_keys = carver.take<char>(packed_keys_bytes(plan));
  }
  shared.bytes = carver.used_bytes();
  return shared;
}

std::string refuse_tiled(const tessera_plan& plan) {
  if (core::shares_prefixes(plan.problem)) return "prefix_groups: not supported";
  if (std::string refused = refuse_without_vectors(plan); !refused.empty()) return refused;
  return plan.problem.q.dtype == TESSERA_FLOAT64 ? "float64: computes in float32" : "";
}

// ---- decode ----

namespace {

constexpr int64_t kMaxDecodeScratch_bytes = 512 << 10;

int64_t decode_scratch_bytes(const tessera_plan& plan, int64_t heads) {
  const KernelTable& table = decode_table(plan);
  DecodeShape shape{heads,
                    table.decode_rows,
                    table.decode_keys,
                    plan.head_dim,
                    plan.head_dim_v,
                    table.lanes,
                    program_floats(plan, 1, table.lanes),
                    table.decode_row_bytes};
  const AmxKernelTable* amx = amx_decoder(plan);
  if (!amx) return carve_decode(nullptr, shape).bytes;
  shape.block_n = amx->decode_keys, shape.row_bytes = amx->decode_row_bytes;
  return carve_amx_decode(nullptr, shape).bytes;
}

// The names of the score options that decoding lacks; "": the problem has none of them.
template <class... Option>
std::string lacks_for_decoding(OptionList<Option...>, const tessera_problem& problem) {
  if (Dropout::asked(problem)) return "dropout: for training";
  std::vector<const char*> names;
  bool asked = false;
  const auto look = [&]<class One>() {
    if (HasLanes<One, KeyLanes> || std::is_same_v<One, Dropout>) return;
    names.push_back(One::kName);
    asked |= One::asked(problem);
  };
  (look.template operator()<Option>(), ...);
  if (!asked) return "";
  std::string all = names.front();
  for (size_t n = 1; n < names.size(); ++n) all += std::string(n + 1 < names.size() ? ", " : " or ") + names[n];
  return all + " present";
}

// Why no sequence of this plan is decoded, however few its rows; "": decoding is possible.
std::string refuse_decoding(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (p.direction == TESSERA_BACKWARD) return "forward only";
  if (core::shares_prefixes(p)) return "prefix_groups: not supported";
  if (std::string refused = refuse_without_vectors(plan); !refused.empty()) return refused;
  if (p.q.dtype == TESSERA_FLOAT64) return "float64: computes in float32";
  return lacks_for_decoding(ScoreOptions{}, p);
}

// The most queries of a sequence that decoding supports.
int64_t most_decode_queries(const tessera_plan& plan) { return decode_table(plan).decode_rows / group_size(plan); }

// The number of parts of the keys of one KV head's pass that keeps the cores busy.
int64_t needed_decode_parts(const tessera_plan& plan) {
  const int64_t passes = std::max<int64_t>(1, plan.heads_kv / own_of(decode_step_of(plan)).tiles_per_item);
  return divide_up(2 * kItemsPerCore * plan.device.cores, passes);
}

// Appends the step that decodes the sequences of at most `queries` queries.
tessera_plan_step& configure_decoding(tessera_plan& plan, int64_t queries) {
  const tessera_problem& p = plan.problem;
  plan.decode_queries = static_cast<int32_t>(queries);
  tessera_plan_step& step = core::add_step(plan, *find_kernel("decode"));
  CpuStep& own = own_of(step);
  step.most_queries = plan.decode_queries;
  step.block_m = static_cast<int32_t>(plan.decode_queries * group_size(plan));
  step.block_n = decode_keys(plan);
  own.use_dot = amx_decoder(plan) || (decode_table(plan).has_dot && is_bfloat16(p));
  // All KV heads at once if a key's heads are adjacent in memory, else one at a time.
  const core::RowStrides k = core::row_strides(p.k);
  int64_t heads = k.head < k.row ? plan.heads_kv : 1;
  while (heads > 1 && (plan.heads_kv % heads != 0 || decode_scratch_bytes(plan, heads) > kMaxDecodeScratch_bytes))
    --heads;
  own.tiles_per_item = static_cast<int32_t>(std::max<int64_t>(1, heads));
  const int64_t most_parts = most_decode_parts(plan.max_seqlen_k);
  int64_t most = plan.batch * most_parts;
  if (core::packed_k(p)) most = std::min(most, plan.batch + core::sizes(p).rows_k / kDecodePartKeys);
  const int64_t needed = needed_decode_parts(plan);
  own.parts = p.batch_invariant ? most : std::min(most, plan.batch + needed);
  step.num_splits = static_cast<int32_t>(p.batch_invariant ? most_parts : std::min(most_parts, needed));
  step.num_items = plan.heads_kv / own.tiles_per_item * own.parts;
  plan.scratch_bytes = std::max(plan.scratch_bytes, decode_scratch_bytes(plan, own.tiles_per_item));
  return step;
}

}  // namespace

int32_t decode_keys(const tessera_plan& plan) {
  const AmxKernelTable* amx = amx_decoder(plan);
  return amx ? amx->decode_keys : decode_table(plan).decode_keys;
}

int64_t decode_parts(const tessera_plan& plan, int64_t sk, int64_t keys) {
  const int64_t part_keys = plan.problem.batch_invariant ? 0 : divide_up(keys, needed_decode_parts(plan));
  return std::max<int64_t>(1, divide_up(sk, std::max(kDecodePartKeys, part_keys)));
}

std::string refuse_decode(const tessera_plan& plan) {
  if (std::string refused = refuse_decoding(plan); !refused.empty()) return refused;
  if (plan.max_seqlen_q <= most_decode_queries(plan)) return "";
  return "query rows a KV head: " + std::to_string(plan.max_seqlen_q * group_size(plan)) + ", supports at most " +
         std::to_string(decode_table(plan).decode_rows);
}

void configure_decode(tessera_plan& plan) {
  settle_isa(plan);
  configure_decoding(plan, std::max<int64_t>(1, plan.max_seqlen_q));
  step_of(plan).workspace_bytes = carve_shared(nullptr, plan).bytes;
}

void configure_tiled(tessera_plan& plan) {
  settle_isa(plan);
  const KernelTable& table = kernel_table(plan.device.isa);
  const AmxKernelTable* amx = amx_kernels(plan);
  tessera_plan_step& step = core::add_step(plan, *find_kernel("tiled"));
  own_of(step).use_dot = table.has_dot && is_bfloat16(plan.problem);
  step.block_m = amx ? amx->block_m : table.block_m;
  plan.problem.direction == TESSERA_BACKWARD ? configure_backward(plan, table, amx)
                                             : configure_forward(plan, table, amx);
  // With packed queries, some sequences may have few.
  const int64_t queries = std::min(plan.max_seqlen_q, most_decode_queries(plan));
  const bool mixed = core::packed_q(plan.problem) && core::asked_family(plan.device).empty() && queries > 0;
  if (mixed && refuse_decoding(plan).empty()) {
    step.sequences = TESSERA_STEP_MANY_QUERIES;
    configure_decoding(plan, queries).sequences = TESSERA_STEP_FEW_QUERIES;
  }
  step.workspace_bytes = carve_shared(nullptr, plan).bytes;
}

}  // namespace tessera::cpu
