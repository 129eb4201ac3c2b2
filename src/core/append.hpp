// A validated tessera_append, for the back ends.
#pragma once

#include "core/geometry.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

struct AppendSizes {
  int64_t batch, tokens, tokens_q;  // dense: S and Sq, of one sequence; packed: T, of the batch
  int64_t heads_q, heads_kv, head_dim, head_dim_v;
  int64_t pages, page_size;    // dense: sequence b has one page, row b of the cache
  int64_t room;                // the number of keys that a sequence can hold
  int64_t rotary_dim, angles;  // rotary_dim 0: nothing is rotated; angles: rows of cos and sin
};
// Checks every rule that needs no data.
tessera_status validate_append(const tessera_append_call& call);

inline bool present(const tessera_tensor& tensor) { return present(tensor.layout); }

inline AppendSizes sizes(const tessera_append_call& call) {
  const tessera_layout &k = call.k.layout, &cache = call.k_cache.layout, &q = call.q.layout;
  AppendSizes s{};
  s.batch = call.seqused_k.layout.shape[0];
  s.tokens = k.shape[k.rank - 3];
  s.heads_kv = k.shape[k.rank - 2], s.head_dim = k.shape[k.rank - 1];
  s.head_dim_v = call.v.layout.shape[call.v.layout.rank - 1];
  if (present(q)) s.tokens_q = q.shape[q.rank - 3], s.heads_q = q.shape[q.rank - 2];
  s.pages = cache.shape[0], s.page_size = cache.shape[1];
  s.room = s.page_size * (present(call.page_table) ? call.page_table.layout.shape[1] : 1);
  if (present(call.cos)) s.rotary_dim = 2 * call.cos.layout.shape[1], s.angles = call.cos.layout.shape[0];
  return s;
}

// One int32 of an index tensor in host memory.
inline int64_t index_at(const tessera_tensor& tensor, int64_t i, int64_t j = 0) {
  const tessera_layout& layout = tensor.layout;
  return static_cast<const int32_t*>(
      tensor.data)[i * layout.strides[0] + (layout.rank > 1 ? j * layout.strides[1] : 0)];
}

// The new tokens of one sequence.
struct AppendedTokens {
  int64_t begin, count, count_q;  // offsets in the tensors; dense: begin is 0
  int64_t first;                  // the position of its first new key among its keys
};
inline AppendedTokens tokens_of(const tessera_append_call& call, const AppendSizes& size, int64_t b) {
  AppendedTokens tokens{0, size.tokens, size.tokens_q, 0};
  if (present(call.cu_seqlens)) {
    tokens.begin = index_at(call.cu_seqlens, b);
    tokens.count = index_at(call.cu_seqlens, b + 1) - tokens.begin;
    tokens.count_q = present(call.q) ? tokens.count : 0;
  }
  tokens.first = index_at(call.seqused_k, b) - tokens.count;
  return tokens;
}

// The row of cos and sin for token i of the sequence's queries or new keys.
inline int64_t position_of(const tessera_tensor& positions, const AppendedTokens& tokens, int64_t b, int64_t i) {
  if (!present(positions)) return tokens.first + i;
  return positions.layout.rank == 1 ? index_at(positions, tokens.begin + i) : index_at(positions, b, i);
}

// Visits every tensor of the call with its name and whether it is written.
template <class Visit>
void for_each_tensor(const tessera_append_call& call, const Visit& visit) {
  const bool in_place = present(call.q) && !present(call.q_out);
  const struct {
    const char* name;
    const tessera_tensor& tensor;
    bool written;
  } rows[] = {
      {"k", call.k, false},
      {"v", call.v, false},
      {"k_cache", call.k_cache, true},
      {"v_cache", call.v_cache, true},
      {"seqused_k", call.seqused_k, false},
      {"cu_seqlens", call.cu_seqlens, false},
      {"page_table", call.page_table, false},
      {"q", call.q, in_place},
      {"q_out", call.q_out, true},
      {"cos", call.cos, false},
      {"sin", call.sin, false},
      {"positions_q", call.positions_q, false},
      {"positions_k", call.positions_k, false},
      {"dropped", call.dropped, true},
      {"k_descale", call.k_descale, call.compute_scales != 0},
      {"v_descale", call.v_descale, call.compute_scales != 0},
  };
  for (const auto& row : rows) visit(row.name, row.tensor, row.written);
}

// Reads the caller's struct, of any size.
tessera_status read_append_call(const tessera_append_call* given, tessera_append_call& known);

// For a validated call: checks that every tensor has its own memory, and that index tensors in host memory hold
// accepted values.
tessera_status check_append_pointers(const tessera_append_call& call);
tessera_status check_append_indices(const tessera_append_call& call);

}  // namespace tessera::core
