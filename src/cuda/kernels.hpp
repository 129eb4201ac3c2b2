// The launches, one function a kernel: what a config is compiled into, and a params struct put into a stream.
#pragma once

#include <cstdint>

#include "cuda/codegen.hpp"
#include "tessera/config.hpp"
#include "tessera/params.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

// How each kernel is compiled. `smem_bytes` is its SharedMemoryPlan's size.
KernelSpec spec_of(const FwdConfig& config);
KernelSpec spec_of(const FwdSm90Config& config);
KernelSpec spec_of(const CombineConfig& config);
KernelSpec spec_of(const BwdConfig& config);
KernelSpec spec_of(const BwdRowsConfig& config);

inline constexpr int32_t kHopper = 90;  // the first architecture with bulk copies (TMA)

// From a row of kernels/tessera/tile/shared_tile.cuh's SharedTile to the next.
int64_t pitch_bytes(Dtype dtype, int columns);

int64_t smem_bytes(const FwdConfig& config);
int64_t smem_bytes(const FwdSm90Config& config);
int64_t smem_bytes(const BwdConfig& config);

// The stream's context is current, where launches reach a stream (prepare.hpp).
tessera_status launch_fwd_sm80(const FwdConfig& config, const FwdBulkParams& params, Grid grid,
                               const tessera_device& device, void* stream);
tessera_status launch_fwd_sm90(const FwdSm90Config& config, const FwdSm90Params& params, Grid grid,
                               const tessera_device& device, void* stream);
tessera_status launch_combine(const CombineConfig& config, const CombineParams& params, const tessera_device& device,
                              void* stream);
tessera_status launch_bwd_sm80(const BwdConfig& config, const BwdParams& params, Grid grid,
                               const tessera_device& device, void* stream);
tessera_status launch_bwd_rows(const BwdRowsConfig& config, const BwdParams& params, Grid grid,
                               const tessera_device& device, void* stream);

}  // namespace tessera::cuda
