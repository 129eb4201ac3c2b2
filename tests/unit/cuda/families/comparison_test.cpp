// The kernels for comparison, kernels/tessera/comparison, as a plan launches them, run on the host (tests/emulated_gpu)
// and compared with the float64 reference.
#include "emulated_call.hpp"
#include "tessera/bwd_sm80/rows.cuh"
#include "tessera/comparison/bwd_fa1/kernel.cuh"
#include "tessera/comparison/fwd_fa1/kernel.cuh"
#include "tessera/comparison/standard/product.cuh"
#include "tessera/comparison/standard/rows.cuh"

namespace tessera::cuda {
namespace {

template <Dtype kDtype, int kHeadDim, ScoreConfig kScore>
struct Kernels {
  static constexpr int kParts = kHeadDim == 64 ? 1 : 2;
  static constexpr FwdSm80Config fwd_fa1{.dtype = kDtype,
                                         .head_dim = kHeadDim,
                                         .head_dim_v = kHeadDim,
                                         .block_m = 128,
                                         .block_n = 128,
                                         .warps = 8,
                                         .stages = 1,
                                         .min_blocks_per_sm = 1,
                                         .aligned = true,
                                         .paged = false,
                                         .pack_gqa = false,
                                         .split = false,
                                         .row_map = RowMap::kContiguous,
                                         .bulk = false,
                                         .score = kScore};
  static constexpr BwdConfig bwd_fa1{.dtype = kDtype,
                                     .head_dim = kHeadDim,
                                     .head_dim_v = kHeadDim,
                                     .block_m = 64,
                                     .block_n = 128,
                                     .warps = 8,
                                     .s_dp_split = false,
                                     .column_parts = kParts,
                                     .stages = 2,
                                     .min_blocks_per_sm = 1,
                                     .aligned = true,
                                     .bulk_dq = false,
                                     .d_bias = false,
                                     .deterministic = false,
                                     .score = kScore};
  static constexpr BwdRowsConfig rows{.dtype = kDtype,
                                      .head_dim = kHeadDim,
                                      .head_dim_v = kHeadDim,
                                      .block_m = 64,
                                      .store_keys = 0,
                                      .aligned = true,
                                      .d_bias = false,
                                      .d_sink = false};
  static constexpr StandardProductConfig product(bool transpose_a, bool transpose_b, bool probabilities, bool dropped) {
    return {.dtype = kDtype,
            .transpose_a = transpose_a,
            .transpose_b = transpose_b,
            .block_n = transpose_b ? 128 : kHeadDim,
            .stages = 3,
            .aligned = true,
            .probabilities = probabilities,
            .mask = probabilities && kScore.mask,
            .dropout = dropped && kScore.dropout};
  }
  static constexpr StandardRowsConfig softmax(bool gradient) {
    return {.dtype = kDtype,
            .threads = 32,
            .vectors = 4,
            .gradient = gradient,
            .mask = kScore.mask && !gradient,
            .dropout = kScore.dropout};
  }

  static bool run(const Launch& l) {
    constexpr auto kS = product(false, true, false, false), kP = product(false, true, true, true),
                   kPv = product(false, false, false, false), kDv = product(true, false, false, true),
                   kDk = product(true, false, false, false);
    constexpr auto kSoftmax = softmax(false), kGradient = softmax(true);
    return try_kernel<fwd_fa1>(l, "fwd_fa1", tessera::fwd_fa1<fwd_fa1>) ||
           try_kernel<bwd_fa1>(l, "bwd_fa1", tessera::bwd_fa1<bwd_fa1>) ||
           try_kernel<rows>(l, "bwd_rows", tessera::bwd_rows<rows>) ||
           try_kernel<kS>(l, "standard_product", standard_product<kS>) ||
           try_kernel<kP>(l, "standard_product", standard_product<kP>) ||
           try_kernel<kPv>(l, "standard_product", standard_product<kPv>) ||
           try_kernel<kDv>(l, "standard_product", standard_product<kDv>) ||
           try_kernel<kDk>(l, "standard_product", standard_product<kDk>) ||
           try_kernel<kSoftmax>(l, "standard_rows", standard_rows<kSoftmax>) ||
           try_kernel<kGradient>(l, "standard_rows", standard_rows<kGradient>);
  }
};

struct Case {
  DType dtype;
  int64_t sq, sk;
  bool causal;
  double dropout;
  bool masked;
};

template <class Kernels>
void check(const Case& c, int64_t d, int64_t dv, bool standard) {
  SCOPED_TRACE(standard ? "standard" : "fa1");
  Problem p(c.dtype, c.sq, c.sk, d, dv, c.causal, c.dropout, c.masked), oracle = p;
  oracle.oracle(oracle.forward);
  oracle.oracle(oracle.backward);
  p.emulate<Kernels>(p.forward, standard ? TESSERA_KERNEL_FWD_STANDARD : TESSERA_KERNEL_FWD_FA1);
  const double most = c.dtype == bfloat16 ? (standard ? 8e-3 : 4e-3) : (standard ? 1e-3 : 5e-4);
  expect_near(p.o, oracle.o, c.dtype, most, "o");
  for (size_t n = 0; n < p.lse.size(); ++n) {
    if (p.lse[n] == oracle.lse[n]) continue;  // -inf
    EXPECT_NEAR(p.lse[n], oracle.lse[n], standard ? 0.02 : 1e-4) << "lse " << n;
  }
  p.o = oracle.o, p.lse = oracle.lse;
  p.emulate<Kernels>(p.backward, standard ? TESSERA_KERNEL_BWD_STANDARD : TESSERA_KERNEL_BWD_FA1);
  expect_near(p.d_v, oracle.d_v, c.dtype, most, "d_v");
  expect_near(p.d_q, oracle.d_q, c.dtype, most, "d_q");
  expect_near(p.d_k, oracle.d_k, c.dtype, most, "d_k");
}

// Several tiles, the last of them partial, and rows that see nothing.
TEST(CudaComparison, CausalAgreesWithTheOracle) {
  using Bf16 = Kernels<Dtype::kBFloat16, 64, ScoreConfig{}>;
  for (const bool standard : {false, true}) check<Bf16>({bfloat16, 200, 140, true, 0, false}, 64, 64, standard);
}

// Values wider and narrower than keys.
TEST(CudaComparison, StandardAttentionTakesValuesOfAnotherSize) {
  using Bf16 = Kernels<Dtype::kBFloat16, 64, ScoreConfig{}>;
  for (const auto& [d, dv] : {std::pair{40, 64}, std::pair{64, 24}}) {
    check<Bf16>({bfloat16, 70, 140, true, 0, false}, d, dv, true);
  }
}

TEST(CudaComparison, FullAgreesWithTheOracle) {
  using Half128 = Kernels<Dtype::kFloat16, 128, ScoreConfig{}>;
  for (const bool standard : {false, true}) check<Half128>({float16, 70, 140, false, 0, false}, 128, 128, standard);
}

TEST(CudaComparison, DropoutAndMaskAgreeWithTheOracle) {
  constexpr ScoreConfig kBoth = [] {
    ScoreConfig score{};
    score.mask = score.dropout = true;
    return score;
  }();
  using Half64 = Kernels<Dtype::kFloat16, 64, kBoth>;
  for (const bool standard : {false, true}) check<Half64>({float16, 70, 90, true, 0.25, true}, 64, 64, standard);
}

}  // namespace
}  // namespace tessera::cuda
