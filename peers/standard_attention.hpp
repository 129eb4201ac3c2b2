// Standard attention, the well-known peer: three steps over a stored score matrix,
//   S = scale * Q K^T,   P = softmax(S),   O = P V,
// with OpenBLAS for the products. Backward reuses the P that forward stored: dV = P^T dO, dP = dO V^T,
// dS = P o (dP - rowsum(P o dP)), dQ = scale * dS K, dK = scale * dS^T Q.
//
// It is meant to be a fast and honest peer: S and P share their memory, buffers are allocated once and reused by every
// call, softmax is vectorised, and a causal row's softmax touches only its visible keys. float16 and bfloat16 are
// converted to float32 and back, since OpenBLAS as packaged has no product for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "tessera/tessera.h"

namespace tessera::peers {

// Contiguous tensors: q, o [B, Sq, Hq, D|Dv], k, v [B, Sk, Hkv, D|Dv], as the library's dense layout.
struct AttentionShape {
  std::int64_t batch = 1;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t head_dim = 64;
  std::int64_t head_dim_v = 64;
  bool causal = false;  // bottom-right aligned
  double scale = 0;     // 0: 1 / sqrt(D)

  double effective_scale() const;
  // FLOPs by the usual convention: 2 B Hq Sq Sk (D + Dv) forward, halved when causal, times 2.5 backward.
  double flops(tessera_direction direction) const;
  std::int64_t q_elems() const { return batch * seqlen_q * heads_q * head_dim; }
  std::int64_t k_elems() const { return batch * seqlen_k * heads_kv * head_dim; }
  std::int64_t v_elems() const { return batch * seqlen_k * heads_kv * head_dim_v; }
  std::int64_t o_elems() const { return batch * seqlen_q * heads_q * head_dim_v; }
};

// What a score program makes of the scores of query i of head h of sequence b, for keys 0 .. keys - 1. Any number of
// threads may call it.
class RowProgram {
 public:
  virtual ~RowProgram() = default;
  // Scores become new ones, -infinity where the program hides the key.
  virtual void score(std::int64_t b, std::int64_t h, std::int64_t i, float* s, std::int64_t keys) const = 0;
  virtual void score(std::int64_t b, std::int64_t h, std::int64_t i, double* s, std::int64_t keys) const = 0;
  // The gradients of the new scores become those of the scores before, s.
  virtual void gradient(std::int64_t b, std::int64_t h, std::int64_t i, const float* s, float* d_s,
                        std::int64_t keys) const = 0;
  virtual void gradient(std::int64_t b, std::int64_t h, std::int64_t i, const double* s, double* d_s,
                        std::int64_t keys) const = 0;
};

class StandardAttention {
 public:
  // dtype: TESSERA_FLOAT32, FLOAT16 or BFLOAT16. direction: BACKWARD also allocates what backward() needs. Throws
  // std::runtime_error if OpenBLAS cannot be loaded, std::bad_alloc if there is not enough memory.
  // `program`, which may be nullptr, must live as long.
  StandardAttention(const AttentionShape& shape, tessera_dtype dtype, tessera_direction direction, int threads,
                    const RowProgram* program = nullptr);
  ~StandardAttention();
  StandardAttention(const StandardAttention&) = delete;
  StandardAttention& operator=(const StandardAttention&) = delete;

  void forward(const void* q, const void* k, const void* v, void* o);
  // After forward() on the same q, k, v, whose P it reads.
  void backward(const void* q, const void* k, const void* v, const void* d_o, void* d_q, void* d_k, void* d_v);

  // Bytes held beyond inputs and outputs: the score matrix of every head, twice for backward, with a program three
  // times, and float32 copies. Saturates at the largest int64.
  static std::int64_t extra_bytes(const AttentionShape& shape, tessera_dtype dtype, tessera_direction direction,
                                  bool has_program = false);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Memory that this process may still use, by the kernel's account and its control group's.
std::int64_t available_memory_bytes();
// Whether `bytes` more fit, with a tenth of what is available left to the system.
bool fits(std::int64_t bytes);

// "OpenBLAS 0.3.21 ..." the loaded library's own name, or "" if there is none.
std::string blas_description();

}  // namespace tessera::peers
