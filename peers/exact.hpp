// Attention in float64 on a sample of rows: the reference for results where the whole oracle would take too long.
#pragma once

#include <cstdint>
#include <memory>

#include "peers/standard_attention.hpp"
#include "tessera/tessera.h"

namespace tessera::peers {

struct ErrorStats {
  double max_abs = 0;
  double rms = 0;
  std::int64_t elems = 0;  // compared; a NaN where exact has none makes max_abs and rms NaN

  void merge(const ErrorStats& other);
};

// Error of result[i] against exact[i].
ErrorStats error_of(const void* result, tessera_dtype dtype, const double* exact, std::int64_t elems);

// Computes sampled rows of o and lse (and of d_q, d_k, d_v when d_o is given) of the contiguous tensors in `shape`, in
// float64 from the given inputs. The rows are spread over the first and last head of the first and last batch entry,
// first and last row included. Key gradients need every query row of a head: they are computed where that is
// affordable, has_key_gradients() says whether. A second or two at most.
class ExactSample {
 public:
  ExactSample(const AttentionShape& shape, tessera_dtype dtype, const void* q, const void* k, const void* v,
              const void* d_o, int threads, const RowProgram* program = nullptr);
  ~ExactSample();
  ExactSample(const ExactSample&) = delete;
  ExactSample& operator=(const ExactSample&) = delete;

  bool has_key_gradients() const;

  // Errors of full result tensors, on the sampled rows.
  ErrorStats o(const void* result) const;
  ErrorStats lse(const float* result) const;  // [B, Hq, Sq]
  ErrorStats d_q(const void* result) const;
  ErrorStats d_k(const void* result) const;
  ErrorStats d_v(const void* result) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::peers
