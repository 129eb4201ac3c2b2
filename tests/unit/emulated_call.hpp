// A call of attention on the emulated GPU (tests/emulated_gpu): the launches of its plan, with the kernels of their
// configs, and the reference's results beside it.
#pragma once

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
#include "tessera/ptx/device.cuh"
#include "tessera/tensor.hpp"
#include "unit_launch.hpp"

namespace tessera::cuda {

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

// ---- a problem ------------------------------------------------------------------------------------------------------

inline constexpr int64_t kBatch = 2, kHeads = 1;

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

// Relative RMS error; also checks that there is no NaN where the reference has none.
inline void expect_near(const std::vector<uint16_t>& got, const std::vector<uint16_t>& oracle, DType dtype, double most,
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

}  // namespace tessera::cuda
