// One call of the library on the program's tensors: describe, plan, execute.
#pragma once

#include <vector>

#include "options.hpp"
#include "tensor.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

// The tensors of a call, absent ones empty. Copies share memory.
struct AttentionTensors {
  Tensor q, k, v, o, lse;
  Tensor cu_seqlens_q, cu_seqlens_k, seqused_k, page_table;
  Tensor bias, mask, block_mask, alibi_slopes, sink;
  Tensor d_o, d_q, d_k, d_v, d_lse, d_bias, d_sink;

  void describe(tessera_problem& problem) const;
  tessera_buffers buffers() const;
  std::vector<ArgumentName> names() const;  // how messages name the tensors that are present
};

struct CallResult {
  tessera_plan plan{};
  double seconds = 0;
};

// Runs one direction. Throws WrongUse or Failure.
CallResult run_attention(const AttentionTensors& tensors, const AttentionOptions& options, const tessera_device& device,
                         tessera_direction direction);

}  // namespace tessera::cli
