// The kernels for comparison, kernels/tessera/{fwd_fa1,bwd_fa1,standard}, as a plan launches them, run on the host
// (tests/emulated_gpu) and held against the float64 oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "core/convert.hpp"
#include "cuda/cuda.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "tessera/bwd_fa1/kernel.cuh"
#include "tessera/bwd_sm80/rows.cuh"
#include "tessera/fwd_fa1/kernel.cuh"
#include "tessera/standard/product.cuh"
#include "tessera/standard/rows.cuh"
#include "tessera/tensor.hpp"
#include "unit_launch.hpp"

namespace tessera::cuda {
namespace {

// ---- a launch, by the kernel of its config -------------------------------------------------------------------------

// Runs the launch if it is of this kernel and config.
template <auto kConfig, class Params>
bool try_kernel(const Launch& launch, const char* name, void (*kernel)(const Params&)) {
  if (std::strcmp(launch.name, name) != 0) return false;
  std::remove_const_t<decltype(kConfig)> config = kConfig;
  if (config_values(config).value != launch.values.value) return false;
  Params params;
  std::memcpy(static_cast<void*>(&params), launch.params, sizeof params);
  return emulated::run_blocks({launch.grid.x, launch.grid.y, launch.grid.z}, launch.spec().threads,
                              launch.spec().smem_bytes, [&] { kernel(params); }) == 0;
}

template <Dtype kDtype, int kHeadDim, ScoreConfig kScore>
struct Kernels {
  static constexpr int kParts = kHeadDim == 64 ? 1 : 2;
  static constexpr FwdConfig fwd_fa1{.dtype = kDtype,
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

// ---- a problem ------------------------------------------------------------------------------------------------------

constexpr int64_t kBatch = 2, kHeads = 1;

struct Problem {
  tessera_problem forward{}, backward{};
  std::vector<uint16_t> q, k, v, o, d_o, d_q, d_k, d_v;
  std::vector<float> lse;
  std::vector<uint8_t> mask;
  std::vector<char> workspace;

  Problem(DType dtype, int64_t sq, int64_t sk, int64_t d, int64_t dv, bool causal, double dropout, bool masked) {
    tessera_problem& p = forward;
    tessera_problem_init(&p);
    p.q = layout(dtype, {kBatch, sq, kHeads, d}), p.k = layout(dtype, {kBatch, sk, kHeads, d});
    p.o = layout(dtype, {kBatch, sq, kHeads, dv}), p.v = layout(dtype, {kBatch, sk, kHeads, dv});
    p.lse = layout(float32, {kBatch, kHeads, sq});
    p.causal = causal, p.dropout_p = dropout, p.dropout_seed = 7, p.dropout_offset = 3;
    std::mt19937 random(1);
    if (masked) {
      p.mask = layout(boolean, {1, 1, sq, sk});
      mask.resize(static_cast<size_t>(sq * sk));
      for (size_t n = 0; n < mask.size(); ++n) mask[n] = random() % 4 != 0 && static_cast<int64_t>(n) / sk != 5;
    }
    backward = p;
    backward.direction = TESSERA_BACKWARD;
    backward.d_o = p.o, backward.d_q = p.q, backward.d_k = p.k, backward.d_v = p.v;
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<uint16_t>& tensor, const tessera_layout& of, bool drawn) {
      tensor.assign(static_cast<size_t>(kBatch * of.shape[1] * kHeads * of.shape[3]), 0xffff);  // NaN
      for (uint16_t& x : tensor) {
        const float value = normal(random);
        if (drawn) x = dtype == bfloat16 ? core::float_to_bfloat16(value) : core::float_to_float16(value);
      }
    };
    fill(q, p.q, true), fill(k, p.k, true), fill(v, p.v, true), fill(d_o, p.o, true);
    fill(o, p.o, false), fill(d_q, p.q, false), fill(d_k, p.k, false), fill(d_v, p.v, false);
    lse.assign(static_cast<size_t>(kBatch * kHeads * sq), std::nanf(""));
  }

  tessera_buffers buffers() {
    tessera_buffers b{};
    b.q = q.data(), b.k = k.data(), b.v = v.data(), b.o = o.data(), b.lse = lse.data(), b.d_o = d_o.data();
    b.d_q = d_q.data(), b.d_k = d_k.data(), b.d_v = d_v.data();
    if (!mask.empty()) b.mask = mask.data();
    return b;
  }

  tessera_plan plan(const tessera_problem& problem, tessera_device device, tessera_kernel kernel) {
    device.kernel = kernel;
    tessera_plan plan{};
    const tessera_status status = tessera_make_plan(&problem, &device, &plan);
    EXPECT_EQ(status.code, TESSERA_OK) << status.message;
    workspace.assign(tessera_workspace_bytes(&plan), '\xff');
    return plan;
  }
  void oracle(const tessera_problem& problem) {
    tessera_device cpu{};
    ASSERT_EQ(tessera_device_cpu(&cpu).code, TESSERA_OK);
    const tessera_plan made = plan(problem, cpu, TESSERA_KERNEL_REFERENCE);
    const tessera_buffers b = buffers();
    const auto run = problem.direction == TESSERA_BACKWARD ? tessera_backward : tessera_forward;
    const tessera_status status = run(&made, &b, workspace.data(), workspace.size(), nullptr);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  }
  template <class Kernels>
  void emulate(const tessera_problem& problem, tessera_kernel kernel) {
    tessera_device gpu{};
    ASSERT_EQ(tessera_device_cuda_arch(90, &gpu).code, TESSERA_OK);
    const tessera_plan made = plan(problem, gpu, kernel);
    const tessera_buffers b = buffers();
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    LaunchList list;
    const tessera_status status = lower(made, b, reinterpret_cast<void*>((address + 63) / 64 * 64), list);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    for (const Launch& launch : list) ASSERT_TRUE(Kernels::run(launch)) << launch.name << " " << launch.spec().config;
  }
};

// Relative RMS error, and that no NaN is there that the oracle has not.
void expect_near(const std::vector<uint16_t>& got, const std::vector<uint16_t>& oracle, DType dtype, double most,
                 const char* name) {
  double error = 0, norm = 0;
  for (size_t n = 0; n < got.size(); ++n) {
    const auto value = [dtype](uint16_t bits) {
      return dtype == bfloat16 ? core::bfloat16_to_float(bits) : core::float16_to_float(bits);
    };
    const double difference = value(got[n]) - value(oracle[n]);
    ASSERT_FALSE(std::isnan(difference)) << name << "[" << n << "]";
    error += difference * difference, norm += static_cast<double>(value(oracle[n])) * value(oracle[n]);
  }
  EXPECT_LT(std::sqrt(error / norm), most) << name;
}

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
