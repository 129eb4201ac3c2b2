#include "serving.hpp"

#include <algorithm>
#include <numeric>
#include <span>

namespace bench {

double step_flops(const StepShape& shape) {
  double pairs = 0;
  for (const int64_t tokens : shape.new_tokens) {
    const auto n = static_cast<double>(tokens);
    pairs += n * static_cast<double>(shape.keys) - n * (n - 1) / 2;
  }
  return 4 * pairs * static_cast<double>(shape.heads_q * shape.head_dim);
}

ServingStep::ServingStep(const StepShape& shape, const tessera_device& device, uint64_t seed) {
  const auto dtype = static_cast<tessera::DType>(shape.dtype);
  const auto batch = static_cast<int64_t>(shape.new_tokens.size());
  const int64_t tokens = std::accumulate(shape.new_tokens.begin(), shape.new_tokens.end(), int64_t{0});
  const int64_t a_sequence = (shape.keys + shape.page_size - 1) / shape.page_size;
  tessera::Problem problem;
  problem.q = problem.o = tessera::layout(dtype, {tokens, shape.heads_q, shape.head_dim});
  problem.k = problem.v = tessera::layout(dtype, {batch * a_sequence, shape.page_size, shape.heads_kv, shape.head_dim});
  problem.cu_seqlens_q = tessera::layout(tessera::int32, {batch + 1});
  problem.seqused_k = tessera::layout(tessera::int32, {batch});
  problem.page_table = tessera::layout(tessera::int32, {batch, a_sequence});
  problem.causal = true;
  problem.max_seqlen_q = std::ranges::max(shape.new_tokens);
  plan_ = tessera::plan(problem, device);

  cu_seqlens_q_.push_back(0);
  for (const int64_t n : shape.new_tokens) cu_seqlens_q_.push_back(cu_seqlens_q_.back() + static_cast<int32_t>(n));
  seqused_k_.assign(static_cast<size_t>(batch), static_cast<int32_t>(shape.keys));
  page_table_.resize(static_cast<size_t>(batch * a_sequence));
  std::iota(page_table_.begin(), page_table_.end(), 0);
  q_ = random_normal(tessera::elements(problem.q), shape.dtype, seed);
  k_ = random_normal(tessera::elements(problem.k), shape.dtype, seed + 1);
  v_ = random_normal(tessera::elements(problem.v), shape.dtype, seed + 2);
  o_ = Buffer(q_.bytes());
  workspace_ = Buffer(plan_.workspace_bytes);
  buffers_ = {.q = q_.data(), .k = k_.data(), .v = v_.data(), .o = o_.data()};
  buffers_.cu_seqlens_q = cu_seqlens_q_.data();
  buffers_.seqused_k = seqused_k_.data();
  buffers_.page_table = page_table_.data();
}

void ServingStep::run() const { tessera::forward(plan_, buffers_, workspace_.as<std::byte>()); }

}  // namespace bench
