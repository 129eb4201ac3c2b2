#include "engine.hpp"

#include <algorithm>
#include <cstddef>

namespace serve {

Engine::Engine(Layers& layers, const Weights& weights, const Limits& limits, tessera::DType dtype, tessera::DType cache)
    : layers_(layers),
      shape_(weights.shape),
      limits_(limits),
      dtype_(dtype),
      embedding_(resident(weights.embedding)),
      final_norm_(resident(weights.final_norm)),
      head_(resident(weights.head)),
      cos_(resident(weights.cos)),
      sin_(resident(weights.sin)) {
  const Shape& s = shape_;
  const std::size_t element = tessera::size_bytes(dtype);
  rotary_layout_ = tessera::layout(tessera::float32,
                                   {static_cast<std::int64_t>(weights.cos.size()) / (s.head_dim / 2), s.head_dim / 2});
  cache_layout_ = tessera::layout(cache, {limits.pages, limits.page_size, s.heads_kv, s.head_dim});
  if (cache == tessera::float8_e4m3) {
    scales_layout_ = tessera::layout(tessera::float32, {limits.pages, limits.page_size, s.heads_kv});
  }
  const auto cached = [&layers](const tessera::Layout& layout) {
    return layers.allocate(static_cast<std::size_t>(tessera::elements(layout)) *
                           tessera::size_bytes(static_cast<tessera::DType>(layout.dtype)));
  };
  const auto scales = [&] { return scales_layout_.rank ? static_cast<float*>(cached(scales_layout_)) : nullptr; };
  for (const LayerWeights& w : weights.layers) {
    model_.push_back({resident(w.attention_norm), resident(w.qkv), resident(w.out), resident(w.mlp_norm),
                      resident(w.gate_up), resident(w.down), cached(cache_layout_), cached(cache_layout_), scales(),
                      scales()});
  }

  // Two shapes of steps, and a plan for each: a plan knows the bounds of a step, and reads no lengths.
  mixed_ = attention_for(limits.step_tokens, limits.chunk);
  decoding_ = attention_for(limits.batch, 1);
  for (const Attention* attention : {&mixed_, &decoding_}) {
    tessera::throw_if_error(tessera_prepare(&attention->plan));
    workspace_bytes_ = std::max(workspace_bytes_, tessera::workspace_bytes(attention->plan));
  }
  workspace_ = layers.allocate(workspace_bytes_);

  const auto floats = [&layers](std::int64_t rows, std::int64_t columns) {
    return static_cast<float*>(layers.allocate(static_cast<std::size_t>(rows * columns) * sizeof(float)));
  };
  const std::int64_t rows = limits.step_tokens;
  x_ = floats(rows, s.dim);
  normed_ = floats(rows, s.dim);
  gate_up_ = floats(rows, 2 * s.hidden);
  hidden_ = floats(rows, s.hidden);
  logits_ = floats(limits.batch, s.vocab);
  qkv_ = layers.allocate(static_cast<std::size_t>(rows * s.qkv()) * element);
  o_ = layers.allocate(static_cast<std::size_t>(rows * s.q()) * element);
  const std::int64_t indices = rows + 3 * limits.batch + 1 + limits.batch * limits.max_pages();
  staged_.reserve(static_cast<std::size_t>(indices));
  tokens_ = static_cast<std::int32_t*>(layers.allocate(static_cast<std::size_t>(indices) * sizeof(std::int32_t)));
  cu_seqlens_ = tokens_ + rows;
  seqused_ = cu_seqlens_ + limits.batch + 1;
  last_ = seqused_ + limits.batch;
  page_table_ = last_ + limits.batch;
  next_tokens_ =
      static_cast<std::int32_t*>(layers.allocate(static_cast<std::size_t>(limits.batch) * sizeof(std::int32_t)));
}

const float* Engine::resident(const std::vector<float>& weight) {
  void* memory = layers_.allocate(weight.size() * sizeof(float));
  layers_.upload(memory, weight.data(), weight.size() * sizeof(float));
  return static_cast<const float*>(memory);
}

// Heads of the joint projection [rows, (Hq + 2 Hkv) D], as a tensor [rows, heads, D], in place.
tessera::Layout Engine::new_rows(std::int64_t rows, std::int64_t heads) const {
  return tessera::layout(dtype_, {rows, heads, shape_.head_dim}, {shape_.qkv(), shape_.head_dim, 1});
}

Engine::Attention Engine::attention_for(std::int64_t rows, std::int64_t longest_q) const {
  tessera::Problem problem;
  problem.q = new_rows(rows, shape_.heads_q);
  problem.k = problem.v = cache_layout_;
  problem.k_descale = problem.v_descale = scales_layout_;
  problem.o = tessera::layout(dtype_, {rows, shape_.heads_q, shape_.head_dim});
  problem.cu_seqlens_q = tessera::layout(tessera::int32, {limits_.batch + 1});
  problem.seqused_k = tessera::layout(tessera::int32, {limits_.batch});
  problem.page_table = tessera::layout(tessera::int32, {limits_.batch, limits_.max_pages()});
  problem.causal = true;
  problem.max_seqlen_q = longest_q;
  problem.max_seqlen_k = limits_.longest;
  return {tessera::plan(problem, layers_.device()), rows};
}

void Engine::run(const Step& step, std::vector<std::int32_t>& next_tokens, std::vector<float>* logits) {
  staged_.clear();
  for (const auto* part : {&step.tokens, &step.cu_seqlens, &step.seqused, &step.last, &step.page_table}) {
    staged_.insert(staged_.end(), part->begin(), part->end());
  }
  layers_.upload(tokens_, staged_.data(), staged_.size() * sizeof(std::int32_t));
  if (!step.decoding) {
    forward(mixed_, step.num_tokens);
  } else if (layers_.records()) {
    // Recorded once: a decoding step's contents are in the index arrays alone. Rows of no sequence are computed, too.
    layers_.repeat([this] { forward(decoding_, decoding_.rows); });
  } else {
    forward(decoding_, step.num_tokens);
  }
  next_tokens.resize(static_cast<std::size_t>(limits_.batch));
  layers_.download(next_tokens.data(), next_tokens_, next_tokens.size() * sizeof(std::int32_t));
  if (logits) {
    logits->resize(static_cast<std::size_t>(limits_.batch * shape_.vocab));
    layers_.download(logits->data(), logits_, logits->size() * sizeof(float));
  }
  attention_seconds_ += layers_.attention_seconds();
}

void Engine::forward(const Attention& attention, std::int64_t rows) {
  const Shape& s = shape_;
  const Matrix x{tessera::float32, s.dim, x_}, normed{tessera::float32, s.dim, normed_}, qkv{dtype_, s.qkv(), qkv_},
      o{dtype_, s.q(), o_}, gate_up{tessera::float32, 2 * s.hidden, gate_up_},
      hidden{tessera::float32, s.hidden, hidden_}, logits{tessera::float32, s.vocab, logits_};
  layers_.embed(tokens_, embedding_, x_, rows, s.dim);
  for (const DeviceLayer& layer : model_) {
    layers_.rms_norm(x_, nullptr, layer.attention_norm, normed_, rows, s.dim);
    layers_.matmul(normed, layer.qkv, qkv, rows);
    layers_.attention_begins();
    attend(attention, layer);
    layers_.attention_ends();
    layers_.matmul(o, layer.out, x, rows, /*add=*/true);
    layers_.rms_norm(x_, nullptr, layer.mlp_norm, normed_, rows, s.dim);
    layers_.matmul(normed, layer.gate_up, gate_up, rows);
    layers_.gate(gate_up_, hidden_, rows, s.hidden);
    layers_.matmul(hidden, layer.down, x, rows, /*add=*/true);
  }
  // Each sequence's last token alone has an unknown successor.
  layers_.rms_norm(x_, last_, final_norm_, normed_, limits_.batch, s.dim);
  layers_.matmul(normed, head_, logits, limits_.batch);
  layers_.argmax(logits_, next_tokens_, limits_.batch, s.vocab);
}

// All of serving with Tessera: tessera_append rotates q and the new keys and writes keys and values into the cache;
// then all sequences attend to their pages.
void Engine::attend(const Attention& attention, const DeviceLayer& layer) {
  const Shape& s = shape_;
  const std::int64_t rows = attention.rows;
  auto* const qkv = static_cast<std::byte*>(qkv_);
  const std::size_t element = tessera::size_bytes(dtype_);
  const tessera::Layout new_keys = new_rows(rows, s.heads_kv);

  tessera::AppendCall append;
  append.q = tessera::tensor(attention.plan.problem.q, qkv);  // in place
  append.k = tessera::tensor(new_keys, qkv + static_cast<std::size_t>(s.q()) * element);
  append.v = tessera::tensor(new_keys, qkv + static_cast<std::size_t>(s.q() + s.kv()) * element);
  append.k_cache = tessera::tensor(cache_layout_, layer.k_cache);
  append.v_cache = tessera::tensor(cache_layout_, layer.v_cache);
  if (scales_layout_.rank) {
    append.k_descale = tessera::tensor(scales_layout_, layer.k_scales);
    append.v_descale = tessera::tensor(scales_layout_, layer.v_scales);
    append.compute_scales = 1;
  }
  append.cu_seqlens = tessera::tensor(attention.plan.problem.cu_seqlens_q, cu_seqlens_);
  append.seqused_k = tessera::tensor(attention.plan.problem.seqused_k, seqused_);
  append.page_table = tessera::tensor(attention.plan.problem.page_table, page_table_);
  append.cos = tessera::tensor(rotary_layout_, cos_);
  append.sin = tessera::tensor(rotary_layout_, sin_);
  tessera::append(append, &layers_.device(), &layers_.executor());

  tessera::forward(attention.plan,
                   {.q = qkv,
                    .k = layer.k_cache,
                    .v = layer.v_cache,
                    .o = o_,
                    .cu_seqlens_q = cu_seqlens_,
                    .seqused_k = seqused_,
                    .page_table = page_table_,
                    .k_descale = layer.k_scales,
                    .v_descale = layer.v_scales},
                   {static_cast<std::byte*>(workspace_), workspace_bytes_}, &layers_.executor());
}

}  // namespace serve
