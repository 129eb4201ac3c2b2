// The model over a paged cache: all sequences of a step go through each layer in one tessera_append and one
// tessera_forward, be they chunks of prompts or single tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "layers.hpp"
#include "model.hpp"
#include "scheduler.hpp"

namespace serve {

class Engine {
 public:
  // `dtype` is that of q, k, v and o: float32 or bfloat16; `cache` that of the cache: the same, or float8_e4m3 beside
  // bfloat16, with a scale for each token and head. Everything else is float32.
  Engine(Layers& layers, const Weights& weights, const Limits& limits, tessera::DType dtype, tessera::DType cache);

  // Computes a step: the next token [batch] of each sequence, and on request logits [batch, vocab].
  void run(const Step& step, std::vector<std::int32_t>& next_tokens, std::vector<float>* logits);

  double attention_seconds() const { return attention_seconds_; }
  const tessera::Plan& plan(bool decoding) const { return decoding ? decoding_.plan : mixed_.plan; }

 private:
  // Steps of one shape: the rows of their buffers, and the plan that serves all of them.
  struct Attention {
    tessera::Plan plan;
    std::int64_t rows = 0;
  };
  struct DeviceLayer {
    const float *attention_norm, *qkv, *out, *mlp_norm, *gate_up, *down;
    void *k_cache, *v_cache;     // [pages, page_size, Hkv, D]
    float *k_scales, *v_scales;  // [pages, page_size, Hkv], of an 8-bit cache
  };

  const float* resident(const std::vector<float>& weight);
  Attention attention_for(std::int64_t rows, std::int64_t longest_q) const;
  tessera::Layout new_rows(std::int64_t rows, std::int64_t heads) const;
  void forward(const Attention& attention, std::int64_t rows);
  void attend(const Attention& attention, const DeviceLayer& layer);

  Layers& layers_;
  Shape shape_;
  Limits limits_;
  tessera::DType dtype_;
  std::vector<DeviceLayer> model_;
  const float *embedding_, *final_norm_, *head_, *cos_, *sin_;
  tessera::Layout rotary_layout_, cache_layout_;
  tessera::Layout scales_layout_;  // rank 0: the cache has no scales
  Attention mixed_, decoding_;
  void* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;

  // A step's index arrays, at fixed addresses, in one allocation.
  std::int32_t *tokens_ = nullptr, *cu_seqlens_ = nullptr, *seqused_ = nullptr, *last_ = nullptr,
               *page_table_ = nullptr;
  std::vector<std::int32_t> staged_;
  // Activations [step_tokens, ...]; of sequences [batch, ...].
  float *x_ = nullptr, *normed_ = nullptr, *gate_up_ = nullptr, *hidden_ = nullptr, *logits_ = nullptr;
  void *qkv_ = nullptr, *o_ = nullptr;
  std::int32_t* next_tokens_ = nullptr;
  double attention_seconds_ = 0;
};

}  // namespace serve
