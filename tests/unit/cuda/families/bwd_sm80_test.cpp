// bwd_sm80 with the S/dP warp split, kernels/tessera/bwd_sm80, as a plan launches it on Hopper, run on the host
// (tests/emulated_gpu) and compared with the float64 reference.
#include "emulated_call.hpp"
#include "tessera/bwd_sm80/rows.cuh"
#include "tessera/bwd_sm80/warp_split.cuh"

namespace tessera::cuda {
namespace {

template <Dtype kDtype, int kHeadDim>
struct Kernels {
  static constexpr bool kLarge = kHeadDim > 128;
  static constexpr BwdConfig products{.dtype = kDtype,
                                      .head_dim = kHeadDim,
                                      .head_dim_v = kHeadDim,
                                      .block_m = 64,
                                      .block_n = kLarge ? 64 : 128,
                                      .warps = 8,
                                      .s_dp_split = true,
                                      .column_parts = kLarge ? 4 : 2,
                                      .stages = 2,
                                      .min_blocks_per_sm = 1,
                                      .aligned = true,
                                      .bulk_dq = kHeadDim % 64 == 0,
                                      .d_bias = false,
                                      .deterministic = false,
                                      .score = {}};
  static constexpr BwdRowsConfig rows{.dtype = kDtype,
                                      .head_dim = kHeadDim,
                                      .head_dim_v = kHeadDim,
                                      .block_m = products.block_m,
                                      .store_keys = products.bulk_dq ? products.block_n : 0,
                                      .aligned = true,
                                      .d_bias = false,
                                      .d_sink = false};
  static bool run(const Launch& l) {
    return try_kernel<products>(l, "bwd_sm80_split", bwd_sm80_split<products>) ||
           try_kernel<rows>(l, "bwd_rows", bwd_rows<rows>);
  }
};

// Several tiles, the last of them partial; causal, rows that see nothing, too. `most`: relative RMS error. The oracle's
// results are rounded as well: of bfloat16 dV has 2.5e-3 to 2.6e-3 so, dQ and dK have 2.6e-3 to 2.8e-3, and 3.1e-3 to
// 3.4e-3 where dS is made of P in bfloat16.
template <Dtype kDtype, int kHeadDim>
void check(bool causal, double most) {
  const DType dtype = kDtype == Dtype::kBFloat16 ? bfloat16 : float16;
  Problem p(dtype, 200, 140, kHeadDim, kHeadDim, causal, 0, false), oracle = p;
  oracle.oracle(oracle.forward);
  oracle.oracle(oracle.backward);
  p.o = oracle.o, p.lse = oracle.lse;
  p.emulate<Kernels<kDtype, kHeadDim>>(p.backward, TESSERA_KERNEL_BWD_SM80);
  expect_near(p.d_q, oracle.d_q, dtype, most, "d_q");
  expect_near(p.d_k, oracle.d_k, dtype, most, "d_k");
  expect_near(p.d_v, oracle.d_v, dtype, most, "d_v");
}

TEST(CudaBwdSm80Split, BFloat16HasGradientsOfWeightsThatAreNotRounded) {
  check<Dtype::kBFloat16, 128>(false, 3e-3);
  check<Dtype::kBFloat16, 128>(true, 3e-3);
  check<Dtype::kBFloat16, 256>(false, 3e-3);
}

TEST(CudaBwdSm80Split, NoBulkCopiesOfColumnsThatAreNoMultipleOf64) { check<Dtype::kBFloat16, 96>(true, 3e-3); }

TEST(CudaBwdSm80Split, Float16AgreesWithTheOracle) { check<Dtype::kFloat16, 128>(true, 5e-4); }

}  // namespace
}  // namespace tessera::cuda
