// A checked tessera_append as its kernel reads it.
#pragma once

#include "core/append.hpp"
#include "tessera/append/config.hpp"

namespace tessera {

inline AppendParams append_params(const tessera_append_call& call) {
  const core::AppendSizes size = core::sizes(call);
  const auto data = [](const tessera_tensor& tensor) { return core::present(tensor) ? tensor.data : nullptr; };
  const auto rows = [&](const tessera_tensor& tensor) {
    const core::RowStrides stride = core::row_strides(tensor.layout);
    return core::present(tensor) ? RowTensor{tensor.data, stride.batch, stride.row, stride.head} : RowTensor{};
  };
  const auto indices = [&](const tessera_tensor& tensor) { return static_cast<const int*>(data(tensor)); };
  AppendParams p{};
  p.batch = static_cast<int>(size.batch);
  p.tokens = static_cast<int>(size.tokens), p.tokens_q = static_cast<int>(size.tokens_q);
  p.heads_q = static_cast<int>(size.heads_q), p.heads_kv = static_cast<int>(size.heads_kv);
  p.head_dim = static_cast<int>(size.head_dim), p.head_dim_v = static_cast<int>(size.head_dim_v);
  p.pages = static_cast<int>(size.pages), p.page_size = static_cast<int>(size.page_size);
  p.room = static_cast<int>(size.room);
  p.rotary_dim = static_cast<int>(size.rotary_dim), p.angles = static_cast<int>(size.angles);
  p.interleaved = call.interleaved;
  p.angle_dtype = static_cast<Dtype>(call.cos.layout.dtype);
  p.k = rows(call.k), p.v = rows(call.v), p.k_cache = rows(call.k_cache), p.v_cache = rows(call.v_cache);
  p.q = rows(call.q), p.q_out = rows(core::present(call.q_out) ? call.q_out : call.q);
  p.cos = data(call.cos), p.cos_row = call.cos.layout.strides[0];
  p.sin = data(call.sin), p.sin_row = call.sin.layout.strides[0];
  p.seqused_k = indices(call.seqused_k), p.seqused_k_stride = call.seqused_k.layout.strides[0];
  p.cu_seqlens = indices(call.cu_seqlens), p.cu_seqlens_stride = call.cu_seqlens.layout.strides[0];
  p.page_table = indices(call.page_table);
  p.page_table_batch = call.page_table.layout.strides[0], p.page_table_col = call.page_table.layout.strides[1];
  const auto positions = [&](const tessera_tensor& tensor, const int*& of, int64& batch, int64& col) {
    const tessera_layout& layout = tensor.layout;
    of = indices(tensor), batch = layout.rank == 2 ? layout.strides[0] : 0;
    col = layout.strides[layout.rank == 2 ? 1 : 0];
  };
  positions(call.positions_q, p.positions_q, p.positions_q_batch, p.positions_q_col);
  positions(call.positions_k, p.positions_k, p.positions_k_batch, p.positions_k_col);
  p.dropped = static_cast<int*>(data(call.dropped));
  return p;
}

}  // namespace tessera
