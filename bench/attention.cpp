#include "attention.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <span>

#include "core/fields.hpp"

namespace bench {
namespace {

using tessera::layout;

// For one sequence.
double visible_pairs(const Shape& shape, int64_t seqlen_q, int64_t seqlen_k) {
  double pairs = 0;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    const int64_t diagonal = i + seqlen_k - seqlen_q;
    int64_t first = 0, last = seqlen_k - 1;
    if (shape.window_left >= 0) first = std::max(first, diagonal - shape.window_left);
    if (shape.window_right >= 0) last = std::min(last, diagonal + shape.window_right);
    if (shape.causal) last = std::min(last, diagonal);
    pairs += static_cast<double>(std::max<int64_t>(0, last - first + 1));
  }
  return pairs;
}

// [B, S, H, D], in the shape's memory order.
tessera::Layout dense(const Shape& shape, int64_t seqlen, int64_t heads) {
  const auto dtype = static_cast<tessera::DType>(shape.dtype);
  if (!shape.heads_first) return layout(dtype, {shape.batch, seqlen, heads, shape.head_dim});
  return tessera::permute(layout(dtype, {shape.batch, heads, seqlen, shape.head_dim}), {0, 2, 1, 3});
}

tessera::Problem forward_problem(const Shape& shape) {
  tessera::Problem problem;
  const auto dtype = static_cast<tessera::DType>(shape.dtype);
  const int64_t dim = shape.head_dim;
  if (shape.packed.empty()) {
    problem.q = dense(shape, shape.seqlen_q, shape.heads_q);
    problem.k = dense(shape, shape.seqlen_k, shape.heads_kv);
  } else {
    const int64_t total = std::accumulate(shape.packed.begin(), shape.packed.end(), int64_t{0});
    problem.q = layout(dtype, {total, shape.heads_q, dim});
    problem.k = layout(dtype, {total, shape.heads_kv, dim});
    problem.cu_seqlens_q = layout(tessera::int32, {static_cast<int64_t>(shape.packed.size()) + 1});
    problem.cu_seqlens_k = problem.cu_seqlens_q;
    problem.max_seqlen_q = problem.max_seqlen_k = std::ranges::max(shape.packed);
  }
  problem.v = problem.k;
  problem.o = problem.q;
  problem.lse = tessera::lse_layout(problem);
  if (shape.bias) problem.bias = layout(dtype, {1, shape.heads_q, shape.seqlen_q, shape.seqlen_k});
  if (shape.alibi) problem.alibi_slopes = layout(tessera::float32, {shape.heads_q});
  if (shape.sink) problem.sink = layout(tessera::float32, {shape.heads_q});
  problem.causal = shape.causal;
  problem.set_window(shape.window_left, shape.window_right);
  problem.softcap = shape.softcap;
  problem.dropout_p = shape.dropout_p;
  return problem;
}

}  // namespace

double visible_pairs(const Shape& shape) {
  if (shape.packed.empty()) {
    return static_cast<double>(shape.batch) * visible_pairs(shape, shape.seqlen_q, shape.seqlen_k);
  }
  double pairs = 0;
  for (const int64_t length : shape.packed) pairs += visible_pairs(shape, length, length);
  return pairs;
}

double attention_flops(const Shape& shape) {
  const double flops_per_element = shape.direction == TESSERA_FORWARD ? 4 : 10;
  return flops_per_element * static_cast<double>(shape.heads_q * shape.head_dim) * visible_pairs(shape);
}

double kv_bytes(const Shape& shape) {
  const int64_t elements = 2 * shape.batch * shape.seqlen_k * shape.heads_kv * shape.head_dim;
  return static_cast<double>(elements) * static_cast<double>(tessera_dtype_bytes(shape.dtype));
}

Attention::Attention(const Shape& shape, const tessera_device& device, uint64_t seed) {
  const tessera::Problem problem = forward_problem(shape);
  plan_ = tessera::plan(problem, device);
  if (!shape.packed.empty()) buffers_.cu_seqlens_q = buffers_.cu_seqlens_k = cumulative(shape.packed);
  if (shape.alibi) {
    auto* slopes = static_cast<float*>(uninitialised(problem.alibi_slopes));
    for (int64_t head = 0; head < shape.heads_q; ++head) slopes[head] = 1.0f / static_cast<float>(2 << (head % 8));
    buffers_.alibi_slopes = slopes;
  }
  allocate_rest(problem, seed);
  workspace_ = Buffer(tessera::workspace_bytes(plan_));
  if (shape.direction == TESSERA_BACKWARD) become_backward(problem, device, seed);
}

// The backward pass reads o and lse of a forward pass.
void Attention::become_backward(const tessera::Problem& forward, const tessera_device& device, uint64_t seed) {
  run();
  tessera::Problem problem = tessera::gradient_of(forward);
  problem.d_sink = problem.sink;
  plan_ = tessera::plan(problem, device);
  workspace_ = Buffer(tessera::workspace_bytes(plan_));
  allocate_rest(problem, seed);
}

// Allocates every tensor of the problem that has no memory yet, with random numbers in inputs.
void Attention::allocate_rest(const tessera::Problem& problem, uint64_t seed) {
  tessera_buffers buffers = buffers_;
  for (const tessera::core::TensorField& field : tessera::core::kTensorFields) {
    ++seed;
    const tessera_layout& layout = problem.*field.layout;
    if (layout.rank == 0 || field.pointer(buffers) != nullptr) continue;
    const bool read = field.written == tessera::core::Written::kNever;
    field.set_pointer(buffers, read ? random(layout, seed) : uninitialised(layout));
  }
  buffers_ = std::bit_cast<tessera::Buffers>(buffers);
}

void Attention::run(const Buffer& workspace) const {
  const auto execute = plan_.problem.direction == TESSERA_FORWARD ? tessera::forward : tessera::backward;
  execute(plan_, buffers_, std::as_writable_bytes(workspace.as<char>()), nullptr);
}

void* Attention::random(const tessera::Layout& layout, uint64_t seed) {
  return owned_.emplace_back(random_normal(tessera::elements(layout), layout.dtype, seed)).data();
}

void* Attention::uninitialised(const tessera::Layout& layout) {
  const size_t elem_bytes = tessera::size_bytes(tessera::dtype(layout));
  return owned_.emplace_back(static_cast<size_t>(tessera::elements(layout)) * elem_bytes).data();
}

const int32_t* Attention::cumulative(const std::vector<int64_t>& lengths) {
  const auto bounds = owned_.emplace_back((lengths.size() + 1) * sizeof(int32_t)).as<int32_t>();
  bounds[0] = 0;
  for (size_t b = 0; b < lengths.size(); ++b) bounds[b + 1] = bounds[b] + static_cast<int32_t>(lengths[b]);
  return bounds.data();
}

}  // namespace bench
