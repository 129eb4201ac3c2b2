// Keys and values of one block, in the form from which the products broadcast: in place if their layout allows it,
// otherwise copied.
#pragma once

#include "cpu/scratch.hpp"
#include "cpu/tile.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

// Row j of a K or V tensor of one sequence and KV head; paged tensors use the page table.
TESSERA_INLINE const char* key_row(const Params& p, const RowTensor& tensor, const Sequence& sequence, int64_t batch,
                                   int64_t head_kv, int64_t j) {
  if (!p.page_table)
    return tensor.data + tensor.batch * batch + tensor.row * (sequence.k_begin + j) + tensor.head * head_kv;
  const int32_t page = *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.page_table) +
                                                         sequence.page_begin + p.page_table_col * (j / p.page_size));
  return tensor.data + tensor.batch * page + tensor.row * (j % p.page_size) + tensor.head * head_kv;
}

// Rows j ... j + count - 1.
TESSERA_INLINE void key_rows(const char** rows, const Params& p, const RowTensor& tensor, const Sequence& sequence,
                             int64_t batch, int64_t head_kv, int64_t j, int64_t count) {
  for (int64_t n = 0; n < count;) {  // a division and an entry of the page table for each page
    const char* row = key_row(p, tensor, sequence, batch, head_kv, j + n);
    const int64_t end = p.page_table ? min_of(count, n + p.page_size - (j + n) % p.page_size) : count;
    for (; n < end; ++n, row += tensor.row) rows[n] = row;
  }
}

// The scale of key or value j of a sequence and KV head 0.
TESSERA_INLINE const char* scale_address(const Params& p, const Scales& scales, const Sequence& sequence, int64_t batch,
                                         int64_t j) {
  if (!scales.in_pages) return scales.data + scales.batch * batch + scales.row * (j / scales.tokens);
  const int32_t page = *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.page_table) +
                                                         sequence.page_begin + p.page_table_col * (j / p.page_size));
  return scales.data + scales.batch * page + scales.row * (j % p.page_size);
}
// The scale of key or value j of a sequence and KV head; 1 without scales.
TESSERA_INLINE float key_scale(const Params& p, const Scales& scales, const Sequence& sequence, int64_t batch,
                               int64_t head_kv, int64_t j) {
  if (!scales.data) return 1.0f;
  return *reinterpret_cast<const float*>(scale_address(p, scales, sequence, batch, j) + scales.head * head_kv);
}
// The same for query `query` of head `head`.
TESSERA_INLINE float query_scale(const Params& p, int64_t batch, int64_t head, int64_t query) {
  const Scales& s = p.q_scales;
  if (!s.data) return 1.0f;
  return *reinterpret_cast<const float*>(s.data + s.batch * batch + s.row * (query / s.tokens) +
                                         s.head * (head / (p.heads_q / p.heads_kv)));
}
// The scales of k or v, of which tensor is one.
TESSERA_INLINE const Scales& scales_of(const Params& p, const RowTensor& tensor) {
  return &tensor == &p.k ? p.k_scales : p.v_scales;
}

// out = key or value j, of 8 bits, times its scale.
TESSERA_OWN_FUNCTION inline void read_code_key(float* out, const Params& p, const RowTensor& tensor,
                                               const Sequence& sequence, int64_t batch, int64_t head_kv, int64_t j,
                                               int64_t cols) {
  read_codes(p.kv_dtype, out, key_row(p, tensor, sequence, batch, head_kv, j), cols,
             key_scale(p, scales_of(p, tensor), sequence, batch, head_kv, j));
}

// Prefetches `row_bytes` of a row that is needed soon.
TESSERA_INLINE void prefetch_row(const char* row, int64_t row_bytes) {
  for (int64_t at = 0; at < row_bytes; at += kCacheLine_bytes) __builtin_prefetch(row + at, 0, 2);
}

// Prefetches part `part` of `parts` of keys j ... j + count - 1. Spread over the work on the previous block, the
// requests never queue. Rows of one head are rarely adjacent, so the hardware's own prefetchers do not find them.
TESSERA_INLINE void prefetch_keys(const Params& p, const Sequence& sequence, int64_t batch, int64_t head_kv, int64_t j,
                                  int64_t count, int64_t part, int64_t parts) {
  for (int64_t n = j + count * part / parts; n < j + count * (part + 1) / parts; ++n) {
    prefetch_row(key_row(p, p.k, sequence, batch, head_kv, n), p.head_dim * p.kv_elem_bytes);
    prefetch_row(key_row(p, p.v, sequence, batch, head_kv, n), p.head_dim_v * p.kv_elem_bytes);
  }
}

// Rows of A for the products, `stride_bytes` apart. Op::kFma: float32. Op::kDot: bf16, read in pairs.
struct RowBlock {
  const char* data;
  int64_t stride_bytes;
};

// [count][cols] with contiguous columns: K (and V in the backward pass), broadcast along k.
//
// `compact`: copied in any case. Rows that are a power of two apart share cache sets, so copying pays for data that is
// read many times or in whole vectors.
template <Op kOp>
TESSERA_INLINE RowBlock rows_block(const Params& p, const RowTensor& tensor, const Sequence& sequence, int64_t batch,
                                   int64_t head_kv, int64_t j, int64_t count, int64_t cols, float* copy,
                                   bool compact = false) {
  const bool in_place =
      !compact && !p.page_table && (kOp == Op::kDot ? cols % 2 == 0 : p.kv_dtype == TESSERA_FLOAT32 && !p.rows_collide);
  if (in_place) return {key_row(p, tensor, sequence, batch, head_kv, j), tensor.row};
  const int64_t padded = (cols + kLanes - 1) / kLanes * kLanes;
  if constexpr (kOp == Op::kDot) {
    char* out = reinterpret_cast<char*>(copy);
    for (int64_t n = 0; n < count; ++n, out += padded * 2) {
      __builtin_memcpy(out, key_row(p, tensor, sequence, batch, head_kv, j + n), static_cast<size_t>(cols) * 2);
      __builtin_memset(out + cols * 2, 0, static_cast<size_t>(padded - cols) * 2);
    }
    return {reinterpret_cast<char*>(copy), padded * 2};
  } else {
    if (p.kv_elem_bytes == 1) {
      for (int64_t n = 0; n < count; ++n) {
        read_code_key(copy + n * padded, p, tensor, sequence, batch, head_kv, j + n, cols);
      }
    } else {
      with_float_elem(p.kv_dtype, [&](auto elem) {
        for (int64_t n = 0; n < count; ++n) {
          read_row<decltype(elem)>(copy + n * padded, key_row(p, tensor, sequence, batch, head_kv, j + n), cols);
        }
      });
    }
    return {reinterpret_cast<char*>(copy), padded * 4};
  }
}

// The same rows as steps of k, with columns up to the next multiple of kLanes (0 past the last): V forward, broadcast
// along its rows; K in the backward pass, as B. Op::kDot: [count / 2][cols] pairs of neighbouring keys.
template <Op kOp>
TESSERA_INLINE RowBlock steps_block(const Params& p, const RowTensor& tensor, const Sequence& sequence, int64_t batch,
                                    int64_t head_kv, int64_t j, int64_t count, int64_t cols, float* copy) {
#if defined(TESSERA_HAS_DOT)
  if constexpr (kOp == Op::kDot) {
    const int64_t padded = (cols + kLanes - 1) / kLanes * kLanes;
    for (int64_t n = 0; n < count; n += 2) {
      pair_rows(reinterpret_cast<uint32_t*>(copy) + n / 2 * padded, key_row(p, tensor, sequence, batch, head_kv, j + n),
                n + 1 < count ? key_row(p, tensor, sequence, batch, head_kv, j + n + 1) : nullptr, cols);
    }
    return {reinterpret_cast<char*>(copy), padded * 4};
  }
#endif
  return rows_block<Op::kFma>(p, tensor, sequence, batch, head_kv, j, count, cols, copy);
}

}  // namespace
}  // namespace tessera::cpu
