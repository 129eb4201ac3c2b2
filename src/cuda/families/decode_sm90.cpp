// The kernel of kernels/tessera/decode_sm90: the problems it supports, its tiles and its launch. Every number depends
// only on the problem and the GPU, never on a sequence's length: the GPU decides which block reads which keys.
#include "cuda/families/decode_sm90.hpp"

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/dtypes.hpp"
#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/fwd_sm80.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "cuda/tiles_json.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

// A row serves head sizes up to head_dim. TMA rows need a layout that TMA supports and pages of whole tiles; cp.async
// rows serve everything else.
struct DecodeTile {
  int head_dim;
  bool codes;  // for K and V of 8 bits an element
  bool bulk;   // by TMA
  int block_n, warps, stages;
  int boxes = 1;          // of a tile
  bool few_keys = false;  // only where blocks have few keys: has_few_keys
};
// With TMA the kernel reads at 0.99 of the memory bandwidth, with cp.async at 0.95, regardless of the bytes in flight,
// so one stage of K and V suffices (except in two_stages). 12 warps read no faster than 8, and a short call takes 0.3
// to 0.5 us longer with them (docs/lab/decode_sm90.md). At D = 64, 32 keys take 94 us for a batch of 268 MB instead of
// 100 (cuDNN 92); pages that are no multiple of 32 keys use 16. Rows for codes have as many bytes in a tile and in
// flight as the others, by twice the keys. Pages that are no multiple of 32 keys have those tiles by cp.async: with a
// scale of each token, 64 x 2048 took 106 us in pages of 1 by cp.async, and 153 in pages of 16 by tiles of 16 keys,
// whose scales and barriers cost as much as those of 32 (an H200). Pages of a multiple of 16 keys are read by TMA, two
// boxes a tile. At D = 64, tiles of 32 codes have half of the bytes: with 64 keys, barriers, copies and waits are paid
// half as often. Where a block has few keys, 16 of them are a tile: more warps have one, and a warp's chain of
// instructions is shorter.
constexpr DecodeTile kTiles[] = {
    {64, true, true, 16, 8, 2, 1, true},   {128, true, true, 16, 8, 1, 1, true}, {64, true, false, 16, 8, 2, 1, true},
    {128, true, false, 16, 8, 1, 1, true}, {64, false, true, 32, 8, 1},          {64, false, true, 16, 8, 2},
    {128, false, true, 16, 8, 1},          {256, false, true, 16, 8, 1},         {64, false, false, 16, 8, 2},
    {128, false, false, 16, 8, 1},         {64, true, true, 64, 8, 1},           {64, true, true, 64, 8, 1, 2},
    {64, true, true, 64, 8, 1, 4},         {128, true, true, 32, 8, 1},          {128, true, true, 32, 8, 1, 2},
    {64, true, false, 32, 8, 2},           {128, true, false, 32, 8, 1},         {256, true, true, 32, 8, 1},
    {256, true, true, 32, 8, 1, 2},        {256, true, false, 16, 8, 1},         {256, false, false, 16, 8, 1},
};
constexpr int kMostHeadDim = kTiles[std::size(kTiles) - 1].head_dim;

// The number of keys times KV heads and their work tiles of rows up to which, in pages, cp.async is faster than TMA at
// D = 128. One sequence of 64 heads over 8 takes (cp.async, TMA) 7.1 and 7.5 us with 1024 keys, 7.7 and 8.3 with 2048,
// and 9.4 with both with 4096. cp.async is slower with 32 KV heads of 1024 keys, and takes 13.9 instead of 11.4 us with
// eight work tiles of 1024 keys.
constexpr int64_t kShortHeadKeys = 2048 * 8;

// The most rows of a KV head: keys are read once for every kDecodeRows rows, so more rows would read them too often.
constexpr int64_t kMostRows = 8 * kDecodeRows;
// Nanoseconds for each key and KV head with one, two and four work tiles of rows (an H100, docs/lab/decode_sm90.md).
struct KeyTimes {
  int head_dim;
  double one_tile, two_tiles, four_tiles;
};
constexpr KeyTimes kKeyTimes[] = {{64, 0.080, 0.105, 0.197}, {128, 0.155, 0.195, 0.29}, {256, 0.31, 0.43, 0.51}};
// Of these times, that of K and V of 8 bits: by their bytes and 0.98 of the memory bandwidth, as dense caches with
// a scale of each head have it at D = 128 (0.52 to 0.56, an H200).
constexpr double kCodesTime = 0.52;
// With fewer keys the kernel is no longer faster: 512 work tiles of 256 keys take 30 us, with fwd_sm80 34. With more
// than four work tiles of rows, 128 rows of one sequence take 9.4 us for 512 keys and 11.4 us for 1024, with fwd_sm80
// 22 and 14.
constexpr int64_t kLeastKeys = 256, kManyRows = 4 * kDecodeRows, kManyRowsLeastKeys = 512;
// A short part that follows another launch of the call starts late. After the prefix of 64 sequences, 256 other keys of
// each took 85.5 us, with fwd_sm80 78.5 (an H100; 8 heads over 8: 93.4 and 76.6), although decode_sm90 alone is faster
// (docs/lab/runtime.md).
constexpr int64_t kLateKeysAWorkTile = 4, kMostLateKeys = 2048;

// Parts with fewer keys are not worth their merge. With batch_invariant, sequences of up to kShortKeys keys have parts
// half as long as longer sequences: a short sequence alone waits for its tiles, a long batch for the merges of its
// parts (64 x 2048 took 5 % longer with parts of 128 keys, 1 % longer with 256).
constexpr int kMinPartKeys = 64, kMinInvariantPartKeys = 128, kShortKeys = 1024;

// A work tile of more than kManyParts parts is merged in groups of kGroupParts, then these groups' sums. One block
// alone takes 0.9 us for every 16 parts of eight rows of 128 columns, which it reads from the L2 cache: of one KV head,
// 8192 keys in 128 parts took 17.1 us where 16 parts a KV head of eight take 13.2 (an H100). A second level costs 2 us.
constexpr int kManyParts = 32, kGroupParts = 12;
static_assert(kManyParts >= std::max(kDecodeMostParts, kGroupParts) && kGroupParts >= 2);

// The decisions for the sequences of `least_queries` to `most_queries` queries.
struct DecodeSm90Plan {
  DecodeSm90Config config;
  Grid grid;
  int group_blocks, min_tiles, short_tiles, most_parts, least_queries, most_queries, part_rows;
  bool beside;  // the launch follows fwd_sm90's for the other sequences, which itself waits for the work before both
};

// The rows of a work tile. Of 8-bit keys, 32 rows share the conversion of a key's codes where registers suffice and one
// block merges few parts of them: 8/1 heads, 4 queries and 131072 keys, 132 parts, take 31.4 us, 23.9 by two work tiles
// of 16 rows (an H200). Eight rows need half of the products and exponentials of 16. With batch_invariant, the number
// of rows must not change how keys are divided among warps.
int rows_of_work_tile(const tessera_plan& plan, int64_t queries) {
  constexpr int64_t kFewParts = 8;
  const int64_t rows = queries * group_of(plan);
  if (!core::is_8bit(plan.problem.k.dtype) || plan.problem.batch_invariant) return kDecodeRows;
  if (rows <= kDecodeRows / 2) return kDecodeRows / 2;
  const bool few_parts = kFewParts * plan.batch * plan.heads_kv >= plan.device.cores;
  return rows > kDecodeRows && few_parts && std::max(plan.head_dim, plan.head_dim_v) <= 128 ? 2 * kDecodeRows
                                                                                            : kDecodeRows;
}

// Work tiles for a KV head's rows of `queries` queries.
int64_t row_tiles_of(const tessera_plan& plan, int64_t queries) {
  return divide_up(queries * group_of(plan), rows_of_work_tile(plan, queries));
}

// K or V as the kernel's tiles see it: two codes are an element of 16 bits.
tessera_layout as_16_bits(const tessera_layout& layout) {
  return core::is_8bit(layout.dtype) ? codes_in_pairs(layout) : layout;
}

// Whether TMA can load boxes of `rows` keys.
bool takes_bulk_copies(const tessera_plan& plan, int rows) {
  const tessera_problem& p = plan.problem;
  const core::Sizes size = core::sizes(p);
  if (size.rows_k == 0 || size.batch == 0 || (core::paged(p) && size.page_size % rows != 0)) return false;
  const auto odd = [](const tessera_layout& x) { return x.shape[x.rank - 1] % 2 != 0; };
  if (core::is_8bit(p.k.dtype) && (odd(p.k) || odd(p.v))) return false;
  return refuse_tensor_map("k", as_16_bits(p.k)).empty() && refuse_tensor_map("v", as_16_bits(p.v)).empty();
}

// Whether blocks have few keys, with `queries` queries a sequence. With batch_invariant, the result does not depend on
// the number of sequences.
bool has_few_keys(const tessera_plan& plan, int64_t queries) {
  return !plan.problem.batch_invariant &&
         plan.batch * plan.max_seqlen_k * plan.heads_kv * row_tiles_of(plan, queries) <= kShortHeadKeys;
}

bool too_short_for_bulk_copies(const tessera_plan& plan, int64_t queries) {
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  return core::paged(plan.problem) && head_dim > 64 && head_dim <= 128 && has_few_keys(plan, queries);
}

// With TMA and D = 128: whether a second stage of K and V is in flight while warps synchronise, which pays if a block
// has several short work tiles, or parts that do not depend on the batch. 64 x 2048 in pages of 16 take 129.5 us
// instead of 132.7, and 16 x 4096 with batch_invariant 69.0 instead of 72.2. But 1 x 4096, where a block has one tile a
// warp, takes 8.4 instead of 7.7 (an H200, docs/lab/decode_sm90.md).
bool two_stages(const tessera_plan& plan) {
  constexpr int64_t kManyHeadKeys = int64_t{64 << 20} / (2 * 128 * 2);  // 64 MiB of K and V of 128 columns
  constexpr int64_t kShortKeysOfMany = 4096;
  const int64_t work_tiles = plan.batch * plan.heads_kv;
  if (plan.problem.batch_invariant) return work_tiles * plan.max_seqlen_k >= kManyHeadKeys;
  return work_tiles >= 2 * plan.device.cores && plan.max_seqlen_k <= kShortKeysOfMany;
}

DecodeSm90Config make_config(const tessera_plan& plan, int64_t queries) {
  const tessera_problem& p = plan.problem;
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  DecodeSm90Config config{};
  config.dtype = static_cast<Dtype>(p.q.dtype), config.cache = static_cast<Dtype>(p.k.dtype);
  const bool codes = core::is_8bit(p.k.dtype);
  config.head_dim = static_cast<int>(padded_to(std::max<int64_t>(1, head_dim), codes ? 32 : 16));
  config.rows = rows_of_work_tile(plan, queries);
  config.key_scales = codes && (p.k_descale.rank == 3 || p.v_descale.rank == 3);
  config.paged = core::paged(p);
  config.varlen = config.paged || core::packed_q(p) || core::packed_k(p) || core::present(p.seqused_k) ||
                  core::present(p.causal_seqs);
  config.invariant = p.batch_invariant != 0;
  config.score = score_config(plan);
  const DecodeTile& tile = *std::ranges::find_if(kTiles, [&](const DecodeTile& row) {
    return head_dim <= row.head_dim && codes == row.codes && (!row.few_keys || has_few_keys(plan, queries)) &&
           (!row.bulk ||
            (takes_bulk_copies(plan, row.block_n / row.boxes) && !too_short_for_bulk_copies(plan, queries)));
  });
  config.block_n = tile.block_n, config.warps = tile.warps, config.stages = tile.stages;
  config.bulk = tile.bulk, config.boxes = tile.boxes;
  if (tile.bulk && tile.head_dim == 128 && two_stages(plan)) config.stages *= 2;
  return config;
}

// The number of work tiles of a head's rows that a group of blocks processes side by side, so that keys are read once
// for all of them: all tiles, but one if parts must not depend on the other sequences' queries.
int group_rows_of(const tessera_plan& plan, int64_t queries) {
  const int64_t tiles = row_tiles_of(plan, queries);
  const int64_t most = std::min<int64_t>(kMostRows / kDecodeRows, plan.device.cores);
  return plan.problem.batch_invariant ? 1 : static_cast<int>(std::clamp<int64_t>(tiles, 1, std::max<int64_t>(1, most)));
}

// The number of blocks in a group. For each of these work tiles, the group has blocks with neighbouring KV heads, whose
// keys are adjacent in memory: as many as divide the heads and leave few multiprocessors without a block.
int group_blocks_of(const tessera_plan& plan, int rows) {
  constexpr int64_t kBusyPercent = 96;
  const int64_t cores = std::max<int64_t>(1, plan.device.cores);
  for (int64_t heads = std::min(plan.heads_kv, cores); heads > 1; --heads) {
    const int64_t group_blocks = heads * rows;
    if (plan.heads_kv % heads == 0 && cores / group_blocks * group_blocks * 100 >= kBusyPercent * cores)
      return static_cast<int>(group_blocks);
  }
  return rows;
}

// The number of parts of a work tile, independent of the batch: as many as for a sequence alone, which is then as fast
// as without batch_invariant.
int most_parts_of(const tessera_plan& plan, int heads) {
  const int64_t block_groups = std::max<int64_t>(1, plan.device.cores / heads), groups = plan.heads_kv / heads;
  return static_cast<int>(std::clamp<int64_t>(divide_up(block_groups, groups), 1, kDecodeMostParts));
}

// The layout of a call's workspace, as offsets in bytes.
struct DecodeWorkspace {
  int64_t arrivals, partial_stat, partial_o, bytes;
};
DecodeWorkspace workspace_of(const DecodeSm90Plan& own) {
  constexpr int64_t kAlignment = 64, kArrivalBytes = 8, kStatBytes = 8;
  const int64_t blocks = own.grid.x, slots = decode_slots(own.config, static_cast<int>(blocks));
  DecodeWorkspace at{};
  at.partial_stat = at.arrivals + padded_to(2 * blocks * kArrivalBytes, kAlignment);
  at.partial_o = at.partial_stat + padded_to(slots * own.part_rows * kStatBytes, kAlignment);
  at.bytes = at.partial_o + slots * own.part_rows * own.config.head_dim * 4;
  return at;
}

constexpr Supports kSupports{.direction = TESSERA_FORWARD,
                             .oldest_arch = kHopper,
                             .newest_arch = kHopper,  // measured only there
                             .dtypes = kHalfPrecision,
                             .head_dim = kMostHeadDim,
                             .tensors = kAllTensors & ~(kScoreTensors | kPlaceTensors),
                             .cache_dtypes = bits({TESSERA_FLOAT8_E4M3, TESSERA_FLOAT8_E5M2}),
                             .programs = true};

constexpr Limits kLimits{.registers = 255};
constexpr PrebuiltRow kPrebuilt[] = {
    {Use::kDecode, 64, kLimits},           {Use::kDecode, 128, kLimits},           {Use::kDecodeBatch, 64, kLimits},
    {Use::kDecodeBatch, 128, kLimits},     {Use::kPagedDecode, 64, kLimits},       {Use::kPagedDecode, 128, kLimits},
    {Use::kPagedDecodeBatch, 64, kLimits}, {Use::kPagedDecodeBatch, 128, kLimits},
};

std::string refuse_rows(const tessera_plan& plan, int64_t queries) {
  if (queries * group_of(plan) <= kMostRows) return "";
  return std::to_string(queries) + " queries x " + std::to_string(group_of(plan)) + " heads a KV head, at most " +
         std::to_string(kMostRows) + " rows";
}

std::string refuse_layout(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const struct {
    const char* name;
    const tessera_layout& layout;
  } loaded[] = {{"q", p.q}, {"k", p.k}, {"v", p.v}};
  for (const auto& [name, layout] : loaded) {
    if (!rows_aligned(layout, nullptr)) return std::string(name) + ": rows start at no multiples of 16 bytes";
  }
  if (core::paged(p) && (core::sizes(p).pages == 0 || core::sizes(p).rows_k == 0)) return "k: no pages";
  return "";
}

// With batch_invariant the kernel may depend only on a sequence's own queries. In a batch with longer sequences this
// kernel serves those of one work tile (mixed_sm90), so it serves no others in any batch, unless requested by name.
std::string refuse_invariant(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (!p.batch_invariant || core::asked_family(plan.device) == "decode_sm90") return "";
  if (const int64_t rows = rows_of_kv_head(plan); rows > kDecodeRows) {
    return std::to_string(rows) + " rows of a KV head, with batch_invariant at most " + std::to_string(kDecodeRows);
  }
  const bool by_rows = !core::packed_q(p) || core::paged(p) || core::present(p.seqused_k);
  return by_rows ? "" : "packed queries without a cache: other sequences of the batch may have many";
}

// The time by which the merges of warps and parts exceed those of eight rows of 128 columns, which kCallUs has. With 16
// rows one token takes 2.7 us longer, with 16 rows of 256 columns 12 us; a second level takes 4 us (an H200,
// docs/lab/decode_sm90.md).
double merges_us(const tessera_plan& plan) {
  constexpr double kPart = 8 * 128, kLinear = 1.65, kSquare = 0.35, kLevelUs = 4;
  const int64_t rows = std::min<int64_t>(kDecodeRows, rows_of_kv_head(plan));
  const auto part = static_cast<double>(rows * std::max(plan.head_dim, plan.head_dim_v));
  const double times = std::max(1.0, part / kPart);
  const double parts =
      std::min(cores_of(plan) / std::max(1.0, kv_heads(plan)), static_cast<double>(plan.max_seqlen_k / kMinPartKeys));
  return kLinear * (times - 1) + kSquare * (times * times - 1) +
         (parts > kManyParts ? kLevelUs * std::min(1.0, part / kPart) : 0);
}

double estimate_us(const tessera_plan& plan) {
  const int64_t rows = rows_of_kv_head(plan), tiles = row_tiles_of(plan, plan.max_seqlen_q), keys = plan.max_seqlen_k;
  const KeyTimes& times = row_of(kKeyTimes, plan);
  const double of_codes = core::is_8bit(plan.problem.k.dtype) ? kCodesTime : 1;
  const double a_tile = (times.four_tiles - times.two_tiles) / 2;
  const double ns = tiles <= 1 ? times.one_tile : times.two_tiles + a_tile * static_cast<double>(tiles - 2);
  double us = forward_us(plan, kv_heads(plan) * ns * of_codes);
  if (plan.problem.batch_invariant) return us;
  if (!is_part(plan)) us += merges_us(plan);
  const bool is_short = keys < (rows > kManyRows ? kManyRowsLeastKeys : kLeastKeys);
  const bool idle = tiles > 2 && most_have_few(plan);  // most blocks of a group have no rows
  const bool late = plan.steps[0].keys == TESSERA_STEP_OTHER_KEYS &&
                    keys < std::min(kLateKeysAWorkTile * plan.batch * plan.heads_kv, kMostLateKeys);
  return is_short || idle || late ? kIdleFactor * us : us;
}

std::string refuse(const tessera_plan& plan) {
  if (std::string reason = refuse_decode_sm90(plan, plan.max_seqlen_q); !reason.empty()) return reason;
  if (const std::string reason = kFwdSm80.refuse(plan); !reason.empty()) {
    return "fwd_sm80, which serves misaligned data, refuses: " + reason;
  }
  return refuse_invariant(plan);
}

void configure(tessera_plan& plan) { add_decode_sm90(plan, 0, plan.max_seqlen_q); }

// A plan knows strides; addresses are only known at a call.
bool fits(const tessera_plan& plan, const tessera_buffers& buffers) {
  const tessera_problem& problem = plan.problem;
  return rows_aligned(problem.q, buffers.q) && rows_aligned(problem.k, buffers.k) && rows_aligned(problem.v, buffers.v);
}
constexpr Alignment kAlignment{fits, add_fwd_sm80_stand_in};

tessera_status list_launches(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  const auto own = core::config_of<DecodeSm90Plan>(step);
  const tessera_problem& problem = plan.problem;
  if (plan.heads_q == 0 || core::sizes(problem).rows_q == 0) return ok();
  DecodeSm90Params p{};
  if (core::is_8bit(problem.k.dtype)) {
    p.k_scales = scale_tensor(problem.k_descale, buffers.k_descale, own.config.paged);
    p.v_scales = scale_tensor(problem.v_descale, buffers.v_descale, own.config.paged);
    const ScaleTensor &k = p.k_scales, &v = p.v_scales;
    p.same_scale_places = k.batch == v.batch && k.row == v.row && k.head == v.head && k.in_pages == v.in_pages;
  }
  fill_problem_params(p, plan, buffers);
  p.decoded_queries = 0;
  p.least_queries = own.least_queries, p.most_queries = own.most_queries, p.beside = own.beside;
  p.o = row_tensor(problem.o, buffers.o);
  p.o_aligned = rows_aligned(problem.o, buffers.o);
  p.lse = stat_tensor(problem.lse, buffers.lse), p.lse_low = stat_tensor(problem.lse_low, buffers.lse_low);
  p.min_tiles = own.min_tiles, p.short_tiles = own.short_tiles, p.most_parts = Divisor(own.most_parts);
  p.many_parts = kManyParts, p.group_parts = Divisor(kGroupParts);
  const int group_rows = group_rows_of(plan, own.most_queries), group_heads = own.group_blocks / group_rows;
  p.group_blocks = Divisor(own.group_blocks), p.group_heads = Divisor(group_heads), p.group_rows = Divisor(group_rows);
  p.head_groups = static_cast<int>(plan.heads_kv) / group_heads;
  p.block_groups = Divisor(static_cast<int>(own.grid.x) / own.group_blocks);
  p.page = Divisor(own.config.paged ? static_cast<int>(core::sizes(problem).page_size) : 1);
  p.part_rows = own.part_rows;
  p.masks = position_masks(problem, buffers);
  const DecodeWorkspace at = workspace_of(own);
  if (char* const base = static_cast<char*>(workspace)) {
    p.arrivals = reinterpret_cast<unsigned long long*>(base + at.arrivals);
    p.partial_stat = reinterpret_cast<float*>(base + at.partial_stat);
    p.partial_o = reinterpret_cast<float*>(base + at.partial_o);
  }
  if (const Driver* driver = launches.driver(); driver && own.config.bulk) {
    const Box box{BoxLayout::kSwizzled, own.config.block_n / own.config.boxes, kSwizzledRowBytes};
    TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "k", as_16_bits(problem.k), buffers.k, box, p.k_map));
    TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "v", as_16_bits(problem.v), buffers.v, box, p.v_map));
  }
  launch_decode_sm90(own.config, p, own.grid, launches);
  return ok();
}

std::string tiles_json() {
  return json_array(kTiles, [](const DecodeTile& tile) {
    return json_object({{"head_dim", tile.head_dim},
                        {"codes", tile.codes},
                        {"block_n", tile.block_n},
                        {"warps", tile.warps},
                        {"stages", tile.stages},
                        {"bulk", tile.bulk},
                        {"boxes", tile.boxes},
                        {"few_keys", tile.few_keys}});
  });
}

}  // namespace

std::string refuse_decode_sm90(const tessera_plan& plan, int64_t queries) {
  if (std::string reason = refusal(kSupports, plan); !reason.empty()) return reason;
  if (plan.problem.dropout_p > 0) return "dropout_p: not supported";
  if (std::string reason = refuse_rows(plan, queries); !reason.empty()) return reason;
  if (std::string reason = refuse_layout(plan); !reason.empty()) return reason;
  const DecodeSm90Config config = make_config(plan, queries);
  if (std::string reason = refuse_shared_memory(smem_bytes(config), plan); !reason.empty()) return reason;
  // the kernel's counters may exceed the tile count by one block's range
  constexpr int64_t kMaxTiles = int64_t{1} << 30;
  const int64_t work_tiles = plan.batch * plan.heads_kv * row_tiles_of(plan, queries),
                tiles = divide_up(plan.max_seqlen_k, config.block_n) + 1;
  return work_tiles > kMaxTiles || work_tiles * tiles > kMaxTiles ? "more than 2^30 tiles" : "";
}

tessera_plan_step& add_decode_sm90(tessera_plan& plan, int64_t least, int64_t most, bool beside) {
  DecodeSm90Plan own{};
  own.config = make_config(plan, most);
  own.grid.x = static_cast<uint32_t>(std::max(1, plan.device.cores));
  const int group_rows = group_rows_of(plan, most);
  own.group_blocks = group_blocks_of(plan, group_rows);
  own.min_tiles = (own.config.invariant ? kMinInvariantPartKeys : kMinPartKeys) / own.config.block_n;
  own.short_tiles = kShortKeys / own.config.block_n;
  own.most_parts = most_parts_of(plan, own.group_blocks / group_rows);
  own.least_queries = static_cast<int>(least), own.most_queries = static_cast<int>(most);
  own.part_rows = static_cast<int>(std::min<int64_t>(own.config.rows, most * group_of(plan)));
  own.beside = beside;
  tessera_plan_step& step = core::add_step(plan, kDecodeSm90);
  step.block_m = own.config.rows, step.block_n = own.config.block_n;
  step.num_warps = own.config.warps, step.num_stages = own.config.stages;
  step.smem_bytes = smem_bytes(own.config);
  step.num_items = own.grid.x;
  step.workspace_bytes = workspace_of(own).bytes;
  core::keep_config(step, own);
  return step;
}

double decode_sm90_tokens_us(const tessera_plan& plan) {
  return forward_us(plan, kv_heads(plan) * row_of(kKeyTimes, plan).one_tile);
}
bool decodes_chunks(const tessera_plan& plan) {
  return !plan.problem.batch_invariant && most_have_few(plan) && plan.max_seqlen_k >= kLeastKeys &&
         refuse_decode_sm90(plan, plan.max_seqlen_q).empty();
}

constinit const Family kDecodeSm90{{"decode_sm90", TESSERA_KERNEL_DECODE_SM90, refuse, configure, estimate_us},
                                   kSupports,
                                   list_launches,
                                   kPrebuilt,
                                   tiles_json,
                                   &kAlignment};

}  // namespace tessera::cuda
