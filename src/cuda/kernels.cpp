#include "cuda/kernels.hpp"

#include <algorithm>
#include <cinttypes>
#include <initializer_list>

#include "core/status.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

constexpr int kWarpThreads = 32, kWarpgroupThreads = 128;
constexpr int kCombineWarps = 4, kBwdRowsThreads = 128;
// Blocks on a multiprocessor whose warps suffice to hide the latency of memory.
constexpr int kCombineBlocks = 5, kBwdRowsBlocks = 7, kAppendBlocks = 3, kStandardProductBlocks = 2;

// The template, its file under tessera/, and its shared-memory struct.
struct KernelText {
  const char *name, *header, *shared_memory;
};
KernelText text_of(const FwdSm80Config& config) {
  switch (config.row_map) {
    case RowMap::kPairs:
      return {"fwd_sm80_pairs", "tessera/fwd_sm80/pairs.cuh", "FwdPairsSharedMemory"};
    case RowMap::kSpread:
      return {"fwd_sm80_persistent", "tessera/fwd_sm80/persistent.cuh", "FwdPersistentSharedMemory"};
    case RowMap::kContiguous:
      break;
  }
  if (has_codes(config)) return {"fwd_sm80_codes", "tessera/fwd_sm80/codes.cuh", "FwdCodesSharedMemory"};
  return config.bulk ? KernelText{"fwd_sm80_bulk", "tessera/fwd_sm80/bulk.cuh", "FwdBulkSharedMemory"}
                     : KernelText{"fwd_sm80", "tessera/fwd_sm80/kernel.cuh", "FwdSharedMemory"};
}
KernelText text_of(const BwdConfig& config) {
  return config.s_dp_split ? KernelText{"bwd_sm80_split", "tessera/bwd_sm80/warp_split.cuh", "BwdSharedMemory"}
                           : KernelText{"bwd_sm80", "tessera/bwd_sm80/kernel.cuh", "BwdSharedMemory"};
}

// A check that the kernel's shared-memory struct has the size that it is launched with.
template <class Config>
std::string shared_memory_claim(const std::string& name, const Config& config) {
  return "sizeof(tessera::" + name + "<" + config_text(config) + ">) == " + std::to_string(smem_bytes(config));
}

// Whether all columns can be loaded and stored in groups of four.
bool combine_aligned(const CombineConfig& config, const CombineParams& p) {
  const auto starts = [](Dtype dtype, const void* data, std::initializer_list<int64_t> strides) {
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(kCombineWidth * dtype_bytes(dtype)) == 0 &&
           std::ranges::all_of(strides, [](int64_t stride) { return stride % kCombineWidth == 0; });
  };
  const CombineChunks& c = p.chunks;
  return p.head_dim_v % kCombineWidth == 0 &&
         starts(config.part_dtype, p.o_parts,
                {p.o_part, p.o_part_batch, p.o_part_row, p.o_part_head, config.chunks ? c.o_in_group : 0}) &&
         starts(config.dtype, p.o.data, {p.o.batch, p.o.row, p.o.head}) &&
         (!(config.chunks || config.accumulate) ||
          starts(config.part_dtype, c.own_o, {c.own_o_batch, c.own_o_row, c.own_o_head}));
}

template <class Config, class Params>
void launch_kernel(const char* name, const Config& config, const Params& params, const Grid& grid,
                   LaunchList& launches) {
  const auto spec = [](const void* of) { return spec_of(*static_cast<const Config*>(of)); };
  launches.add(name, config, spec, grid, params);
}

}  // namespace

int64_t smem_bytes(const FwdSm80Config& config) { return fwd_sm80_layout(config).bytes; }
int64_t smem_bytes(const FwdSm90Config& config) { return fwd_sm90_layout(config).bytes; }
int64_t smem_bytes(const FwdSm90D512Config& config) { return fwd_sm90_d512_layout(config).bytes; }
int64_t smem_bytes(const FwdSm90Fp8Config& config) { return fwd_sm90_fp8_layout(config).bytes; }
int64_t smem_bytes(const BwdConfig& config) { return bwd_layout(config).bytes; }

int64_t smem_bytes(const BwdSm90Config& config) { return bwd_sm90_layout(config).bytes; }
int64_t smem_bytes(const DecodeSm90Config& config) { return decode_sm90_layout(config).bytes; }
int64_t smem_bytes(const BwdSm90D256Config& config) {
  return std::max(bwd_sm90_d256_layout(config, 0).bytes, bwd_sm90_d256_layout(config, 1).bytes);
}
int64_t smem_bytes(const BwdSm90D512Config&) { return bwd_sm90_d512_layout().bytes; }
int64_t smem_bytes(const StandardProductConfig& config) { return standard_product_bytes(config); }

KernelSpec spec_of(const FwdSm80Config& config) {
  const KernelText text = text_of(config);
  return {.name = text.name,
          .header = text.header,
          // A program's params follow those that the host passes.
          .params = has_codes(config)                     ? "FwdSm80CodesParams"
                    : config.bulk || config.score.program ? "FwdSm80BulkParams"
                                                          : "FwdSm80Params",
          .config = config_text(config),
          .threads = config.warps * kWarpThreads,
          .min_blocks_per_sm = config.min_blocks_per_sm,
          .smem_bytes = smem_bytes(config),
          .claim = shared_memory_claim(text.shared_memory, config)};
}

KernelSpec spec_of(const FwdSm90Config& config) {
  return {.name = "fwd_sm90",
          .header = "tessera/fwd_sm90/kernel.cuh",
          .params = "FwdSm90Params",
          .config = config_text(config),
          .threads = (config.consumers + 1) * kWarpgroupThreads,
          .cluster = config.cluster_blocks(),
          .smem_bytes = smem_bytes(config),
          .begins_early = true,
          .claim = shared_memory_claim("FwdSm90SharedMemory", config)};
}

KernelSpec spec_of(const BlockListsConfig& config) {
  return {.name = "block_lists",
          .header = "tessera/block_lists/kernel.cuh",
          .params = "BlockListsParams",
          .config = config_text(config),
          .threads = kBlockListsWarps * kWarpThreads,
          .limits = {.registers = 64},
          .claim = "sizeof(tessera::BlockListsParams) == " + std::to_string(sizeof(BlockListsParams))};
}

KernelSpec spec_of(const DqOrderConfig& config) {
  return {.name = "dq_order",
          .header = "tessera/block_lists/dq_order.cuh",
          .params = "DqOrderParams",
          .config = config_text(config),
          .threads = kBlockListsWarps * kWarpThreads,
          .limits = {.registers = 64},
          .claim = "sizeof(tessera::DqOrderParams) == " + std::to_string(sizeof(DqOrderParams))};
}

KernelSpec spec_of(const ProgramListsConfig& config, bool bounds) {
  return {.name = bounds ? "program_bounds" : "program_lists",
          .header = bounds ? "tessera/block_lists/program_bounds.cuh" : "tessera/block_lists/program_lists.cuh",
          .params = "ProgramListsParams",
          .config = config_text(config),
          .threads = bounds ? kProgramBoundsThreads : kProgramListsThreads,
          .claim = "sizeof(tessera::ProgramListsParams) == " + std::to_string(sizeof(ProgramListsParams))};
}

KernelSpec spec_of(const LiveTilesConfig& config) {
  return {.name = "live_tiles",
          .header = "tessera/live_tiles/kernel.cuh",
          .params = "LiveTilesParams",
          .config = config_text(config),
          .threads = kLiveTilesThreads,
          .limits = {.registers = 64},
          .claim = "sizeof(tessera::LiveTilesParams) == " + std::to_string(sizeof(LiveTilesParams))};
}

KernelSpec spec_of(const ProgramSumsConfig& config) {
  return {.name = "program_sums",
          .header = "tessera/program_sums/kernel.cuh",
          .params = "ProgramSumsParams",
          .config = config_text(config),
          .threads = kProgramSumsThreads,
          .limits = {.registers = 64},
          .claim = "sizeof(tessera::ProgramSumsParams) == " + std::to_string(sizeof(ProgramSumsParams))};
}

KernelSpec spec_of(const FwdSm90D512Config& config) {
  return {.name = "fwd_sm90_d512",
          .header = "tessera/fwd_sm90_d512/kernel.cuh",
          .params = "FwdSm90Params",
          .config = config_text(config),
          .threads = kFwdD512Threads,
          .cluster = kFwdD512ClusterBlocks,
          .smem_bytes = smem_bytes(config),
          .claim = "sizeof(tessera::FwdSm90Params) == " + std::to_string(sizeof(FwdSm90Params))};
}

KernelSpec spec_of(const FwdSm90Fp8Config& config) {
  return {.name = "fwd_sm90_fp8",
          .header = "tessera/fwd_sm90/fp8/kernel.cuh",
          .params = "FwdSm90Fp8Params",
          .config = config_text(config),
          .threads = (config.consumers + kFp8ProducerWarpgroups) * kWarpgroupThreads,
          .smem_bytes = smem_bytes(config),
          .begins_early = true,
          .claim = shared_memory_claim("Fp8SharedMemory", config)};
}

KernelSpec spec_of(const CombineConfig& config) {
  return {.name = "combine",
          .header = "tessera/combine/kernel.cuh",
          .params = "CombineParams",
          .config = config_text(config),
          .threads = kCombineWarps * kWarpThreads,
          .min_blocks_per_sm = kCombineBlocks,
          .begins_early = true,
          .limits = {.registers = 96},
          .claim = "tessera::kCombineWarps == " + std::to_string(kCombineWarps)};
}

KernelSpec spec_of(const PrefixIndicesConfig& config) {
  return {.name = "prefix_indices",
          .header = "tessera/shared_prefix/kernel.cuh",
          .params = "PrefixIndicesParams",
          .config = config_text(config),
          .threads = kPrefixIndicesWarps * kWarpThreads,
          .begins_early = true,
          .limits = {.registers = 64},
          .claim = "sizeof(tessera::PrefixIndicesParams) == " + std::to_string(sizeof(PrefixIndicesParams))};
}

KernelSpec spec_of(const AppendConfig& config) {
  // With three blocks a multiprocessor, float32 rows of four heads on their way to 8 bits would spill, and rows of 16
  // bits do on Blackwell.
  const bool codes = dtype_bytes(config.cache) == 1, wide = codes && config.dtype == Dtype::kFloat32;
  const int32_t spill_bytes = codes && !wide ? 40 : 0, stack_bytes = codes && !wide ? 24 : 0;
  return {.name = "append",
          .header = "tessera/append/kernel.cuh",
          .params = "AppendParams",
          .config = config_text(config),
          .threads = kAppendThreads,
          .min_blocks_per_sm = wide ? 2 : kAppendBlocks,
          .begins_early = true,
          .limits = {.registers = wide ? 128 : 96, .spill_bytes = spill_bytes, .stack_bytes = stack_bytes},
          .claim = "sizeof(tessera::AppendParams) == " + std::to_string(sizeof(AppendParams))};
}

KernelSpec spec_of(const MoveRowsConfig& config) {
  return {.name = "move_rows",
          .header = "tessera/move_rows/kernel.cuh",
          .params = "MoveRowsParams",
          .config = config_text(config),
          .threads = kMoveRowsThreads,
          .limits = {.registers = 40},
          .claim = "sizeof(tessera::MoveRowsParams) == " + std::to_string(sizeof(MoveRowsParams))};
}

KernelSpec spec_of(const WriteWordsConfig& config) {
  return {.name = "write_words",
          .header = "tessera/write_words/kernel.cuh",
          .params = "WriteWordsParams",
          .config = config_text(config),
          .threads = kWriteWordsThreads,
          .limits = {.registers = 40},
          .claim = "sizeof(tessera::WriteWordsParams) == " + std::to_string(sizeof(WriteWordsParams))};
}

KernelSpec spec_of(const BwdConfig& config) {
  const KernelText text = text_of(config);
  return {.name = text.name,
          .header = text.header,
          .params = "BwdSm80Params",
          .config = config_text(config),
          .threads = config.warps * kWarpThreads,
          .min_blocks_per_sm = config.min_blocks_per_sm,
          .smem_bytes = smem_bytes(config),
          .claim = shared_memory_claim(text.shared_memory, config)};
}

KernelSpec spec_of(const BwdRowsConfig& config) {
  return {.name = "bwd_rows",
          .header = "tessera/bwd_sm80/rows.cuh",
          .params = "BwdParams",
          .config = config_text(config),
          .threads = kBwdRowsThreads,
          .min_blocks_per_sm = kBwdRowsBlocks,
          .limits = {.registers = 72},
          .claim = "tessera::kBwdRowsThreads == " + std::to_string(kBwdRowsThreads)};
}

KernelSpec spec_of(const BwdSm90Config& config) {
  return {.name = "bwd_sm90",
          .header = "tessera/bwd_sm90/kernel.cuh",
          .params = "BwdSm90Params",
          .config = config_text(config),
          .threads = bwd_sm90_threads(config),
          .smem_bytes = smem_bytes(config),
          // At launch; with whole_head the producer then has 24 and the score warps 240.
          .limits = config.whole_head ? Limits{.registers = 168} : Limits{},
          .claim = "sizeof(tessera::BwdSm90Params) == " + std::to_string(sizeof(BwdSm90Params))};
}

KernelSpec spec_of(const BwdSm90D256Config& config) {
  return {.name = "bwd_sm90_d256",
          .header = "tessera/bwd_sm90_d256/kernel.cuh",
          .params = "BwdSm90Params",
          .config = config_text(config),
          .threads = kBwdSm90Threads,
          .cluster = kBwdD256ClusterBlocks,
          .smem_bytes = smem_bytes(config),
          .claim = "sizeof(tessera::BwdSm90Params) == " + std::to_string(sizeof(BwdSm90Params))};
}

KernelSpec spec_of(const BwdSm90D512Config& config) {
  return {.name = "bwd_sm90_d512",
          .header = "tessera/bwd_sm90_d512/kernel.cuh",
          .params = "BwdSm90Params",
          .config = config_text(config),
          .threads = kBwdD512Threads,
          .cluster = kBwdD512ClusterBlocks,
          .smem_bytes = smem_bytes(config),
          .claim = "sizeof(tessera::BwdSm90Params) == " + std::to_string(sizeof(BwdSm90Params))};
}

KernelSpec spec_of(const BwdSm90RowsConfig& config, bool after) {
  return {.name = after ? "bwd_sm90_after" : "bwd_sm90_before",
          .header = "tessera/bwd_sm90/rows.cuh",
          .params = after ? "BwdParams" : "BwdSm90Params",
          .config = config_text(config),
          .threads = kBwdRowsThreads,
          .limits = {.registers = 96},
          .claim = "tessera::kBwdRowsThreads == " + std::to_string(kBwdRowsThreads)};
}

KernelSpec spec_of(const BwdSm90ProductsConfig& config) {
  return {.name = "bwd_sm90_after_products",
          .header = "tessera/bwd_sm90/product_sums.cuh",
          .params = "BwdParams",
          .config = config_text(config),
          .threads = kBwdRowsThreads,
          .limits = {.registers = 96},
          .claim = "tessera::kBwdRowsThreads == " + std::to_string(kBwdRowsThreads)};
}

KernelSpec spec_of(const BwdSm90GroupConfig& config) {
  return {.name = "bwd_sm90_group",
          .header = "tessera/bwd_sm90/group_sums.cuh",
          .params = "BwdSm90Params",
          .config = config_text(config),
          .threads = kBwdGroupThreads,
          .limits = {.registers = 64},
          .claim = "sizeof(tessera::BwdSm90Params) == " + std::to_string(sizeof(BwdSm90Params))};
}

KernelSpec spec_of(const DecodeSm90Config& config) {
  return {.name = "decode_sm90",
          .header = "tessera/decode_sm90/kernel.cuh",
          .params = "DecodeSm90Params",
          .config = config_text(config),
          .threads = config.warps * kWarpThreads,
          .smem_bytes = smem_bytes(config),
          .begins_early = true,
          .claim = shared_memory_claim("DecodeShared", config)};
}

KernelSpec fwd_fa1_spec_of(const FwdSm80Config& config) {
  return {.name = "fwd_fa1",
          .header = "tessera/comparison/fwd_fa1/kernel.cuh",
          .params = "FwdFa1Params",
          .config = config_text(config),
          .threads = config.warps * kWarpThreads,
          .min_blocks_per_sm = config.min_blocks_per_sm,
          .smem_bytes = fwd_fa1_layout(config).bytes,
          .claim = "sizeof(tessera::FwdFa1Params) == " + std::to_string(sizeof(FwdFa1Params))};
}

KernelSpec bwd_fa1_spec_of(const BwdConfig& config) {
  return {.name = "bwd_fa1",
          .header = "tessera/comparison/bwd_fa1/kernel.cuh",
          .params = "BwdParams",
          .config = config_text(config),
          .threads = config.warps * kWarpThreads,
          .min_blocks_per_sm = config.min_blocks_per_sm,
          .smem_bytes = smem_bytes(config),
          .claim = shared_memory_claim("BwdSharedMemory", config)};
}

KernelSpec spec_of(const StandardProductConfig& config) {
  return {.name = "standard_product",
          .header = "tessera/comparison/standard/product.cuh",
          .params = "StandardProductParams",
          .config = config_text(config),
          .threads = kStandardWarps * kWarpThreads,
          .min_blocks_per_sm = kStandardProductBlocks,
          .smem_bytes = smem_bytes(config),
          .claim = shared_memory_claim("StandardProductSharedMemory", config)};
}

KernelSpec spec_of(const StandardRowsConfig& config) {
  return {.name = "standard_rows",
          .header = "tessera/comparison/standard/rows.cuh",
          .params = "StandardRowsParams",
          .config = config_text(config),
          .threads = standard_rows_threads(config),
          .claim = "sizeof(tessera::StandardRowsParams) == " + std::to_string(sizeof(StandardRowsParams))};
}

void launch_fwd_sm80(const FwdSm80Config& config, const FwdSm80BulkParams& params, Grid grid, LaunchList& launches) {
  launch_kernel(text_of(config).name, config, params, grid, launches);
}
void launch_fwd_sm80(const FwdSm80Config& config, const FwdSm80CodesParams& params, Grid grid, LaunchList& launches) {
  launch_kernel(text_of(config).name, config, params, grid, launches);
}

void launch_fwd_sm90(const FwdSm90Config& config, const FwdSm90Params& params, Grid grid, LaunchList& launches) {
  launch_kernel("fwd_sm90", config, params, grid, launches);
}

void launch_block_lists(const BlockListsConfig& config, const BlockListsParams& params, LaunchList& launches) {
  const int64_t warps = int64_t{params.batches} * params.heads * params.lists.tiles;
  launch_kernel("block_lists", config, params, Grid{static_cast<uint32_t>(divide_up(warps, kBlockListsWarps))},
                launches);
}

KernelSpec spec_of_program_lists(const void* config) {
  return spec_of(*static_cast<const ProgramListsConfig*>(config), false);
}

void launch_program_lists(const ProgramListsConfig& config, const ProgramListsParams& params, int lists,
                          LaunchList& launches) {
  const auto bounds = [](const void* of) { return spec_of(*static_cast<const ProgramListsConfig*>(of), true); };
  const int64_t groups = int64_t{params.column_masks} * params.column_groups;
  launches.add("program_bounds", config, bounds, Grid{static_cast<uint32_t>(groups)}, params);
  launches.add("program_lists", config, spec_of_program_lists, Grid{static_cast<uint32_t>(lists)}, params);
}

KernelSpec spec_of_dq_order(const void* config) { return spec_of(*static_cast<const DqOrderConfig*>(config)); }

void launch_dq_order(const DqOrderConfig& config, const DqOrderParams& params, LaunchList& launches) {
  const int64_t warps = int64_t{params.masks} * params.blocks;
  launches.add("dq_order", config, spec_of_dq_order, Grid{static_cast<uint32_t>(divide_up(warps, kBlockListsWarps))},
               params);
}

void launch_program_sums(const ProgramSumsConfig& config, const ProgramSumsParams& params, Grid grid,
                         LaunchList& launches) {
  launch_kernel("program_sums", config, params, grid, launches);
}

void launch_live_tiles(const LiveTilesConfig& config, const LiveTilesParams& params, LaunchList& launches) {
  launch_kernel("live_tiles", config, params, Grid{1}, launches);
}

void launch_fwd_sm90(const FwdSm90D512Config& config, const FwdSm90Params& params, Grid grid, LaunchList& launches) {
  launch_kernel("fwd_sm90_d512", config, params, grid, launches);
}

void launch_fwd_sm90_fp8(const FwdSm90Fp8Config& config, const FwdSm90Fp8Params& params, Grid grid,
                         LaunchList& launches) {
  launch_kernel("fwd_sm90_fp8", config, params, grid, launches);
}

tessera_status launch_combine(const CombineConfig& config, const CombineParams& params, LaunchList& launches) {
  const int64_t rows = int64_t{params.batch} * params.rows.value * params.heads.value;
  if (rows > INT32_MAX) return unsupported("combine: %" PRId64 " rows of o, accepted up to 2^31 - 1 on a GPU", rows);
  CombineParams p = params;
  p.aligned = combine_aligned(config, params);
  const int64_t blocks = p.by_block ? rows * combine_row_blocks(p.head_dim_v) : divide_up(rows, kCombineWarps);
  launch_kernel("combine", config, p, Grid{static_cast<uint32_t>(blocks)}, launches);
  return ok();
}

tessera_status launch_append(const AppendConfig& config, const AppendParams& params, LaunchList& launches) {
  const int64_t sequences = params.cu_seqlens ? 1 : params.batch;
  const int64_t tokens = sequences * (int64_t{params.tokens.value} + params.tokens_q.value);
  if (tokens > INT32_MAX)
    return unsupported("k: %" PRId64 " tokens of k and q, accepted up to 2^31 - 1 on a GPU", tokens);
  launch_kernel("append", config, params, Grid{static_cast<uint32_t>(append_blocks(params))}, launches);
  return ok();
}

void launch_move_rows(const MoveRowsConfig& config, const MoveRowsParams& params, LaunchList& launches) {
  const int64_t blocks = divide_up(params.units, kMoveRowsThreads);
  launch_kernel("move_rows", config, params, Grid{static_cast<uint32_t>(blocks)}, launches);
}

void launch_write_words(const WriteWordsParams& params, LaunchList& launches) {
  launch_kernel("write_words", WriteWordsConfig{kWriteWordsMost}, params, Grid{1}, launches);
}

void launch_prefix_indices(const PrefixIndicesConfig& config, const PrefixIndicesParams& params, LaunchList& launches) {
  constexpr int64_t kCopiedBytes = 16, kThreads = kPrefixIndicesWarps * kWarpThreads, kMostCopyBlocks = 1024;
  int64_t blocks = prefix_index_blocks(params.groups);
  if (params.chunks.count > 0) {
    const int64_t words = params.rows_total * params.heads_q.value * params.head_dim * 2 / kCopiedBytes;
    blocks += std::min(divide_up(words, kThreads), kMostCopyBlocks);
  }
  launch_kernel("prefix_indices", config, params, Grid{static_cast<uint32_t>(blocks)}, launches);
}

void launch_bwd_sm80(const BwdConfig& config, const BwdSm80Params& params, Grid grid, LaunchList& launches) {
  launch_kernel(text_of(config).name, config, params, grid, launches);
}

void launch_bwd_rows(const BwdRowsConfig& config, const BwdParams& params, Grid grid, LaunchList& launches) {
  launch_kernel("bwd_rows", config, params, grid, launches);
}

void launch_bwd_sm90(const BwdSm90Config& config, const BwdSm90Params& params, Grid grid, LaunchList& launches) {
  launch_kernel("bwd_sm90", config, params, grid, launches);
}

void launch_bwd_sm90(const BwdSm90D256Config& config, const BwdSm90Params& params, Grid grid, LaunchList& launches) {
  launch_kernel("bwd_sm90_d256", config, params, grid, launches);
}

void launch_bwd_sm90(const BwdSm90D512Config& config, const BwdSm90Params& params, Grid grid, LaunchList& launches) {
  launch_kernel("bwd_sm90_d512", config, params, grid, launches);
}

void launch_bwd_sm90_before(const BwdSm90RowsConfig& config, const BwdSm90Params& params, Grid grid,
                            LaunchList& launches) {
  const auto spec = [](const void* of) { return spec_of(*static_cast<const BwdSm90RowsConfig*>(of), false); };
  launches.add("bwd_sm90_before", config, spec, grid, params);
}

void launch_bwd_sm90_after(const BwdSm90RowsConfig& config, const BwdParams& params, Grid grid, LaunchList& launches) {
  const auto spec = [](const void* of) { return spec_of(*static_cast<const BwdSm90RowsConfig*>(of), true); };
  launches.add("bwd_sm90_after", config, spec, grid, params);
}
void launch_bwd_sm90_after(const BwdSm90ProductsConfig& config, const BwdParams& params, Grid grid,
                           LaunchList& launches) {
  launch_kernel("bwd_sm90_after_products", config, params, grid, launches);
}

void launch_bwd_sm90_group(const BwdSm90GroupConfig& config, const BwdSm90Params& params, Grid grid,
                           LaunchList& launches) {
  launch_kernel("bwd_sm90_group", config, params, grid, launches);
}

void launch_decode_sm90(const DecodeSm90Config& config, const DecodeSm90Params& params, Grid grid,
                        LaunchList& launches) {
  launch_kernel("decode_sm90", config, params, grid, launches);
}

void launch_fwd_fa1(const FwdSm80Config& config, const FwdFa1Params& params, Grid grid, LaunchList& launches) {
  const auto spec = [](const void* of) { return fwd_fa1_spec_of(*static_cast<const FwdSm80Config*>(of)); };
  launches.add("fwd_fa1", config, spec, grid, params);
}

void launch_bwd_fa1(const BwdConfig& config, const BwdParams& params, Grid grid, LaunchList& launches) {
  const auto spec = [](const void* of) { return bwd_fa1_spec_of(*static_cast<const BwdConfig*>(of)); };
  launches.add("bwd_fa1", config, spec, grid, params);
}

void launch_standard_product(const StandardProductConfig& config, const StandardProductParams& params, Grid grid,
                             LaunchList& launches) {
  launch_kernel("standard_product", config, params, grid, launches);
}

void launch_standard_rows(const StandardRowsConfig& config, const StandardRowsParams& params, Grid grid,
                          LaunchList& launches) {
  launch_kernel("standard_rows", config, params, grid, launches);
}

}  // namespace tessera::cuda
