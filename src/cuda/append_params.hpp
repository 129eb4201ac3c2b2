// Converts a validated tessera_append to its kernel's config and params.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/append.hpp"
#include "core/dtypes.hpp"
#include "tessera/append/config.hpp"

namespace tessera {

// Accesses are wide if all loaded parts start at multiples of 16 bytes, and stored ones at multiples of 16 or, of 8-bit
// codes, 4 bytes.
inline AppendConfig append_config(const tessera_append_call& call) {
  const core::AppendSizes size = core::sizes(call);
  const AppendConfig aligned{static_cast<Dtype>(call.k.layout.dtype), static_cast<Dtype>(call.k_cache.layout.dtype),
                             true};
  const auto starts = [](const tessera_tensor& tensor) {
    if (!core::present(tensor)) return true;
    const int64_t step = core::is_8bit(tensor.layout.dtype) ? 4 : 16;
    const int64_t bytes = dtype_bytes(static_cast<Dtype>(tensor.layout.dtype));
    return reinterpret_cast<std::uintptr_t>(tensor.data) % step == 0 &&
           std::ranges::all_of(tensor.layout.strides, tensor.layout.strides + tensor.layout.rank - 1,
                               [&](int64_t stride) { return stride * bytes % step == 0; });
  };
  const int width = append_width(aligned);
  const bool columns = size.head_dim % width == 0 && size.head_dim_v % width == 0 && size.rotary_dim % (2 * width) == 0;
  const tessera_tensor* const tensors[] = {&call.k, &call.v,     &call.k_cache, &call.v_cache,
                                           &call.q, &call.q_out, &call.cos,     &call.sin};
  return {aligned.dtype, aligned.cache,
          columns && std::ranges::all_of(tensors, [&](const tessera_tensor* t) { return starts(*t); })};
}

inline AppendParams append_params(const tessera_append_call& call, const AppendConfig& config) {
  const core::AppendSizes size = core::sizes(call);
  const auto data = [](const tessera_tensor& tensor) { return core::present(tensor) ? tensor.data : nullptr; };
  const auto rows = [&](const tessera_tensor& tensor) {
    const core::RowStrides stride = core::row_strides(tensor.layout);
    return core::present(tensor) ? RowTensor{tensor.data, stride.batch, stride.row, stride.head} : RowTensor{};
  };
  const auto indices = [&](const tessera_tensor& tensor) { return static_cast<const int*>(data(tensor)); };
  AppendParams p{};
  p.batch = static_cast<int>(size.batch);
  p.tokens = Divisor(static_cast<int>(size.tokens)), p.tokens_q = Divisor(static_cast<int>(size.tokens_q));
  p.pages = static_cast<int>(size.pages), p.page_size = Divisor(static_cast<int>(size.page_size));
  p.room = static_cast<int>(size.room);
  p.rotary_dim = static_cast<int>(size.rotary_dim), p.angles = static_cast<int>(size.angles);
  p.interleaved = call.interleaved;
  p.angle_dtype = static_cast<Dtype>(call.cos.layout.dtype);
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

  const int width = append_width(config);
  const auto way = [&](const tessera_tensor& from, const tessera_tensor& to, int64_t heads, int64_t column,
                       int64_t columns, bool rotates) {
    const auto of_head = static_cast<int>((rotates ? columns / 2 : columns) / width);
    const auto groups = static_cast<int>((heads + kAppendHeads - 1) / kAppendHeads);
    return AppendWay{.from = rows(from),
                     .to = rows(to),
                     .heads = static_cast<int>(heads),
                     .groups = groups,
                     .column = static_cast<int>(column),
                     .rotates = rotates,
                     .columns = Divisor(of_head),
                     .units = Divisor(groups * of_head),
                     .begin = 0};
  };
  // All columns of a unit's heads.
  const auto coded = [&](const tessera_tensor& from, const tessera_tensor& to, int64_t columns, bool rotates) {
    AppendWay all = way(from, to, size.heads_kv, 0, columns, rotates);
    all.columns = Divisor(static_cast<int>(columns)), all.units = Divisor(all.groups);
    return all;
  };
  const auto scales = [&](const tessera_tensor& tensor) {
    if (!core::present(tensor)) return AppendScales{};
    const core::ScaleStrides stride = core::scale_strides(tensor.layout, true);
    return AppendScales{static_cast<float*>(tensor.data), stride.batch, call.compute_scales ? stride.row : 0,
                        stride.head};
  };
  p.k_scales = scales(call.k_descale), p.v_scales = scales(call.v_descale), p.computes_scales = call.compute_scales;
  const int64_t copied = size.head_dim - size.rotary_dim;
  const bool in_place = !core::present(call.q_out) || call.q_out.data == call.q.data;
  const tessera_tensor& q_out = core::present(call.q_out) ? call.q_out : call.q;
  if (writes_codes(config)) {
    p.ways[kRotatedKeys] = coded(call.k, call.k_cache, size.head_dim, size.rotary_dim > 0);
    p.ways[kValues] = coded(call.v, call.v_cache, size.head_dim_v, false);
  } else {
    p.ways[kRotatedKeys] = way(call.k, call.k_cache, size.heads_kv, 0, size.rotary_dim, true);
    p.ways[kCopiedKeys] = way(call.k, call.k_cache, size.heads_kv, size.rotary_dim, copied, false);
    p.ways[kValues] = way(call.v, call.v_cache, size.heads_kv, 0, size.head_dim_v, false);
  }
  p.ways[kRotatedQueries] = way(call.q, q_out, size.heads_q, 0, size.rotary_dim, true);
  p.ways[kCopiedQueries] = way(call.q, q_out, size.heads_q, size.rotary_dim, in_place ? 0 : copied, false);
  // As many tokens per block as give each thread, or kCodeLanes of them, a unit.
  const auto fill_block = [&](int first, int last, int lanes, int& tokens, int& units) {
    int of_token = 0;
    for (int n = first; n <= last; ++n) of_token += p.ways[n].units.value;
    tokens = std::max(1, kAppendThreads / lanes / std::max(1, of_token)), units = tokens * of_token;
    for (int n = first + 1; n <= last; ++n) p.ways[n].begin = p.ways[n - 1].begin + tokens * p.ways[n - 1].units.value;
  };
  fill_block(kRotatedKeys, kValues, writes_codes(config) ? kCodeLanes : 1, p.key_tokens, p.key_units);
  fill_block(kRotatedQueries, kCopiedQueries, 1, p.query_tokens, p.query_units);
  const int64_t sequences = core::present(call.cu_seqlens) ? 1 : size.batch;
  p.key_blocks = static_cast<int>((sequences * size.tokens + p.key_tokens - 1) / p.key_tokens);
  return p;
}

}  // namespace tessera
