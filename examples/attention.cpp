// Attention forward and backward on this machine's CPU: causal, grouped heads (GQA), float32.
//
//   c++ -std=c++20 attention.cpp $(pkg-config --cflags --libs tessera) -o attention && ./attention
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <random>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr std::int64_t B = 2, S = 300, Hq = 8, Hkv = 2, D = 64;

std::vector<float> normal(std::int64_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(size));
  for (float& value : values) value = distribution(random);
  return values;
}

}  // namespace

int main() try {
  // All memory is the caller's.
  const std::vector<float> q = normal(B * S * Hq * D, 1), k = normal(B * S * Hkv * D, 2),
                           v = normal(B * S * Hkv * D, 3);
  std::vector<float> o(q.size()), lse(static_cast<std::size_t>(B * Hq * S));

  // A problem is shapes and options; it holds no pointers.
  tessera::Problem problem;
  problem.q = problem.o = tessera::layout(tessera::float32, {B, S, Hq, D});
  problem.k = problem.v = tessera::layout(tessera::float32, {B, S, Hkv, D});
  problem.lse = tessera::lse_layout(problem);  // [B, Hq, S]: backward needs only this beside q, k, v and o
  problem.causal = true;

  // A plan describes what will run, and serves any number of calls and threads, each with its own workspace.
  const tessera::Plan forward = tessera::plan(problem);
  std::vector<std::byte> workspace(tessera::workspace_bytes(forward));
  tessera::forward(forward, {.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .lse = lse.data()}, workspace);
  std::printf("%s", tessera::describe(forward).c_str());

  // Gradients of q, k and v for a cotangent of o.
  const std::vector<float> d_o = normal(B * S * Hq * D, 4);
  std::vector<float> d_q(q.size()), d_k(k.size()), d_v(v.size());
  const tessera::Plan backward = tessera::plan(tessera::gradient_of(problem));
  workspace.resize(tessera::workspace_bytes(backward));
  tessera::backward(backward,
                    {.q = q.data(),
                     .k = k.data(),
                     .v = v.data(),
                     .o = o.data(),
                     .lse = lse.data(),
                     .d_o = d_o.data(),
                     .d_q = d_q.data(),
                     .d_k = d_k.data(),
                     .d_v = d_v.data()},
                    workspace);

  // Every row of softmax sums to one, so the gradients of v add up to those of o.
  double sum_d_v = 0, sum_d_o = 0;
  for (const float x : d_v) sum_d_v += x;
  for (const float x : d_o) sum_d_o += x;
  std::printf("\nsum of dV %.4f, of dO %.4f\n", sum_d_v, sum_d_o);
  return std::abs(sum_d_v - sum_d_o) < 1e-2 ? 0 : 1;
} catch (const tessera::Error& error) {  // one line: the argument, its value, the accepted values
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
