// A problem with a program of the table (definitions.hpp), run by the oracle and by a kernel: outputs and gradients,
// those of the program's tensors included.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/score/definitions.hpp"
#include "core/score/program_of.hpp"
#include "support.hpp"

namespace tessera::test {

namespace score = core::score;
using testing::definitions;
using testing::World;

// A number that float32 and bfloat16 hold.
inline float rounded(double x, bool bf16) {
  auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(x));
  if (bf16) bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  return std::bit_cast<float>(bits);
}
inline std::vector<std::uint16_t> as_bf16(const std::vector<double>& x) {
  std::vector<std::uint16_t> out;
  for (const double value : x) {
    out.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(rounded(value, true)) >> 16));
  }
  return out;
}

// Packed sequences: their offsets, and the rows of the packed tensors, of which the last may belong to no sequence.
struct PackedSequences {
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
  std::int64_t rows_q = 0, rows_k = 0;
};

// One problem with a definition's program in float64, for the oracle, and the same numbers in the dtype of the kernels.
struct Programmed {
  Programmed(size_t number, bool is_bf16, std::int64_t queries, std::int64_t head_dim = 16,
             std::int64_t head_dim_v = 24)
      : Programmed(number, is_bf16, World(number + 1), queries, head_dim, head_dim_v) {}
  // Of packed sequences `queries` and the world's keys are the most that one has. Rows of no sequence hold NaN.
  Programmed(size_t number, bool is_bf16, World of, std::int64_t queries, std::int64_t head_dim,
             std::int64_t head_dim_v, PackedSequences sequences = {})
      : definition(definitions()[number]),
        world(std::move(of)),
        bf16(is_bf16),
        d(head_dim),
        dv(head_dim_v),
        packed(std::move(sequences)) {
    world.len_q = queries;
    for (auto& [name, tensor] : world.tensors) {
      for (double& x : tensor.data) x = static_cast<float>(x);
    }
    handle = program_of(definition, world, program);
    integers.resize(program.tensors.size()), truths.resize(program.tensors.size());
    floats.resize(program.tensors.size());
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      const testing::WorldTensor& tensor = world.tensors.at(program.tensors[n].text);
      floats[n].assign(tensor.data.begin(), tensor.data.end());
      integers[n].assign(tensor.data.begin(), tensor.data.end());
      truths[n].assign(tensor.data.begin(), tensor.data.end());
    }
    std::mt19937_64 random(number);
    oracle.problem = gradient_of(problem_of(float64, float64));
    with_gradients(oracle.problem, float64);
    oracle.allocate(random);
    for (std::vector<double>* x : {&oracle.q, &oracle.k, &oracle.v, &oracle.d_o}) {
      for (double& value : *x) value = rounded(value, bf16);
    }
    oracle.cu_seqlens_q = packed.cu_seqlens_q, oracle.cu_seqlens_k = packed.cu_seqlens_k;
    if (packed.rows_q == 0) return;
    const auto poison = [](std::vector<double>& x, std::int32_t first, std::int64_t row) {
      std::fill(x.begin() + first * row, x.end(), NAN);
    };
    poison(oracle.q, packed.cu_seqlens_q.back(), world.heads * d);
    poison(oracle.d_o, packed.cu_seqlens_q.back(), world.heads * dv);
    poison(oracle.k, packed.cu_seqlens_k.back(), world.heads_kv * d);
    poison(oracle.v, packed.cu_seqlens_k.back(), world.heads_kv * dv);
  }
  ~Programmed() { tessera_program_release(handle); }
  Programmed(const Programmed&) = delete;
  Programmed& operator=(const Programmed&) = delete;

  Problem problem_of(DType dtype, DType captured) const {
    Problem problem;
    problem.q = layout(dtype, {world.batch, world.len_q, world.heads, d});
    problem.k = layout(dtype, {world.batch, world.len_k, world.heads_kv, d});
    problem.v = layout(dtype, {world.batch, world.len_k, world.heads_kv, dv});
    problem.o = layout(dtype, {world.batch, world.len_q, world.heads, dv});
    problem.lse = layout(float32, {world.batch, world.heads, world.len_q});
    if (packed.rows_q > 0) {
      problem.q = layout(dtype, {packed.rows_q, world.heads, d});
      problem.k = layout(dtype, {packed.rows_k, world.heads_kv, d});
      problem.v = layout(dtype, {packed.rows_k, world.heads_kv, dv});
      problem.o = layout(dtype, {packed.rows_q, world.heads, dv});
      problem.lse = layout(float32, {world.heads, packed.rows_q});
      problem.cu_seqlens_q = problem.cu_seqlens_k = layout(int32, {world.batch + 1});
      problem.max_seqlen_q = world.len_q, problem.max_seqlen_k = world.len_k;
    }
    problem.program = handle;
    problem.list_capacity = list_capacity;
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      const DType dtypes[] = {captured, int32, boolean};
      std::vector<std::int64_t> shape = world.tensors.at(program.tensors[n].text).shape;
      if (shape.empty()) shape = {1};
      problem.captured[n] = layout(dtypes[static_cast<int>(program.tensors[n].type)], shape);
    }
    return problem;
  }
  void with_gradients(Problem& problem, DType captured) const {
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      if (program.tensors[n].type != score::Type::kFloat) continue;
      problem.d_captured[n] = problem.captured[n];
      problem.d_captured[n].dtype = static_cast<std::int32_t>(captured);
    }
  }
  // The captured tensors and where their gradients go.
  template <class T>
  void bind(Buffers& buffers, const std::vector<std::vector<T>>& captured, std::vector<std::vector<T>>& gradients) {
    gradients.resize(program.tensors.size());
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      gradients[n].assign(captured[n].size(), static_cast<T>(NAN));
      const void* const data[] = {captured[n].data(), integers[n].data(), truths[n].data()};
      buffers.captured[n] = data[static_cast<int>(program.tensors[n].type)];
      buffers.d_captured[n] = gradients[n].data();
    }
    for (size_t n = 0; n < program.scalars.size(); ++n) {
      buffers.scalars[n] = world.scalars.at(program.scalars[n].text);
    }
  }

  static void execute_here(const Plan& plan, const Buffers& buffers, std::int32_t direction) {
    std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xFF});
    direction == TESSERA_BACKWARD ? backward(plan, buffers, workspace) : forward(plan, buffers, workspace);
  }

  void run_oracle() {
    std::vector<std::vector<double>> captured;
    for (const std::vector<float>& values : floats) captured.emplace_back(values.begin(), values.end());
    Buffers buffers = oracle.buffers();
    bind(buffers, captured, d_oracle);
    execute_here(plan(problem_of(float64, float64), reference_device()), buffers, TESSERA_FORWARD);
    execute_here(plan(oracle.problem, reference_device()), buffers, TESSERA_BACKWARD);
  }

  // By the kernels of a device; the results as doubles, by name. execute(plan, buffers, direction) makes a call.
  template <class Execute>
  std::map<std::string, std::vector<double>> run(const Device& device, bool with_backward, std::string& kernel,
                                                 Execute&& execute) {
    const DType dtype = bf16 ? bfloat16 : float32;
    const std::vector<double>* inputs[] = {&oracle.q, &oracle.k, &oracle.v, &oracle.d_o};
    std::vector<float> in32[4];
    std::vector<std::uint16_t> in16[4];
    const void* in[4];
    for (int n = 0; n < 4; ++n) {
      in32[n].assign(inputs[n]->begin(), inputs[n]->end());
      in16[n] = as_bf16(*inputs[n]);
      in[n] = bf16 ? static_cast<const void*>(in16[n].data()) : in32[n].data();
    }
    const auto out = [&](size_t count) { return std::vector<float>(count, NAN); };
    std::vector<float> o = out(oracle.o.size()), lse = out(oracle.lse.size());
    std::vector<float> d_q = out(oracle.d_q.size()), d_k = out(oracle.d_k.size()), d_v = out(oracle.d_v.size());
    Buffers buffers{.q = in[0],
                    .k = in[1],
                    .v = in[2],
                    .o = o.data(),
                    .lse = lse.data(),
                    .cu_seqlens_q = packed.cu_seqlens_q.data(),
                    .cu_seqlens_k = packed.cu_seqlens_k.data(),
                    .d_o = in[3],
                    .d_q = d_q.data(),
                    .d_k = d_k.data(),
                    .d_v = d_v.data()};
    std::vector<std::vector<float>> gradients;
    bind(buffers, floats, gradients);
    const Problem problem = problem_of(dtype, float32);
    const Plan forward_plan = plan(problem, device);
    kernel = tessera_kernel_name(forward_plan.kernel);
    execute(forward_plan, buffers, TESSERA_FORWARD);
    std::map<std::string, std::vector<double>> results;
    const auto add = [&](const std::string& name, const std::vector<float>& values, bool is_bf16) {
      std::vector<double>& to = results[name];
      if (!is_bf16) return to.assign(values.begin(), values.end());
      const auto* words = reinterpret_cast<const std::uint16_t*>(values.data());
      for (size_t n = 0; n < values.size(); ++n) to.push_back(std::bit_cast<float>(std::uint32_t{words[n]} << 16));
    };
    add("o", o, bf16);
    add("lse", lse, false);
    if (!with_backward) return results;
    Problem of_gradient = gradient_of(problem);
    if (captured_gradients) with_gradients(of_gradient, float32);
    of_gradient.deterministic = deterministic;
    const Plan backward_plan = plan(of_gradient, backward_device ? *backward_device : device);
    backward_kernel = tessera_kernel_name(backward_plan.kernel);
    execute(backward_plan, buffers, TESSERA_BACKWARD);
    add("d_q", d_q, bf16);
    add("d_k", d_k, bf16);
    add("d_v", d_v, bf16);
    for (size_t n = 0; captured_gradients && n < program.tensors.size(); ++n) {
      if (program.tensors[n].type == score::Type::kFloat) add("d_" + program.tensors[n].text, gradients[n], false);
    }
    return results;
  }

  // The oracle's, by the same names.
  std::map<std::string, std::vector<double>> expected() const {
    std::map<std::string, std::vector<double>> all = {
        {"o", oracle.o}, {"d_q", oracle.d_q}, {"d_k", oracle.d_k}, {"d_v", oracle.d_v}};
    all["lse"].assign(oracle.lse.begin(), oracle.lse.end());
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      if (program.tensors[n].type == score::Type::kFloat) all["d_" + program.tensors[n].text] = d_oracle[n];
    }
    return all;
  }

  const testing::Definition& definition;
  World world;
  bool bf16;
  std::int64_t d, dv;              // head sizes
  PackedSequences packed;          // without rows: sequences are dense
  bool captured_gradients = true;  // whether the backward pass computes them
  bool deterministic = false;      // of the backward pass
  std::int64_t list_capacity = 0;
  const Device* backward_device = nullptr;  // NULL: the forward pass's
  std::string backward_kernel;
  score::Program program;
  tessera_program* handle = nullptr;
  Attention oracle;
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<std::int32_t>> integers;
  std::vector<std::vector<std::uint8_t>> truths;
  std::vector<std::vector<double>> d_oracle;
};

// Each tensor within a share of its largest number: programs such as squares make some scores large.
inline void expect_near(const Programmed& call, const std::map<std::string, std::vector<double>>& results,
                        const std::string& where, double share_bf16 = 3e-2, double share = 2e-5) {
  const std::map<std::string, std::vector<double>> expected = call.expected();
  for (const auto& [name, values] : results) {
    const std::vector<double>& right = expected.at(name);
    ASSERT_EQ(values.size(), right.size()) << name;
    double largest = 1;
    for (const double x : right) largest = std::isfinite(x) ? std::max(largest, std::fabs(x)) : largest;
    const double tolerance = largest * (call.bf16 && name != "lse" ? share_bf16 : share);
    for (size_t n = 0; n < values.size(); ++n) {
      const bool same = values[n] == right[n] || std::fabs(values[n] - right[n]) <= tolerance;
      ASSERT_TRUE(same) << call.definition.name << " " << where << " " << name << "[" << n << "] is " << right[n]
                        << ", not " << values[n];
    }
  }
}

}  // namespace tessera::test
