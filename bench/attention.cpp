#include "attention.hpp"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <stdexcept>

namespace bench {
namespace {

void require(const tessera_status& status) {
  if (status.code != TESSERA_OK) throw std::runtime_error(status.message);
}

tessera_layout contiguous(int32_t dtype, std::initializer_list<int64_t> shape) {
  tessera_layout layout = {};
  layout.dtype = dtype;
  layout.rank = static_cast<int32_t>(shape.size());
  std::ranges::copy(shape, layout.shape);
  int64_t stride = 1;
  for (int32_t dim = layout.rank - 1; dim >= 0; --dim) {
    layout.strides[dim] = stride;
    stride *= layout.shape[dim];
  }
  return layout;
}

int64_t elements(const tessera_layout& layout) {
  return std::accumulate(layout.shape, layout.shape + layout.rank, int64_t{1}, std::multiplies<>());
}

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

tessera_problem make_problem(const Shape& shape) {
  tessera_problem problem;
  tessera_problem_init(&problem);
  problem.direction = shape.direction;
  const int64_t dim = shape.head_dim;
  if (shape.packed.empty()) {
    problem.q = contiguous(shape.dtype, {shape.batch, shape.seqlen_q, shape.heads_q, dim});
    problem.k = contiguous(shape.dtype, {shape.batch, shape.seqlen_k, shape.heads_kv, dim});
    problem.lse = contiguous(TESSERA_FLOAT32, {shape.batch, shape.heads_q, shape.seqlen_q});
  } else {
    const int64_t total = std::accumulate(shape.packed.begin(), shape.packed.end(), int64_t{0});
    const auto bounds = static_cast<int64_t>(shape.packed.size()) + 1;
    problem.q = contiguous(shape.dtype, {total, shape.heads_q, dim});
    problem.k = contiguous(shape.dtype, {total, shape.heads_kv, dim});
    problem.lse = contiguous(TESSERA_FLOAT32, {shape.heads_q, total});
    problem.cu_seqlens_q = problem.cu_seqlens_k = contiguous(TESSERA_INT32, {bounds});
    problem.max_seqlen_q = problem.max_seqlen_k = std::ranges::max(shape.packed);
  }
  problem.v = problem.k;
  problem.o = problem.q;
  if (shape.direction == TESSERA_BACKWARD) {
    problem.d_o = problem.o;
    problem.d_q = problem.q;
    problem.d_k = problem.k;
    problem.d_v = problem.v;
  }
  if (shape.bias) problem.bias = contiguous(shape.dtype, {1, shape.heads_q, shape.seqlen_q, shape.seqlen_k});
  if (shape.alibi) problem.alibi_slopes = contiguous(TESSERA_FLOAT32, {shape.heads_q});
  if (shape.sink) problem.sink = contiguous(TESSERA_FLOAT32, {shape.heads_q});
  if (shape.sink && shape.direction == TESSERA_BACKWARD) problem.d_sink = problem.sink;
  problem.causal = shape.causal;
  problem.window_left = shape.window_left;
  problem.window_right = shape.window_right;
  problem.softcap = shape.softcap;
  problem.dropout_p = shape.dropout_p;
  return problem;
}

// The forward pass whose o and lse the backward pass reads.
tessera_problem forward_of(tessera_problem problem) {
  problem.direction = TESSERA_FORWARD;
  problem.d_o = problem.d_q = problem.d_k = problem.d_v = problem.d_sink = tessera_layout{};
  return problem;
}

tessera_plan make_plan(const tessera_problem& problem, const tessera_device& device) {
  tessera_plan plan;
  require(tessera_make_plan(&problem, &device, &plan));
  return plan;
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
  const tessera_problem problem = make_problem(shape);
  plan_ = make_plan(problem, device);
  buffers_.q = random(problem.q, seed + 1);
  buffers_.k = random(problem.k, seed + 2);
  buffers_.v = random(problem.v, seed + 3);
  buffers_.o = uninitialised(problem.o);
  buffers_.lse = static_cast<float*>(uninitialised(problem.lse));
  if (!shape.packed.empty()) buffers_.cu_seqlens_q = buffers_.cu_seqlens_k = cumulative(shape.packed);
  if (shape.bias) buffers_.bias = random(problem.bias, seed + 4);
  if (shape.sink) buffers_.sink = static_cast<const float*>(random(problem.sink, seed + 5));
  if (shape.alibi) {
    auto* slopes = static_cast<float*>(uninitialised(problem.alibi_slopes));
    for (int64_t head = 0; head < shape.heads_q; ++head) slopes[head] = 1.0f / static_cast<float>(2 << (head % 8));
    buffers_.alibi_slopes = slopes;
  }
  if (shape.direction == TESSERA_BACKWARD) {
    const tessera_plan forward = make_plan(forward_of(problem), device);
    workspace_ = Buffer(tessera_workspace_bytes(&forward));
    require(tessera_forward(&forward, &buffers_, workspace_.data(), workspace_.bytes(), nullptr));
    buffers_.d_o = random(problem.d_o, seed + 6);
    buffers_.d_q = uninitialised(problem.d_q);
    buffers_.d_k = uninitialised(problem.d_k);
    buffers_.d_v = uninitialised(problem.d_v);
    if (shape.sink) buffers_.d_sink = static_cast<float*>(uninitialised(problem.d_sink));
  }
  workspace_ = Buffer(tessera_workspace_bytes(&plan_));
}

void Attention::run(const Buffer& workspace) const {
  const auto execute = plan_.problem.direction == TESSERA_FORWARD ? tessera_forward : tessera_backward;
  require(execute(&plan_, &buffers_, workspace.data(), workspace.bytes(), nullptr));
}

void* Attention::random(const tessera_layout& layout, uint64_t seed) {
  return owned_.emplace_back(random_normal(elements(layout), layout.dtype, seed)).data();
}

void* Attention::uninitialised(const tessera_layout& layout) {
  return owned_.emplace_back(static_cast<size_t>(elements(layout)) * tessera_dtype_bytes(layout.dtype)).data();
}

const int32_t* Attention::cumulative(const std::vector<int64_t>& lengths) {
  Buffer& buffer = owned_.emplace_back((lengths.size() + 1) * sizeof(int32_t));
  const auto bounds = buffer.as<int32_t>();
  bounds[0] = 0;
  for (size_t b = 0; b < lengths.size(); ++b) bounds[b + 1] = bounds[b] + static_cast<int32_t>(lengths[b]);
  return bounds.data();
}

}  // namespace bench
