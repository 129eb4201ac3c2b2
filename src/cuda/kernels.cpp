#include "cuda/kernels.hpp"

#include <algorithm>

#include "core/status.hpp"
#include "cuda/jit.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kCombineWarps = 4;  // as combine.cuh has it

// Rows of a SharedTile of kernels/tessera/tile/shared_tile.cuh.
int64_t pitch_bytes(Dtype dtype, int columns) {
  return int64_t{columns} * dtype_bytes(dtype) + (dtype == Dtype::kFloat32 ? 32 : 16);
}

template <class Config, class Params>
tessera_status launch_kernel(const char* name, const Config& config, const Params& params, Grid grid,
                             const tessera_device& device, void* stream) {
  Kernel kernel;
  TESSERA_RETURN_IF_ERROR(find_kernel<Config>(name, config, device, spec_of, kernel));
  return launch(kernel, device, grid.x, grid.y, grid.z, stream, &params, sizeof params);
}

}  // namespace

int64_t smem_bytes(const FwdConfig& config) {
  const int64_t k_pitch = pitch_bytes(config.dtype, config.head_dim);
  const int64_t v_pitch = pitch_bytes(config.dtype, config.head_dim_v);
  return config.block_m * std::max(k_pitch, v_pitch) + int64_t{config.stages} * config.block_n * (k_pitch + v_pitch);
}

KernelSpec spec_of(const FwdConfig& config) {
  return {"fwd_sm80",           "FwdParams",       config_text(config), config.warps * kWarpThreads,
          config.blocks_per_sm, smem_bytes(config)};
}

KernelSpec spec_of(const CombineConfig& config) {
  return {"combine", "CombineParams", config_text(config), kCombineWarps * kWarpThreads, 1, 0};
}

tessera_status launch_fwd_sm80(const FwdConfig& config, const FwdParams& params, Grid grid,
                               const tessera_device& device, void* stream) {
  return launch_kernel("fwd_sm80", config, params, grid, device, stream);
}

tessera_status launch_combine(const CombineConfig& config, const CombineParams& params, const tessera_device& device,
                              void* stream) {
  const int64_t rows = int64_t{params.batch} * params.rows * params.heads;
  if (rows == 0) return ok();
  return launch_kernel("combine", config, params, {static_cast<uint32_t>(divide_up(rows, kCombineWarps))}, device,
                       stream);
}

}  // namespace tessera::cuda
