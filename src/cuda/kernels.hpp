// One launch function per kernel: each takes the kernel's config and params struct.
#pragma once

#include <cstdint>

#include "cuda/runtime/codegen.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// How each kernel is compiled. `smem_bytes` is the size of its SharedMemoryPlan.
KernelSpec spec_of(const FwdSm80Config& config);
KernelSpec spec_of(const FwdSm90Config& config);
KernelSpec spec_of(const BlockListsConfig& config);
KernelSpec spec_of(const DqOrderConfig& config);
KernelSpec spec_of(const ProgramListsConfig& config, bool bounds);
KernelSpec spec_of(const LiveTilesConfig& config);
KernelSpec spec_of(const ProgramSumsConfig& config);
KernelSpec spec_of(const FwdSm90D512Config& config);
KernelSpec spec_of(const FwdSm90Fp8Config& config);
KernelSpec spec_of(const CombineConfig& config);
KernelSpec spec_of(const AppendConfig& config);
KernelSpec spec_of(const MoveRowsConfig& config);
KernelSpec spec_of(const WriteWordsConfig& config);
KernelSpec spec_of(const PrefixIndicesConfig& config);
KernelSpec spec_of(const BwdConfig& config);
KernelSpec spec_of(const BwdRowsConfig& config);
KernelSpec spec_of(const BwdSm90Config& config);
KernelSpec spec_of(const BwdSm90D256Config& config);
KernelSpec spec_of(const BwdSm90D512Config& config);
KernelSpec spec_of(const BwdSm90RowsConfig& config, bool after);
KernelSpec spec_of(const BwdSm90ProductsConfig& config);
KernelSpec spec_of(const BwdSm90GroupConfig& config);
KernelSpec spec_of(const DecodeSm90Config& config);
KernelSpec spec_of(const StandardProductConfig& config);
KernelSpec spec_of(const StandardRowsConfig& config);
KernelSpec fwd_fa1_spec_of(const FwdSm80Config& config);
KernelSpec bwd_fa1_spec_of(const BwdConfig& config);

inline constexpr int32_t kHopper = 90;                // the first architecture with bulk copies (TMA)
inline constexpr int kHopperSharedBytes = 227 << 10;  // shared memory available to a block on Hopper

// By each family's layout (config.hpp of its device code).
int64_t smem_bytes(const FwdSm80Config& config);
int64_t smem_bytes(const FwdSm90Config& config);
int64_t smem_bytes(const FwdSm90D512Config& config);
int64_t smem_bytes(const FwdSm90Fp8Config& config);
int64_t smem_bytes(const BwdConfig& config);
int64_t smem_bytes(const BwdSm90Config& config);
int64_t smem_bytes(const DecodeSm90Config& config);
int64_t smem_bytes(const BwdSm90D256Config& config);
int64_t smem_bytes(const BwdSm90D512Config& config);
int64_t smem_bytes(const StandardProductConfig& config);

// Each adds a launch to the call's list.
void launch_fwd_sm80(const FwdSm80Config& config, const FwdSm80BulkParams& params, Grid grid, LaunchList& launches);
void launch_fwd_sm80(const FwdSm80Config& config, const FwdSm80CodesParams& params, Grid grid, LaunchList& launches);
void launch_fwd_sm90(const FwdSm90Config& config, const FwdSm90Params& params, Grid grid, LaunchList& launches);
void launch_live_tiles(const LiveTilesConfig& config, const LiveTilesParams& params, LaunchList& launches);
void launch_program_sums(const ProgramSumsConfig& config, const ProgramSumsParams& params, Grid grid,
                         LaunchList& launches);
void launch_block_lists(const BlockListsConfig& config, const BlockListsParams& params, LaunchList& launches);
// The two kernels that make a score program's lists; the second one's spec.
KernelSpec spec_of_program_lists(const void* config);
// `lists`: how many are made.
void launch_program_lists(const ProgramListsConfig& config, const ProgramListsParams& params, int lists,
                          LaunchList& launches);
// LaunchList's spec_of of the kernel that orders the additions to dQ.
KernelSpec spec_of_dq_order(const void* config);
void launch_dq_order(const DqOrderConfig& config, const DqOrderParams& params, LaunchList& launches);
void launch_fwd_sm90(const FwdSm90D512Config& config, const FwdSm90Params& params, Grid grid, LaunchList& launches);
void launch_fwd_sm90_fp8(const FwdSm90Fp8Config& config, const FwdSm90Fp8Params& params, Grid grid,
                         LaunchList& launches);
tessera_status launch_combine(const CombineConfig& config, const CombineParams& params, LaunchList& launches);
tessera_status launch_append(const AppendConfig& config, const AppendParams& params, LaunchList& launches);
void launch_move_rows(const MoveRowsConfig& config, const MoveRowsParams& params, LaunchList& launches);
void launch_write_words(const WriteWordsParams& params, LaunchList& launches);
void launch_prefix_indices(const PrefixIndicesConfig& config, const PrefixIndicesParams& params, LaunchList& launches);
void launch_bwd_sm80(const BwdConfig& config, const BwdSm80Params& params, Grid grid, LaunchList& launches);
void launch_bwd_rows(const BwdRowsConfig& config, const BwdParams& params, Grid grid, LaunchList& launches);
void launch_bwd_sm90(const BwdSm90Config& config, const BwdSm90Params& params, Grid grid, LaunchList& launches);
void launch_bwd_sm90(const BwdSm90D256Config& config, const BwdSm90Params& params, Grid grid, LaunchList& launches);
void launch_bwd_sm90(const BwdSm90D512Config& config, const BwdSm90Params& params, Grid grid, LaunchList& launches);
void launch_bwd_sm90_before(const BwdSm90RowsConfig& config, const BwdSm90Params& params, Grid grid,
                            LaunchList& launches);
void launch_bwd_sm90_after(const BwdSm90RowsConfig& config, const BwdParams& params, Grid grid, LaunchList& launches);
void launch_bwd_sm90_after(const BwdSm90ProductsConfig& config, const BwdParams& params, Grid grid,
                           LaunchList& launches);
void launch_bwd_sm90_group(const BwdSm90GroupConfig& config, const BwdSm90Params& params, Grid grid,
                           LaunchList& launches);
void launch_decode_sm90(const DecodeSm90Config& config, const DecodeSm90Params& params, Grid grid,
                        LaunchList& launches);
void launch_fwd_fa1(const FwdSm80Config& config, const FwdFa1Params& params, Grid grid, LaunchList& launches);
void launch_bwd_fa1(const BwdConfig& config, const BwdParams& params, Grid grid, LaunchList& launches);
void launch_standard_product(const StandardProductConfig& config, const StandardProductParams& params, Grid grid,
                             LaunchList& launches);
void launch_standard_rows(const StandardRowsConfig& config, const StandardRowsParams& params, Grid grid,
                          LaunchList& launches);

}  // namespace tessera::cuda
