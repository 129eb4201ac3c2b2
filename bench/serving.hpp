// An engine's steps on the CPU: decoding, chunks of prompts, and both in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "random.hpp"
#include "tessera/tessera.hpp"

namespace bench {

struct StepShape {
  int32_t dtype = TESSERA_BFLOAT16;
  int64_t heads_q = 32, heads_kv = 8, head_dim = 128, page_size = 16;
  int64_t keys = 1024;              // of every sequence
  std::vector<int64_t> new_tokens;  // of each: 1 where it decodes
};

// Of the matrix products on the visible area.
double step_flops(const StepShape& shape);

// Packed queries against pages, causal. Owns a call's tensors; every sequence has pages of its own.
class ServingStep {
 public:
  ServingStep(const StepShape& shape, const tessera_device& device, uint64_t seed);

  void run() const;

 private:
  tessera::Plan plan_;
  tessera::Buffers buffers_;
  std::vector<int32_t> cu_seqlens_q_, seqused_k_, page_table_;
  Buffer q_, k_, v_, o_, workspace_;
};

}  // namespace bench
