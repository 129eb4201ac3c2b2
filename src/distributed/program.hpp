// A rank's schedule as a flat list: calls of the library, moves of rows, merges, and messages, with their places in the
// caller's tensors and in a workspace. It is made once; a pass only walks it.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "core/exchange.hpp"
#include "distributed/blocks.hpp"
#include "distributed/plan.hpp"
#include "tessera/distributed.h"

namespace tessera::distributed {

struct Fill {
  Ref at;
  float value;
  int64_t count;
};

struct RowsRef {
  Ref at;
  int32_t dtype;
  int64_t batch, row, head;
};
struct Move {
  core::RowsShape shape;
  RowsRef from, to;
  bool add;
};

// A call of the library by plans[plan].
struct Call {
  size_t plan;
  Ref q, k, v, o, o_accum, lse, lse_low, slopes, sink, d_o, d_q, d_k, d_v, d_sink, bias, mask, d_bias, workspace;
  Ref cu_q, cu_k, places;  // of a packed call
  Ref d_captured[TESSERA_MAX_CAPTURED_TENSORS];
};

// By tessera_combine, whose layouts are `merge`'s.
struct Merge {
  tessera_combine_call merge;
  Ref o_parts, lse_parts, lse_low_parts, o, lse, lse_low;
};

struct Piece {
  bool receive;
  int32_t peer;
  Ref at;
  int64_t bytes;
};
// The messages of a step are under way from Send on, and complete after Wait.
struct Send {
  int32_t step;
  std::vector<Piece> pieces;
};
struct Wait {
  int32_t step, steps;
};

using Operation = std::variant<Fill, Move, Call, Merge, Send, Wait>;

struct Program {
  tessera_ranks_plan plan;
  std::vector<tessera_plan> plans;
  std::vector<Operation> operations;
  std::vector<int32_t> constants;  // that calls read, written into the workspace before all operations
  int64_t constants_at = 0;
  int64_t workspace_bytes = 0;
};

// What a pass is made of, beside its plan.
struct Setting {
  tessera_ranks_options options;
  tessera_device device;
  int32_t rank;
  bool saves;  // there is a backward pass
};

// Of a gradient: float32, contiguous, of the tensor's shape; absent if it is not requested.
inline tessera_layout gradient_layout(tessera_layout layout, bool requested) {
  if (!requested) return {};
  layout.dtype = TESSERA_FLOAT32;
  int64_t stride = 1;
  for (int32_t axis = layout.rank; axis-- > 0; stride *= layout.shape[axis]) layout.strides[axis] = stride;
  return layout;
}
inline tessera_layout d_captured_layout(const tessera_ranks_options& options, int tensor) {
  return gradient_layout(options.captured[tensor], (options.grad_captured >> tensor & 1) != 0);
}
inline tessera_layout d_bias_layout(const tessera_ranks_options& options) {
  return gradient_layout(options.bias, options.grad_bias != 0);
}

// Fails as tessera_make_plan does. saved_bytes: what forward leaves for backward.
tessera_status make_forward(const tessera_ranks_plan& plan, const Setting& setting, Program& program,
                            int64_t& saved_bytes);
tessera_status make_backward(const tessera_ranks_plan& plan, const Setting& setting, Program& program);

// Where the memory of each Base begins, and what a score program reads.
struct Memory {
  char* base[static_cast<size_t>(Base::kBases)] = {};
  const void* captured[TESSERA_MAX_CAPTURED_TENSORS] = {};
  double scalars[TESSERA_MAX_CAPTURED_SCALARS] = {};
  char* at(const Ref& ref) const {
    return ref.base == Base::kNone ? nullptr : base[static_cast<size_t>(ref.base)] + ref.offset;
  }
};

// `number` is the same on all ranks that make the same call. If it fails, the caller abandons the transport.
tessera_status walk(const Program& program, uint64_t number, const Memory& memory, core::RowMoves& moves,
                    core::Transport& transport, const tessera_device& device, const tessera_executor& executor,
                    core::Cancel& cancel);

}  // namespace tessera::distributed
