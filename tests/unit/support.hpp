// Shared by the unit tests: small problems, and one attention problem with its own memory in float64.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// q [2, 16, 4, 8], k [2, 24, 2, 8], v [2, 24, 2, 6], o [2, 16, 4, 6]
inline Problem dense_problem(DType dtype = float32) {
  Problem problem;
  problem.q = layout(dtype, {2, 16, 4, 8});
  problem.k = layout(dtype, {2, 24, 2, 8});
  problem.v = layout(dtype, {2, 24, 2, 6});
  problem.o = layout(dtype, {2, 16, 4, 6});
  return problem;
}

// Three sequences: q [16, 4, 8], k [24, 2, 8], v [24, 2, 6], o [16, 4, 6]
inline Problem packed_problem(DType dtype = float32) {
  Problem problem;
  problem.q = layout(dtype, {16, 4, 8});
  problem.k = layout(dtype, {24, 2, 8});
  problem.v = layout(dtype, {24, 2, 6});
  problem.o = layout(dtype, {16, 4, 6});
  problem.cu_seqlens_q = problem.cu_seqlens_k = layout(int32, {4});
  return problem;
}

// q [2, 16, 4, 8] over 5 pages of 8 keys, 3 pages a sequence
inline Problem paged_problem(DType dtype = float32) {
  Problem problem = dense_problem(dtype);
  problem.k = layout(dtype, {5, 8, 2, 8});
  problem.v = layout(dtype, {5, 8, 2, 6});
  problem.page_table = layout(int32, {2, 3});
  problem.seqused_k = layout(int32, {2});
  return problem;
}

// The same pages by page_indptr and page_indices.
inline Problem csr_problem(DType dtype = float32) {
  Problem problem = paged_problem(dtype);
  problem.page_table = {};
  problem.page_indptr = layout(int32, {3});
  problem.page_indices = layout(int32, {6});
  return problem;
}

// One group of sequences that share a prefix.
inline void share_prefixes(Problem& problem) {
  problem.prefix_groups = layout(int32, {2});
  problem.prefix_lens = layout(int32, {1});
}

// The reference kernel on a device whose other properties do not matter.
inline Device reference_device() {
  Device device = cpu();
  device.kernel = TESSERA_KERNEL_REFERENCE;
  return device;
}

// Elements from the first to the last in memory, for layouts without negative strides.
inline std::size_t span_elements(const Layout& layout) {
  if (elements(layout) == 0) return 0;
  std::int64_t last = 0;
  for (int axis = 0; axis < layout.rank; ++axis) last += (layout.shape[axis] - 1) * layout.strides[axis];
  return static_cast<std::size_t>(last + 1);
}

// A float64 problem with all of its tensors, run by the reference kernel. Set the problem's layouts and options, then
// allocate().
struct Attention {
  Problem problem;
  std::vector<double> q, k, v, o, bias, d_o, d_q, d_k, d_v;
  std::vector<float> lse, lse_low, alibi_slopes, sink, d_lse, d_bias, d_sink;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, page_indptr, page_indices;
  std::vector<std::int32_t> prefix_groups, prefix_lens;
  std::vector<std::uint8_t> mask, block_mask;

  // Inputs are normal, outputs NaN. Index tensors are the caller's to fill in.
  void allocate(std::mt19937_64& random) {
    std::normal_distribution<double> normal;
    const auto fill = [&](auto& data, const Layout& layout) {
      data.resize(span_elements(layout));
      for (auto& x : data) x = static_cast<std::remove_reference_t<decltype(x)>>(normal(random));
    };
    fill(q, problem.q);
    fill(k, problem.k);
    fill(v, problem.v);
    fill(bias, problem.bias);
    fill(alibi_slopes, problem.alibi_slopes);
    for (float& slope : alibi_slopes) slope = std::fabs(slope) / 4;
    fill(sink, problem.sink);
    for (float& logit : sink) logit = std::round(logit * 64) / 64;
    fill(d_o, problem.d_o);
    fill(d_lse, problem.d_lse);
    const auto coin = [&](auto& data, const Layout& layout) {
      data.resize(span_elements(layout));
      for (auto& x : data) x = random() % 4 != 0;
    };
    coin(mask, problem.mask);
    coin(block_mask, problem.block_mask);
    o.assign(span_elements(problem.o), kNaN);
    lse.assign(span_elements(problem.lse), std::numeric_limits<float>::quiet_NaN());
    lse_low.assign(span_elements(problem.lse_low), std::numeric_limits<float>::quiet_NaN());
    d_q.assign(span_elements(problem.d_q), kNaN);
    d_k.assign(span_elements(problem.d_k), kNaN);
    d_v.assign(span_elements(problem.d_v), kNaN);
    d_bias.assign(span_elements(problem.d_bias), std::numeric_limits<float>::quiet_NaN());
    d_sink.assign(span_elements(problem.d_sink), std::numeric_limits<float>::quiet_NaN());
  }

  Buffers buffers() {
    return {.q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .o = o.data(),
            .lse = lse.data(),
            .cu_seqlens_q = cu_seqlens_q.data(),
            .cu_seqlens_k = cu_seqlens_k.data(),
            .seqused_k = seqused_k.data(),
            .page_table = page_table.data(),
            .bias = bias.data(),
            .mask = mask.data(),
            .block_mask = block_mask.data(),
            .alibi_slopes = alibi_slopes.data(),
            .sink = sink.data(),
            .d_o = d_o.data(),
            .d_q = d_q.data(),
            .d_k = d_k.data(),
            .d_v = d_v.data(),
            .d_lse = d_lse.data(),
            .d_bias = d_bias.data(),
            .d_sink = d_sink.data(),
            .page_indptr = page_indptr.data(),
            .page_indices = page_indices.data(),
            .prefix_groups = prefix_groups.data(),
            .prefix_lens = prefix_lens.data(),
            .lse_low = lse_low.data()};
  }

  Status try_run(std::int32_t direction) {
    Problem asked = problem;
    asked.direction = direction;
    Plan plan;
    const Status planned = try_plan(asked, reference_device(), plan);
    if (!planned.ok()) return planned;
    std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xFF});
    return direction == TESSERA_BACKWARD ? try_backward(plan, buffers(), workspace)
                                         : try_forward(plan, buffers(), workspace);
  }
  void forward() { throw_if_error(try_run(TESSERA_FORWARD)); }
  void backward() { throw_if_error(try_run(TESSERA_BACKWARD)); }
};

}  // namespace tessera::test
