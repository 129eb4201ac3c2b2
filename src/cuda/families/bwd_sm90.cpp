// The backward kernels of kernels/tessera/bwd_sm90, bwd_sm90_d256 and bwd_sm90_d512: the problems they support, their
// tiles and launches. The compiled configs of the latter two are in files of their own. Every number depends only on
// the problem and the GPU.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include "core/geometry.hpp"
#include "core/score/bound.hpp"
#include "core/score/facts.hpp"
#include "core/status.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/backward.hpp"
#include "cuda/families/block_lists.hpp"
#include "cuda/families/bwd_sm90_tiles.hpp"
#include "cuda/families/cluster_kernels.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "cuda/score_program.hpp"
#include "cuda/work_order.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

constexpr int kMostHeadDimOfK = 192;  // for Q and K only

constexpr int kStoredRows = 16;  // rows of dK and dV that a warp stores

// The decisions for a problem.
struct BwdSm90Plan {
  bool pair, quad;
  union {                  // the config of the kernel that serves the problem:
    BwdSm90Config config;  // one block without a cluster
    BwdSm90D256Config pair_config;
    BwdSm90D512Config quad_config;
  };
  BwdSm90RowsConfig rows;
  int q_tiles, q_slots;  // see BwdParams
  Divisor key_tiles, section_heads;
  int heads, rotation, group_splits;
  int program_words;  // of the lists, if they are a score program's
  Grid before, products, after;
  BwdWorkspace workspace;
  int64_t d_k_parts, d_v_parts;  // the split group's partial gradients, in the workspace
  BlockLists lists;              // lists of a block mask, stored after `workspace`
};

int64_t largest_head_dim(const tessera_plan& plan) { return std::max(plan.head_dim, plan.head_dim_v); }
// Whether one block serves the problem; otherwise pairs of blocks do. Above head size 128 of Q and K, shared memory has
// no room for the two dQ tiles that deterministic problems need, and registers have none for a softcap's slope, nor for
// any option or packed sequences in float16, whose code needs a few more.
bool by_block(const tessera_plan& plan) {
  if (plan.head_dim_v > kBwdSm90HeadDim || plan.head_dim > kMostHeadDimOfK) return false;
  if (plan.head_dim <= kBwdSm90HeadDim) return true;
  const tessera_problem& p = plan.problem;
  return !p.deterministic && p.softcap <= 0 &&
         (p.q.dtype != TESSERA_FLOAT16 || !(score_config(plan).any() || varies_in_length(p)));
}
bool by_pairs(const tessera_plan& plan) { return !by_block(plan); }
bool by_quads(const tessera_plan& plan) { return largest_head_dim(plan) > kBwdSm90D256HeadDim; }

// Whether a program costs registers for each score of a step, or has gradients that are sums along diagonals, of 64
// queries. One whose score is affine in the one before, without a mask, is an addition to the product, as ALiBi is.
bool program_has_registers(const tessera_plan& plan) {
  if (!score_config(plan).program) return false;
  const CapturedSums sums = captured_sums(plan);
  return sums.pairs || sums.diagonals || !core::score::facts_of(*core::score::bind(plan).checked).affine;
}

std::optional<BwdSm90Tile> tile_of(const tessera_plan& plan) {
  const ScoreConfig score = score_config(plan);  // with block lists, a step has 64 queries as well
  const bool options =
      score.softcap || program_has_registers(plan) || score.entries() || (score.dropout && plan.problem.deterministic);
  return find_bwd_sm90_tile(largest_head_dim(plan), options);
}

// The form in which a block has a head (whole_head.cuh): short dense heads that fill the GPU about twice, without what
// it has no code or no registers for (float16). A forced tile is one of the other form.
bool by_whole_heads(const tessera_plan& plan) {
  constexpr int64_t kHeadDim = 64, kRounds = 2;
  const tessera_problem& p = plan.problem;
  const ScoreConfig score = score_config(plan);
  return p.q.dtype == TESSERA_BFLOAT16 && largest_head_dim(plan) <= kHeadDim &&
         std::max(plan.max_seqlen_q, plan.max_seqlen_k) <= kBwdWholeHeadRows && !varies_in_length(p) &&
         plan.heads_q == plan.heads_kv && plan.batch * plan.heads_q >= kRounds * plan.device.cores && !score.any() &&
         !core::present(p.places) && !core::present(p.block_mask) && !core::present(p.d_bias) &&
         !core::present(p.d_sink) && !writes_sums(p) && environment_variable(kForcedBackwardTile).empty();
}

BwdSm90Config make_config(const tessera_plan& plan, const BwdSm90Tile& tile) {
  BwdSm90Config config{};
  config.dtype = static_cast<Dtype>(plan.problem.q.dtype);
  tile.apply(config);
  const tessera_problem& p = plan.problem;
  config.window = p.window_left >= 0;
  config.varlen = varies_in_length(p);
  config.deterministic = p.deterministic != 0;
  config.d_bias = core::present(p.d_bias);
  const CapturedSums sums = captured_sums(plan);
  config.d_captured = sums.pairs;
  config.d_factor = sums.products;
  config.d_diagonal = sums.diagonals;
  config.sums = writes_sums(p);
  config.score = score_config_beside_block_mask(plan);
  config.block_mask = core::present(p.block_mask);
  config.block_mask = config.block_mask || lists_program(plan);
  if (config.block_mask) config.alternate = false;  // a warpgroup skips what is hidden from its keys
  // The code for variable lengths fits its registers; that for dense sequences is short of two, or of sixteen.
  if (config.score.softcap && config.dtype == Dtype::kFloat16) config.varlen = true;
  if (config.score.mask && config.head_dim > kBwdSm90HeadDim) config.varlen = true;
  if (by_whole_heads(plan)) {  // whose sums always have one order
    config.whole_head = true;
    config.block_m = 128, config.stages = 2, config.ds_stages = 1;
    config.alternate = config.staged_dq = config.deterministic = false;
  }
  return config;
}

BlockShape shape_of(const BwdSm90Plan& own) {
  if (own.quad) return cuda::shape_of(own.quad_config);
  if (own.pair) return cuda::shape_of(own.pair_config);
  const BwdSm90Config& c = own.config;
  return {.head_dim = c.head_dim,
          .block_m = c.block_m,
          .block_n = c.block_n,
          .key_box_rows = c.block_n,
          .cluster = 1,
          .threads = bwd_sm90_threads(c),
          .stages = c.stages,
          .smem_bytes = static_cast<int>(smem_bytes(c))};
}
BwdSm90Plan configs_of(const tessera_plan& plan) {
  BwdSm90Plan own{};
  own.quad = by_quads(plan);
  own.pair = by_pairs(plan) && !own.quad;
  if (own.quad) {
    own.quad_config = kBwdSm90D512.configure(plan);
  } else if (own.pair) {
    own.pair_config = kBwdSm90D256.configure(plan);
  } else {
    own.config = make_config(plan, *tile_of(plan));
  }
  return own;
}

bool by_whole_heads(const BwdSm90Plan& own) { return !own.pair && !own.quad && own.config.whole_head; }
bool lists_are_programs(const BwdSm90Plan& own) {
  if (own.quad) return false;
  return own.pair ? own.pair_config.program_lists() : own.config.program_lists();
}
ProgramListsConfig listed_blocks(const tessera_plan& plan, const BlockShape& shape) {
  return program_lists_config(plan, shape.block_n, shape.block_m, true, plan.problem.deterministic == 0);
}

struct Tiles {
  int64_t q_tiles, q_slots, key_tiles, heads;
  int64_t blocks() const { return key_tiles * heads; }
};
Tiles tiles_of(const tessera_plan& plan, const BlockShape& shape) {
  const core::Sizes size = core::sizes(plan.problem);
  const bool packed_q = core::packed_q(plan.problem), packed_k = core::packed_k(plan.problem);
  Tiles tiles{};
  tiles.q_tiles = cuda::tiles_of(packed_q, plan.batch, size.rows_q, 1, shape.block_m);
  tiles.q_slots = packed_q ? tiles.q_tiles : tiles.q_tiles * plan.batch;
  tiles.key_tiles = cuda::tiles_of(packed_k, plan.batch, size.rows_k, 1, shape.block_n);
  tiles.heads = packed_k ? plan.heads_kv : plan.heads_kv * plan.batch;
  return tiles;
}

// The number of heads that form a section, in which blocks are scheduled with the longest first (LPT order). A
// section's Q, dO and float32 dQ fit a part of the L2 cache, a smaller one where heads are short, which is 2 to 4 %
// faster (docs/lab/bwd_forms.md). If the blocks fill the GPU only a few times, all heads form one section,
// because a long block that starts late would end long after the others. If all blocks cost the same, or only the GPU
// knows which are long, each head is a section.
int64_t section_heads(const tessera_plan& plan, const BlockShape& shape, const Tiles& tiles, int group_splits,
                      bool ordered) {
  constexpr int64_t kSectionBytes = 24'000'000, kShortSectionBytes = 4'000'000, kShortRows = 512;
  constexpr int64_t kElementBytes = 2 + 2 + 4, kFewRounds = 3;
  if (!ordered && (!is_causal(plan.problem) || core::packed_k(plan.problem))) return 1;
  if (tiles.blocks() * shape.cluster <= kFewRounds * plan.device.cores) return tiles.heads;
  const int64_t head_bytes =
      plan.max_seqlen_q * shape.head_dim * kElementBytes * (plan.heads_q / plan.heads_kv / group_splits);
  if (ordered) {  // sections of one size: a last one of few heads would end with few blocks
    constexpr int64_t kOrderedBytes = 36'000'000;
    const int64_t fit = std::max<int64_t>(1, kOrderedBytes / std::max<int64_t>(1, head_bytes));
    return divide_up(tiles.heads, divide_up(tiles.heads, fit));
  }
  const int64_t section_bytes = plan.max_seqlen_q <= kShortRows ? kShortSectionBytes : kSectionBytes;
  return std::clamp<int64_t>(section_bytes / std::max<int64_t>(1, head_bytes), 1, tiles.heads);
}

// Deterministic: the number of query tiles by which each block starts after the previous one, cyclically. The blocks of
// a head then wait for each other in a circle, so all of them must be resident. They may use at most half of the
// multiprocessors, so that if two such kernels run at the same time, each with some of a head's blocks, one of them
// still has enough.
int64_t rotation(const tessera_plan& plan, const BwdSm90Plan& own, const Tiles& tiles, int cluster) {
  const tessera_problem& p = plan.problem;
  const bool every_block_sees_every_query = !is_causal(p) && p.window_left < 0 && p.window_right < 0 &&
                                            !core::packed_q(p) && !core::packed_k(p) && !core::present(p.seqused_k) &&
                                            !core::present(p.block_mask) && !lists_are_programs(own);
  if (!p.deterministic || !every_block_sees_every_query || tiles.key_tiles * cluster > plan.device.cores / 2) {
    return 0;
  }
  const int64_t per_block = (tiles.q_tiles + tiles.key_tiles - 1) / tiles.key_tiles;
  return (tiles.key_tiles - 1) * per_block < tiles.q_tiles ? per_block : 0;  // each block begins with a different tile
}

constexpr Supports kSupports{.direction = TESSERA_BACKWARD,
                             .oldest_arch = kHopper,
                             .newest_arch = kHopper,  // wgmma exists only on this architecture
                             .dtypes = kHalfPrecision,
                             .head_dim = kBwdSm90D512HeadDim,
                             .tensors = kAllTensors & ~kServingTensors,
                             .partials = true,
                             .programs = true};

// At launch; afterwards the producer has 24, the score warps 208, the dQ warps 72.
constexpr Limits kLimits{.registers = 128};
constexpr PrebuiltRow kPrebuilt[] = {
    {Use::kTraining, 64, kLimits},  {Use::kTraining, 96, kLimits},  {Use::kTraining, 128, kLimits},
    {Use::kTraining, 192, kLimits}, {Use::kTraining, 256, kLimits},
};

// The slope of the softcap is computed from P in float16, whose rounding moves the tanh by 2^-11 / softcap. From the
// least softcap on, this costs dS no more than dS's own rounding (2^-11 in float16, 2^-8 in bfloat16). The slope also
// depends on the LSE in one float, which the softcap bounds: above kLargestSoftcap, far rows
// (attention/backward/rows.cuh) would need the second float as well.
constexpr double kLargestSoftcap = 4096;
std::string refuse_softcap(const tessera_problem& p) {
  const bool float16 = p.q.dtype == TESSERA_FLOAT16;
  if (p.softcap > kLargestSoftcap) return "softcap: above 4096, and its slope is made of an LSE rounded";
  if (p.softcap <= 0 || p.softcap >= (float16 ? 2.0 : 0.25)) return "";
  return std::string("softcap: below ") + (float16 ? "2" : "0.25") + ", and its slope is made of P rounded";
}

// A gradient that is made of pairs is a sum of P times d(score) / d(element), which is kept beside P. At head size 96
// this spills 368 bytes of registers, and at 128 the products are serialised.
constexpr int64_t kMostSummedHeadDim = 64;

// A program is applied to the product alone. If its slope depends on the score, which dP replaces, it is kept with the
// weights: for this, head sizes up to 128 have registers.
std::string refuse_score_program(const tessera_plan& plan) {
  if (!core::score::has_program(plan)) return "";
  const tessera_problem& p = plan.problem;
  if (by_quads(plan)) return "score programs: not supported above head size 256";
  if (p.softcap > 0) return "score programs: not supported with softcap";
  if (core::present(p.bias)) return "score programs: not supported with bias";
  if (core::present(p.mask)) return "score programs: not supported with mask";
  const core::score::Bound bound = core::score::bind(plan);
  const core::score::Facts facts = core::score::facts_of(*bound.checked);
  if (const CapturedSums sums = captured_sums(plan); sums.any()) {
    if (sums.diagonals && sums.pairs) return "d_captured: not supported of elements for i - j beside others";
    if (sums.diagonals && p.deterministic) return "deterministic: not supported with d_captured of elements for i - j";
    if (sums.diagonals && p.dropout_p > 0) return "dropout: not supported with d_captured of elements for i - j";
    if (sums.pairs && !facts.sums_by_head) return "d_captured: supported only of one element for each head";
    const int64_t most = sums.pairs ? kMostSummedHeadDim : kBwdSm90HeadDim;
    if (largest_head_dim(plan) > most) return "d_captured: not supported above head size " + std::to_string(most);
    if (core::present(p.alibi_slopes)) return "d_captured: not supported with alibi_slopes";
  }
  if (!facts.slope_needs_s) return "";
  if (core::present(p.alibi_slopes)) return "alibi_slopes: not supported with a gradient that depends on the score";
  return largest_head_dim(plan) > kBwdSm90HeadDim
             ? "score programs: above head size 128 not supported where the gradient depends on the score"
             : "";
}

std::string refuse_options(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (std::string reason = refuse_score_program(plan); !reason.empty()) return reason;
  if (by_pairs(plan)) {
    std::string reason = by_quads(plan) ? kBwdSm90D512.refuse(plan) : kBwdSm90D256.refuse(plan);
    if (!reason.empty()) return reason;
  }
  if (std::string reason = refuse_softcap(p); !reason.empty()) return reason;
  if (std::string reason = refuse_block_lists(p); !reason.empty()) return reason;
  if (p.softcap > 0 && core::present(p.bias)) return "softcap: not supported with bias";
  if (p.softcap > 0 && core::present(p.alibi_slopes)) return "softcap: not supported with alibi_slopes";
  if (!core::present(p.d_bias)) return "";
  const int64_t* shape = p.d_bias.shape;
  if (shape[2] < plan.max_seqlen_q) return "d_bias: not supported where queries share its entries";
  const bool shared = shape[0] < plan.batch || shape[1] < plan.heads_q;
  return shared && p.deterministic ? "deterministic: not supported with a d_bias that sequences or heads share" : "";
}

// How many tensors have tensor maps: four are loaded by TMA, and dK and dV, which come last, are stored by it unless
// they are sums.
size_t tensor_maps(const tessera_problem& p) { return writes_sums(p) ? 4 : 6; }

std::string refuse_layout(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (plan.batch == 0 || plan.heads_q == 0) return "no heads of no sequence";
  if (std::string reason = refuse_no_rows("q", core::sizes(p).rows_q); !reason.empty()) return reason;
  if (std::string reason = refuse_no_rows("k", core::sizes(p).rows_k); !reason.empty()) return reason;
  const struct {
    const char* name;
    const tessera_layout& layout;
  } mapped[] = {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"d_o", p.d_o}, {"d_k", p.d_k}, {"d_v", p.d_v}};
  for (const auto& [name, layout] : std::span(mapped).first(tensor_maps(p))) {
    if (std::string reason = refuse_tensor_map(name, layout); !reason.empty()) return reason;
  }
  return rows_aligned(p.o, nullptr) ? "" : "o: rows start at no multiples of 16 bytes";
}

std::string refuse(const tessera_plan& plan) {
  if (std::string reason = refusal(kSupports, plan); !reason.empty()) return reason;
  if (std::string reason = refuse_options(plan); !reason.empty()) return reason;
  if (std::string reason = refuse_layout(plan); !reason.empty()) return reason;
  if (!by_pairs(plan) && !tile_of(plan)) {
    return std::string(kForcedBackwardTile) + ": '" + environment_variable(kForcedBackwardTile) +
           "', accepted a tile that fits: block_m,stages,alternate,staged_dq";
  }
  const BlockShape shape = shape_of(configs_of(plan));
  if (std::string reason = refuse_shared_memory(shape.smem_bytes, plan); !reason.empty()) return reason;
  const Tiles tiles = tiles_of(plan, shape);
  if (tiles.blocks() > INT32_MAX / shape.cluster || tiles.q_slots > INT32_MAX / (plan.heads_q + 1))
    return "more than 2^31 tiles";
  const std::string stand_in = kBwdSm80.refuse(plan);
  return stand_in.empty() ? "" : "bwd_sm80, which serves misaligned data, refuses: " + stand_in;
}

// An H100, 8192 tokens, full (bwd_sm90_tiles.inc, docs/status.md).
constexpr Rate kRates[] = {{64, 478}, {96, 503}, {128, 547}, {256, 520}, {512, 450}};
double estimate_us(const tessera_plan& plan) {
  return listed_part(lists_are_programs(configs_of(plan))) * us_at_rate(plan, kRates);
}

// The number of blocks that the query heads of a KV head are split over if the blocks do not fill the GPU: the fewest
// that are within a tenth of the best time. With a full mask, a head takes one round for each GPU's worth of blocks.
// With a causal mask, a block has on average half the steps of the longest one, so twice as many blocks fill the GPU.
int64_t group_splits(const tessera_plan& plan, const Tiles& tiles) {
  const tessera_problem& p = plan.problem;
  const int64_t group = plan.heads_q / plan.heads_kv, blocks = tiles.blocks();
  const int64_t fill = plan.device.cores * (is_causal(p) ? 2 : 1);
  if (varies_in_length(p) || blocks >= fill) return 1;
  const auto time = [&](int64_t splits) {
    const int64_t rounds = is_causal(p) ? std::max(fill, blocks * splits) : divide_up(blocks * splits, fill) * fill;
    return static_cast<double>(rounds) / static_cast<double>(splits);
  };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= group; ++splits) {
    if (group % splits == 0 && time(splits) < 0.9 * time(best)) best = splits;
  }
  return best;
}

BwdSm90Plan planned(const tessera_plan& plan) {
  BwdSm90Plan own = configs_of(plan);
  const BlockShape shape = shape_of(own);
  own.rows = {
      .dtype = static_cast<Dtype>(plan.problem.q.dtype),
      .head_dim = shape.head_dim,
      .block_m = shape.block_m,
      .d_sink = core::present(plan.problem.d_sink),
      .d_bias = core::present(plan.problem.d_bias),
      .deterministic = plan.problem.deterministic != 0 && !by_whole_heads(own) && !lists_are_programs(own),
      .block_mask = core::present(plan.problem.block_mask) && !lists_are_programs(own),
      .sums = writes_sums(plan.problem),
      .whole_head = by_whole_heads(own),
      .sequence_places = plan.problem.deterministic && core::present(plan.problem.places) && !lists_are_programs(own)};
  Tiles tiles = tiles_of(plan, shape);
  own.group_splits = own.pair || own.quad || by_whole_heads(own) ? 1 : static_cast<int>(group_splits(plan, tiles));
  if (own.group_splits > 1) own.config.split_group = true, own.config.sums = false;
  tiles.heads *= own.group_splits;
  own.q_tiles = static_cast<int>(tiles.q_tiles), own.q_slots = static_cast<int>(tiles.q_slots);
  own.key_tiles = Divisor(static_cast<int>(tiles.key_tiles));
  const bool ordered = lists_are_programs(own) && !plan.problem.deterministic && !varies_in_length(plan.problem);
  own.section_heads =
      Divisor(by_whole_heads(own) ? 1 : static_cast<int>(section_heads(plan, shape, tiles, own.group_splits, ordered)));
  own.heads = static_cast<int>(tiles.heads);
  own.rotation = by_whole_heads(own) ? 0 : static_cast<int>(rotation(plan, own, tiles, shape.cluster));
  own.before.x = static_cast<uint32_t>(tiles.q_slots * plan.heads_q + (own.rows.block_mask && !own.rows.deterministic));
  own.after.x = static_cast<uint32_t>(tiles.q_slots * plan.heads_q + (own.rows.d_sink ? plan.heads_q : 0));
  own.products.x = static_cast<uint32_t>((by_whole_heads(own) ? tiles.heads : tiles.blocks()) * shape.cluster);
  if (own.rows.block_mask) {
    own.lists = block_lists_of(plan.problem, tiles.key_tiles, tiles.q_tiles);
  }
  if (lists_are_programs(own)) {
    const ProgramListsShape program = program_lists_of(plan, listed_blocks(plan, shape));
    own.lists = program.lists, own.program_words = static_cast<int>(program.words);
  }
  own.workspace =
      backward_workspace(tiles.q_slots * plan.heads_q, shape.block_m, by_whole_heads(own) ? 0 : shape.head_dim,
                         plan.problem.deterministic != 0 && !by_whole_heads(own));
  if (own.group_splits > 1) {
    const int64_t rows = tiles.blocks() * shape.block_n;
    own.d_k_parts = own.workspace.bytes;
    own.d_v_parts = own.d_k_parts + rows * own.config.head_dim * 4;
    own.workspace.bytes = own.d_v_parts + rows * own.config.head_dim_v() * 4;
  }
  return own;
}

// The memory after the lists: BwdSm90Params::dq_order, or its order of key tiles.
int64_t sequence_bytes(const tessera_plan& plan, const BwdSm90Plan& own) {
  return own.rows.deterministic ? dq_order_bytes(plan.problem, own.lists)
                                : int64_t{own.heads} * own.key_tiles * int64_t{sizeof(int)};
}

void configure(tessera_plan& plan) {
  const BwdSm90Plan own = planned(plan);
  const BlockShape shape = shape_of(own);
  tessera_plan_step& step = core::add_step(plan, kBwdSm90);
  step.block_m = shape.block_m, step.block_n = shape.block_n;
  step.num_warps = shape.threads / 32, step.num_stages = shape.stages;
  step.smem_bytes = shape.smem_bytes;
  step.num_splits = own.group_splits;
  step.num_items = own.products.x;
  step.workspace_bytes = own.workspace.bytes + program_sums_bytes(plan);
  if (own.rows.block_mask) {
    step.workspace_bytes += block_lists_bytes(plan.problem, own.lists) + sequence_bytes(plan, own);
  }
  if (lists_are_programs(own)) {
    const ProgramListsShape program = program_lists_of(plan, listed_blocks(plan, shape));
    step.workspace_bytes += program.bytes() + (plan.problem.deterministic ? program.order_bytes() : 0);
  }
  core::keep_config(step, own);
}

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kTensorMapAlignment == 0; }

tessera_status make_maps(const Driver& driver, const tessera_plan& plan, const BlockShape& shape,
                         const tessera_buffers& buffers, BwdSm90Params& p) {
  const tessera_problem& problem = plan.problem;
  const struct {
    const char* name;
    const tessera_layout& layout;
    const void* data;
    int rows;  // of a TMA box
    TensorMap& map;
  } maps[] = {{"q", problem.q, buffers.q, shape.block_m, p.q_map},
              {"d_o", problem.d_o, buffers.d_o, shape.block_m, p.d_o_map},
              {"k", problem.k, buffers.k, shape.key_box_rows, p.k_map},
              {"v", problem.v, buffers.v, shape.key_box_rows, p.v_map},
              {"d_k", problem.d_k, buffers.d_k, kStoredRows, p.d_k_map},
              {"d_v", problem.d_v, buffers.d_v, kStoredRows, p.d_v_map}};
  for (const auto& [name, layout, data, rows, map] : std::span(maps).first(tensor_maps(problem))) {
    const Box box{BoxLayout::kSwizzled, rows, kSwizzledRowBytes};
    TESSERA_RETURN_IF_ERROR(make_tensor_map(driver, plan.device, name, layout, data, box, map));
  }
  return ok();
}

// A plan knows strides; addresses are only known at a call.
bool fits(const tessera_plan& plan, const tessera_buffers& buffers) {
  for (const void* data : {buffers.q, buffers.k, buffers.v, static_cast<const void*>(buffers.o), buffers.d_o}) {
    if (!aligned(data)) return false;
  }
  return writes_sums(plan.problem) || (aligned(buffers.d_k) && aligned(buffers.d_v));
}
constexpr Alignment kAlignment{fits, add_bwd_sm80};

// bwd_sm80's preprocess and postprocess, for clusters of four.
BwdRowsConfig quad_rows(const BwdSm90Plan& own) {
  BwdRowsConfig rows{};
  rows.dtype = own.rows.dtype, rows.block_m = own.rows.block_m;
  rows.head_dim = rows.head_dim_v = own.rows.head_dim;
  rows.aligned = true, rows.d_sink = own.rows.d_sink, rows.sums = own.rows.sums;
  return rows;
}

tessera_status list_launches(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  const auto own = core::config_of<BwdSm90Plan>(step);
  BwdSm90Params p{};
  fill_backward_params(p, plan, own.workspace, buffers, workspace);
  if (plan.problem.softcap > 0) p.far_lse_log2 = std::numeric_limits<float>::infinity();
  p.q_tiles = own.q_tiles, p.q_slots = own.q_slots;
  if (own.group_splits > 1) {  // each part of a group is treated as a separate KV head
    p.group_splits = own.group_splits, p.block_n = own.config.block_n;
    p.heads_kv = Divisor(static_cast<int>(plan.heads_kv) * own.group_splits);
    p.group = Divisor(static_cast<int>(plan.heads_q / plan.heads_kv) / own.group_splits);
    char* const memory = static_cast<char*>(workspace);
    p.d_k_parts = memory ? reinterpret_cast<float*>(memory + own.d_k_parts) : nullptr;
    p.d_v_parts = memory ? reinterpret_cast<float*>(memory + own.d_v_parts) : nullptr;
  }
  p.key_tiles = own.key_tiles, p.section_heads = own.section_heads, p.heads = own.heads, p.rotation = own.rotation;
  const BlockShape shape = shape_of(own);
  if (const Driver* driver = launches.driver()) {
    TESSERA_RETURN_IF_ERROR(make_maps(*driver, plan, shape, buffers, p));
  }
  if (own.quad) {
    launch_bwd_rows(quad_rows(own), p, own.before, launches);
    launch_bwd_sm90(own.quad_config, p, own.products, launches);
    p.after = 1;
    p.scale *= bwd_lower_late(own.rows.dtype);
    launch_bwd_rows(quad_rows(own), p, own.after, launches);
    return ok();
  }
  if (own.rows.block_mask) {
    const BlockListsConfig config{shape.block_n, shape.block_m, true};
    char* memory = workspace ? static_cast<char*>(workspace) + own.workspace.bytes : nullptr;
    p.lists = list_blocks(plan, config, own.lists, buffers, memory, launches);
    if (memory) memory += block_lists_bytes(plan.problem, own.lists);
    if (own.rows.deterministic) {
      p.dq_order = order_blocks(plan, config, p.lists, buffers, launches);
    } else {
      p.order = reinterpret_cast<int*>(memory);
    }
  }
  if (lists_are_programs(own)) {
    char* const memory = workspace ? static_cast<char*>(workspace) + own.workspace.bytes : nullptr;
    const ProgramListsConfig config = listed_blocks(plan, shape);
    p.lists = list_program(plan, config, own.program_words, buffers, memory, launches);
    if (plan.problem.deterministic) {
      p.dq_order = order_program(plan, config, own.program_words, p.lists, buffers, last_keys_first(p), launches);
    }
  }
  launch_bwd_sm90_before(own.rows, p, own.before, launches);
  if (own.pair) {
    launch_bwd_sm90(own.pair_config, p, own.products, launches);
  } else {
    launch_bwd_sm90(own.config, p, own.products, launches);
  }
  if (by_whole_heads(own)) return ok();  // it stores dQ
  BwdParams after = p;
  after.scale *= bwd_lower_late(own.rows.dtype);
  if (!own.pair && own.config.d_factor) {
    const BwdSm90ProductsConfig config{own.rows, plan.problem.deterministic != 0, own.config.score};
    launch_bwd_sm90_after(config, after, own.after, launches);
  } else {
    launch_bwd_sm90_after(own.rows, after, own.after, launches);
  }
  if (own.group_splits > 1) {
    const BwdSm90GroupConfig config{own.config.dtype, own.config.head_dim, own.config.head_dim_v(), own.rows.sums};
    const int64_t words = plan.batch * plan.heads_kv * core::sizes(plan.problem).rows_k * (config.head_dim / 4);
    launch_bwd_sm90_group(config, p, Grid{static_cast<uint32_t>(divide_up(words, kBwdGroupThreads)), 2}, launches);
  }
  return ok();
}

}  // namespace

constinit const Family kBwdSm90{{"bwd_sm90", TESSERA_KERNEL_BWD_SM90, refuse, configure, estimate_us},
                                kSupports,
                                list_launches,
                                kPrebuilt,
                                bwd_sm90_tiles_json,
                                &kAlignment};

}  // namespace tessera::cuda
