// Which pointer of a call belongs to which layout of its problem.
#pragma once

#include <initializer_list>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "core/validate.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

struct NamedBuffer {
  const char* name;
  const tessera_layout& layout;
  const void* pointer;
};

// check(name, layout, pointer) for each that has elements, until one answers with an error.
template <class Check>
tessera_status for_each_buffer(std::initializer_list<NamedBuffer> buffers, const Check& check) {
  for (const NamedBuffer& buffer : buffers) {
    if (!present(buffer.layout) || elements(buffer.layout) == 0) continue;
    TESSERA_RETURN_IF_ERROR(check(buffer.name, buffer.layout, buffer.pointer));
  }
  return ok();
}

// The same for what the problem's direction reads or writes.
template <class Check>
tessera_status for_each_buffer(const tessera_problem& p, const tessera_buffers& buffers, const Check& check) {
  TESSERA_RETURN_IF_ERROR(for_each_buffer(
      {
          {"q", p.q, buffers.q},
          {"k", p.k, buffers.k},
          {"v", p.v, buffers.v},
          {"o", p.o, buffers.o},
          {"lse", p.lse, buffers.lse},
          {"cu_seqlens_q", p.cu_seqlens_q, buffers.cu_seqlens_q},
          {"cu_seqlens_k", p.cu_seqlens_k, buffers.cu_seqlens_k},
          {"seqused_k", p.seqused_k, buffers.seqused_k},
          {"page_table", p.page_table, buffers.page_table},
          {"bias", p.bias, buffers.bias},
          {"mask", p.mask, buffers.mask},
          {"block_mask", p.block_mask, buffers.block_mask},
          {"alibi_slopes", p.alibi_slopes, buffers.alibi_slopes},
          {"sink", p.sink, buffers.sink},
      },
      check));
  if (p.direction != TESSERA_BACKWARD) return ok();
  return for_each_buffer(
      {
          {"d_o", p.d_o, buffers.d_o},
          {"d_q", p.d_q, buffers.d_q},
          {"d_k", p.d_k, buffers.d_k},
          {"d_v", p.d_v, buffers.d_v},
          {"d_lse", p.d_lse, buffers.d_lse},
          {"d_bias", p.d_bias, buffers.d_bias},
          {"d_sink", p.d_sink, buffers.d_sink},
      },
      check);
}

// What tessera_combine reads and writes, its layouts validated; lse of rank 0: not wanted.
struct CombineTensors {
  tessera_layout o_parts_layout;  // [N, B, S, H, Dv]
  const void* o_parts;
  tessera_layout lse_parts_layout;  // [N, B, H, S]
  const float* lse_parts;
  tessera_layout o_layout;  // [B, S, H, Dv]
  void* o;
  tessera_layout lse_layout;  // [B, H, S]
  float* lse;
};

// The same for these.
template <class Check>
tessera_status for_each_buffer(const CombineTensors& t, const Check& check) {
  return for_each_buffer({{"o_parts", t.o_parts_layout, t.o_parts},
                          {"lse_parts", t.lse_parts_layout, t.lse_parts},
                          {"o", t.o_layout, t.o},
                          {"lse", t.lse_layout, t.lse}},
                         check);
}

}  // namespace tessera::core
