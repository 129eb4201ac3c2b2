#include "core/prefix_chunks.hpp"

#include <algorithm>
#include <string_view>

#include "core/geometry.hpp"
#include "core/problem_view.hpp"
#include "core/shared_prefix.hpp"

namespace tessera::core {
namespace {

constexpr std::string_view kInChunks = "fwd_sm90";  // the one family that reads prefixes in chunks
constexpr int64_t kUnitKeys = 128;  // the largest tile, so that only a prefix's last chunk ends inside one

}  // namespace

int64_t prefix_chunks(const tessera_plan& plan) {
  const tessera_plan_step& step = plan.steps[0];
  const bool in_chunks = plan.num_steps > 0 && step.keys == TESSERA_STEP_PREFIXES && step.family == kInChunks;
  return in_chunks ? step.num_splits : 1;
}

int64_t chunk_sequences(int64_t chunks, int64_t groups) { return groups == 1 ? chunks : 2 * chunks * groups; }

int64_t chunk_unit(int64_t keys_an_entry) { return divide_up(kUnitKeys, keys_an_entry); }

tessera_problem chunked(const tessera_problem& part, int64_t chunks, int64_t keys_an_entry) {
  const Sizes size = sizes(part);
  const int64_t heads = size.heads_kv, rows = size.rows_q * (size.heads_q / heads), total = chunks * rows;
  const int64_t sequences = chunk_sequences(chunks, size.batch);
  const bool packed = size.batch != 1;
  const auto rows_of = [&](int64_t columns) {
    const int64_t row = heads * columns;
    if (packed) return tessera_layout{part.q.dtype, 3, {total, heads, columns}, {row, columns, 1}};
    return tessera_layout{part.q.dtype, 4, {chunks, rows, heads, columns}, {rows * row, row, columns, 1}};
  };
  const auto indices = [](int64_t count) { return tessera_layout{TESSERA_INT32, 1, {count}, {1}}; };
  tessera_problem p = part;
  p.q = rows_of(size.head_dim), p.o = rows_of(size.head_dim_v);
  p.lse = packed ? tessera_layout{TESSERA_FLOAT32, 2, {heads, total}, {total, 1}}
                 : tessera_layout{TESSERA_FLOAT32, 3, {chunks, heads, rows}, {rows, total, 1}};
  p.cu_seqlens_q = packed ? indices(sequences + 1) : tessera_layout{};
  p.seqused_k = indices(sequences);
  (paged(part) ? p.page_indptr : p.cu_seqlens_k) = indices(sequences + 1);
  const int64_t unit = chunk_unit(keys_an_entry), entries = divide_up(size.max_seqlen_k, keys_an_entry);
  p.max_seqlen_q = packed ? rows : 0;
  p.max_seqlen_k = std::min(size.max_seqlen_k, divide_up(divide_up(entries, chunks), unit) * unit * keys_an_entry);
  return p;
}

}  // namespace tessera::core
