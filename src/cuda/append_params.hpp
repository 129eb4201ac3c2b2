// A checked tessera_append as its kernel reads it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

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

// By 16 bytes where all that it loads and stores starts at a multiple of them.
inline AppendConfig append_config(const AppendParams& p, Dtype dtype) {
  const AppendConfig aligned{dtype, true};
  const int width = append_width(aligned), bytes = dtype_bytes(dtype), angle_bytes = dtype_bytes(p.angle_dtype);
  const auto starts = [](const void* data, std::initializer_list<int64> strides, int of_bytes) {
    constexpr int kBytes = 16;
    return reinterpret_cast<std::uintptr_t>(data) % kBytes == 0 &&
           std::ranges::all_of(strides, [&](int64 stride) { return stride * of_bytes % kBytes == 0; });
  };
  const auto rows = [&](const RowTensor& tensor) {
    return !tensor.data || starts(tensor.data, {tensor.batch, tensor.row, tensor.head}, bytes);
  };
  const bool columns = p.head_dim % width == 0 && p.head_dim_v % width == 0 && p.rotary_dim % (2 * width) == 0;
  const bool angles =
      p.rotary_dim == 0 || (starts(p.cos, {p.cos_row}, angle_bytes) && starts(p.sin, {p.sin_row}, angle_bytes));
  const bool all =
      columns && angles && rows(p.k) && rows(p.v) && rows(p.k_cache) && rows(p.v_cache) && rows(p.q) && rows(p.q_out);
  return {dtype, all};
}

}  // namespace tessera
