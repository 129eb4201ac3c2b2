// Rotation of new tokens and their way into the cache. Config: fixed when the kernel is compiled; params: read at run time.
// Both are filled in by the host.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// append/kernel.cuh.
struct AppendConfig {
  Dtype dtype;
  bool
      aligned;  // rows, heads and the columns that are rotated together start at multiples of 16 bytes, so that loads are of 16 bytes
};
TESSERA_CONFIG_FIELDS(AppendConfig, dtype, aligned)

// Neighbouring columns that a thread loads at once.
TESSERA_HOST_DEVICE constexpr int append_width(const AppendConfig& c) {
  return c.aligned ? 16 / dtype_bytes(c.dtype) : 1;
}

// The public tessera_append. Strides in elements.
struct AppendParams {
  int batch, tokens, tokens_q;  // dense: of a sequence; packed: of all
  int heads_q, heads_kv, head_dim, head_dim_v;
  int pages, page_size, room;  // room: keys that a sequence's pages hold
  int rotary_dim, angles;      // 0: nothing is rotated; rows of cos and sin
  int interleaved;             // pairs are neighbours, not columns half of rotary_dim apart
  Dtype angle_dtype;
  RowTensor k, v, k_cache, v_cache, q, q_out;  // of the caches `batch` is the stride of a page
  const void *cos, *sin;
  int64 cos_row, sin_row;
  const int* seqused_k;   // [batch], the new tokens included
  const int* cu_seqlens;  // [batch + 1] or NULL
  const int* page_table;  // [batch, max_pages] or NULL: a sequence's row of the cache is its page
  int64 seqused_k_stride, cu_seqlens_stride, page_table_batch, page_table_col;
  const int *positions_q, *positions_k;  // [batch, tokens], packed [tokens] with batch = 0; or NULL
  int64 positions_q_batch, positions_q_col, positions_k_batch, positions_k_col;
  int* dropped;  // counts the tokens that write nothing; or NULL
};

}  // namespace tessera
