#include "cuda/kernels.hpp"

#include <algorithm>
#include <cinttypes>

#include "core/status.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

constexpr int kWarpThreads = 32, kWarpgroupThreads = 128;
constexpr int kCombineWarps = 4, kBwdRowsThreads = 128;
constexpr int kBarrierBytes = 8;
// Of a multiprocessor: so many warps cover the way to memory.
constexpr int kCombineBlocks = 5, kBwdRowsBlocks = 7;

const char* name_of(const FwdConfig& config) {
  if (config.pairs) return "fwd_sm80_pairs";
  if (config.bulk) return "fwd_sm80_bulk";
  return config.spread_rows ? "fwd_sm80_persistent" : "fwd_sm80";
}

const char* header_of(const FwdConfig& config) {
  if (config.pairs) return "tessera/fwd_sm80/pairs.cuh";
  if (config.bulk) return "tessera/fwd_sm80/bulk.cuh";
  return config.spread_rows ? "tessera/fwd_sm80/persistent.cuh" : "tessera/fwd_sm80/kernel.cuh";
}

const char* shared_memory_of(const FwdConfig& config) {
  if (config.pairs) return "FwdPairsSharedMemory";
  if (config.bulk) return "FwdBulkSharedMemory";
  return config.spread_rows ? "FwdPersistentSharedMemory" : "FwdSharedMemory";
}

// That the kernel's struct of shared memory has the size that it is launched with.
template <class Config>
std::string shared_memory_claim(const std::string& name, const Config& config) {
  return "sizeof(tessera::" + name + "<" + config_text(config) + ">) == " + std::to_string(smem_bytes(config));
}

template <class Config, class Params>
void launch_kernel(const char* name, const Config& config, const Params& params, const Grid& grid,
                   LaunchList& launches) {
  const auto spec = [](const void* of) { return spec_of(*static_cast<const Config*>(of)); };
  launches.add(name, config, spec, grid, params);
}

}  // namespace

int64_t pitch_bytes(Dtype dtype, int columns) {
  return int64_t{columns} * dtype_bytes(dtype) + (dtype == Dtype::kFloat32 ? 32 : 16);
}

int64_t smem_bytes(const FwdConfig& config) {
  const int64_t k_pitch = pitch_bytes(config.dtype, config.head_dim);
  const int64_t v_pitch = pitch_bytes(config.dtype, config.head_dim_v);
  // O takes Q's place, of persistent blocks K's and V's or V's, and these have two works beside; pairs P and two
  // numbers a row. Where tiles may come by bulk copies a stage has two barriers, or four.
  const bool persistent = config.pairs || config.spread_rows;
  const int64_t o_row = persistent ? 0 : v_pitch;
  const int64_t p_row = config.pairs ? pitch_bytes(config.dtype, config.block_n) + 8 : 0;
  const int64_t works = persistent ? 2 * kFwdBlockBytes : 0;
  const int64_t barriers = config.stages * kBarrierBytes * (config.pairs ? 2 : config.bulk ? 4 : 0);
  return config.block_m * (std::max(k_pitch, o_row) + p_row) + works + barriers +
         int64_t{config.stages} * config.block_n * (k_pitch + v_pitch);
}

int64_t smem_bytes(const FwdSm90Config& config) { return fwd_sm90_layout(config).bytes; }

// Tiles, which take turns where there are no stages, then per query its LSE and delta, then the ticket.
int64_t smem_bytes(const BwdConfig& config) {
  const int64_t k_pitch = pitch_bytes(config.dtype, config.head_dim);
  const int64_t v_pitch = pitch_bytes(config.dtype, config.head_dim_v);
  const int64_t stages = std::max(config.stages, 1);
  const int64_t row = config.stages == 0 ? std::max(k_pitch, v_pitch) : k_pitch + v_pitch;
  const int score_tiles = config.halves || config.column_parts > 1 ? 2 : 1;  // P^T only where warps exchange it
  return (config.block_n + stages * config.block_m) * row +
         score_tiles * config.block_n * pitch_bytes(config.dtype, config.block_m) + stages * config.block_m * 8 + 16;
}

KernelSpec spec_of(const FwdConfig& config) {
  return {.name = name_of(config),
          .header = header_of(config),
          .params = config.bulk ? "FwdBulkParams" : "FwdParams",
          .config = config_text(config),
          .threads = config.warps * kWarpThreads,
          .min_blocks_per_sm = config.min_blocks_per_sm,
          .smem_bytes = smem_bytes(config),
          .claim = shared_memory_claim(shared_memory_of(config), config)};
}

KernelSpec spec_of(const FwdSm90Config& config) {
  return {.name = "fwd_sm90",
          .header = "tessera/fwd_sm90/kernel.cuh",
          .params = "FwdSm90Params",
          .config = config_text(config),
          .threads = (config.consumers + 1) * kWarpgroupThreads,
          .cluster = config.cluster,
          .smem_bytes = smem_bytes(config),
          .claim = shared_memory_claim("FwdSm90SharedMemory", config)};
}

KernelSpec spec_of(const CombineConfig& config) {
  return {.name = "combine",
          .header = "tessera/combine/kernel.cuh",
          .params = "CombineParams",
          .config = config_text(config),
          .threads = kCombineWarps * kWarpThreads,
          .min_blocks_per_sm = kCombineBlocks,
          .limits = {.registers = 96},
          .claim = "tessera::kCombineWarps == " + std::to_string(kCombineWarps)};
}

KernelSpec spec_of(const BwdConfig& config) {
  return {.name = "bwd_sm80",
          .header = "tessera/bwd_sm80/kernel.cuh",
          .params = "BwdParams",
          .config = config_text(config),
          .threads = config.warps * kWarpThreads,
          .min_blocks_per_sm = config.min_blocks_per_sm,
          .smem_bytes = smem_bytes(config),
          .claim = shared_memory_claim("BwdSharedMemory", config)};
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

void launch_fwd_sm80(const FwdConfig& config, const FwdBulkParams& params, Grid grid, LaunchList& launches) {
  launch_kernel(name_of(config), config, params, grid, launches);
}

void launch_fwd_sm90(const FwdSm90Config& config, const FwdSm90Params& params, Grid grid, LaunchList& launches) {
  launch_kernel("fwd_sm90", config, params, grid, launches);
}

tessera_status launch_combine(const CombineConfig& config, const CombineParams& params, LaunchList& launches) {
  const int64_t rows = int64_t{params.batch} * params.rows * params.heads;
  if (rows == 0) return ok();
  const int64_t blocks = divide_up(rows, kCombineWarps);
  if (blocks > INT32_MAX) return unsupported("combine: %" PRId64 " rows of o, accepted up to 2^33 on a GPU", rows);
  launch_kernel("combine", config, params, Grid{static_cast<uint32_t>(blocks)}, launches);
  return ok();
}

void launch_bwd_sm80(const BwdConfig& config, const BwdParams& params, Grid grid, LaunchList& launches) {
  launch_kernel("bwd_sm80", config, params, grid, launches);
}

void launch_bwd_rows(const BwdRowsConfig& config, const BwdParams& params, Grid grid, LaunchList& launches) {
  launch_kernel("bwd_rows", config, params, grid, launches);
}

}  // namespace tessera::cuda
