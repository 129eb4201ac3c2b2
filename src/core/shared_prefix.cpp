#include "core/shared_prefix.hpp"

#include <algorithm>
#include <cinttypes>

#include "core/problem_view.hpp"
#include "core/status.hpp"
#include "core/steps.hpp"

namespace tessera::core {
namespace {

// Rows [batch, count] of a tensor as the rows of one sequence: rows are `stride` apart, and sequences `a_sequence`
// apart.
struct JoinedRows {
  bool exists;
  int64_t stride, a_sequence;
};
JoinedRows join_rows(int64_t batch, int64_t count, int64_t batch_stride, int64_t stride) {
  if (batch <= 1 || count == 0) return {true, stride, 0};
  if (count == 1) return {true, batch_stride, 1};
  const bool apart = stride > 0 && batch_stride % stride == 0 && batch_stride / stride >= count;
  return {apart, stride, apart ? batch_stride / stride : 0};
}

JoinedRows joined_rows(const tessera_layout& layout) {
  return join_rows(layout.shape[0], layout.shape[1], layout.strides[0], layout.strides[1]);
}

// [B, S, H, D] -> [rows, H, D]
tessera_layout joined(const tessera_layout& layout, int64_t rows) {
  const auto [batch, count, heads, columns, none] = layout.shape;
  return {layout.dtype, 3, {rows, heads, columns}, {joined_rows(layout).stride, layout.strides[2], layout.strides[3]}};
}

tessera_layout indices(int64_t count) { return {TESSERA_INT32, 1, {count}, {1}}; }

// The layouts of a part's o and lse are those of packed queries.
tessera_layout part_o(const tessera_problem& problem, bool packed, int64_t rows) {
  const Sizes size = sizes(problem);
  const int64_t dv = size.head_dim_v, row = size.heads_q * dv;
  if (packed) return {problem.q.dtype, 3, {rows, size.heads_q, dv}, {row, dv, 1}};
  return {problem.q.dtype, 4, {size.batch, size.rows_q, size.heads_q, dv}, {size.rows_q * row, row, dv, 1}};
}
tessera_layout part_lse(const tessera_problem& problem, bool packed, int64_t rows) {
  const Sizes size = sizes(problem);
  if (packed) return {TESSERA_FLOAT32, 2, {size.heads_q, rows}, {rows, 1}};
  return {TESSERA_FLOAT32, 3, {size.batch, size.heads_q, size.rows_q}, {size.rows_q, rows, 1}};
}

tessera_problem problem_of(const tessera_problem& whole, PrefixPart part) {
  const Sizes size = sizes(whole);
  const bool shared = part == kPrefix, packed = shared || packed_q(whole);
  const int64_t rows = rows_total(whole), sequences = shared ? prefix_groups(whole) : size.batch;
  tessera_problem p = whole;
  p.prefix_groups = p.prefix_lens = p.sink = {};  // the sink is added by the merge
  p.max_prefix_k = p.max_suffix_k = 0;
  p.o = part_o(whole, packed, rows), p.lse = part_lse(whole, packed, rows);
  p.lse_low = {};
  if (shared) {
    p.causal = 0, p.causal_seqs = p.tree_mask = {};  // a prefix ends before the first query that could miss any of it
    p.q = joined_queries(whole);
    p.cu_seqlens_q = indices(sequences + 1);
    p.max_seqlen_q = 0;
  }
  const KeyPlaces places = key_places(whole);
  if (paged(whole)) {
    if (present(whole.page_table)) {
      const tessera_layout& table = whole.page_table;
      p.page_indices = {TESSERA_INT32, 1, {places.entries}, {joined_rows(table).stride}};
      p.page_table = {};
    }
    p.page_indptr = indices(sequences + 1);
  } else {
    if (!packed_k(whole)) p.k = joined(whole.k, places.entries), p.v = joined(whole.v, places.entries);
    p.cu_seqlens_k = indices(sequences + 1);
  }
  p.seqused_k = indices(sequences);
  const int64_t bound = shared ? whole.max_prefix_k : whole.max_suffix_k;
  p.max_seqlen_k = bound > 0 ? std::min(bound, size.max_seqlen_k) : size.max_seqlen_k;
  return p;
}

// ---- one group ------------------------------------------------------------------------------------------------------

int64_t at(const tessera_layout& layout, const int32_t* indices, int64_t index) {
  return indices[index * layout.strides[0]];
}

struct Group {
  int64_t begin, end;  // its range of sequences
  int64_t reader;      // the sequence whose keys are read: the first with queries
  int64_t keys;        // the number of keys that are read once
};

Group group_of(const tessera_plan& plan, const tessera_buffers& buffers, int64_t g) {
  const tessera_problem& p = plan.problem;
  Group group{at(p.prefix_groups, buffers.prefix_groups, g), at(p.prefix_groups, buffers.prefix_groups, g + 1), 0, 0};
  group.reader = group.begin;
  int64_t keys = at(p.prefix_lens, buffers.prefix_lens, g);
  if (p.max_prefix_k > 0) keys = std::min(keys, p.max_prefix_k);
  bool found = false;
  for (int64_t b = group.begin; b < group.end; ++b) {
    const SequenceView view = sequence(p, buffers, b);
    if (view.sq == 0) continue;
    if (!found) group.reader = b;
    found = true;
    keys = std::min(keys, hides_keys(p, view.causal) ? view.sk - view.sq : view.sk);
  }
  const int64_t page = key_places(p).keys;
  group.keys = found ? std::max<int64_t>(keys, 0) / page * page : 0;
  return group;
}

// The entry of a sequence's first key; for b = B, the end of all entries.
int64_t first_entry(const tessera_problem& p, const tessera_buffers& buffers, const KeyPlaces& places, int64_t b) {
  if (csr_pages(p)) return at(p.page_indptr, buffers.page_indptr, b);
  if (packed_k(p)) return at(p.cu_seqlens_k, buffers.cu_seqlens_k, b);
  return b == sizes(p).batch ? places.entries : b * places.a_sequence;
}

int64_t first_query(const tessera_problem& p, const tessera_buffers& buffers, int64_t b) {
  return packed_q(p) ? at(p.cu_seqlens_q, buffers.cu_seqlens_q, b) : b * p.q.shape[1];
}

}  // namespace

tessera_layout joined_queries(const tessera_problem& problem) {
  return packed_q(problem) ? problem.q : joined(problem.q, rows_total(problem));
}

KeyPlaces key_places(const tessera_problem& problem) {
  const Sizes size = sizes(problem);
  const int64_t page = paged(problem) ? size.page_size : 1;
  if (csr_pages(problem)) return {0, problem.page_indices.shape[0], page};
  if (packed_k(problem)) return {0, size.rows_k, page};
  const tessera_layout& rows = paged(problem) ? problem.page_table : problem.k;
  const int64_t count = rows.shape[1], a_sequence = joined_rows(rows).a_sequence;
  return {a_sequence, size.batch == 0 ? 0 : (size.batch - 1) * a_sequence + count, page};
}

std::string refuse_prefixes(const tessera_problem& problem) {
  if (rows_total(problem) > INT32_MAX) return "q: more than 2^31 rows in all, those of a group are one sequence's";
  if (!packed_q(problem)) {
    const JoinedRows rows = joined_rows(problem.q);
    if (!rows.exists || (rows.a_sequence != 0 && rows.a_sequence != problem.q.shape[1])) {
      return "q: strides by which a group's queries are not one sequence's, whose rows are equally far apart";
    }
  }
  if (!packed_k(problem) && !csr_pages(problem)) {
    const char* const what = "strides by which the sequences do not lie one after the other";
    if (paged(problem)) {
      if (!joined_rows(problem.page_table).exists) return std::string("page_table: ") + what;
    } else {
      const JoinedRows k = joined_rows(problem.k), v = joined_rows(problem.v);
      if (!k.exists) return std::string("k: ") + what;
      if (!v.exists || v.a_sequence != k.a_sequence) return std::string("v: ") + what + " as those of k";
    }
    if (key_places(problem).entries > INT32_MAX) return "k: more than 2^31 rows in all";
  }
  return "";
}

tessera_plan plan_of(const tessera_plan& plan, PrefixPart part, int64_t chunks) {
  tessera_plan of = question_of(plan);
  of.problem = problem_of(plan.problem, part);
  if (part == kPrefix && chunks > 1) of.problem = chunked(of.problem, chunks, key_places(plan.problem).keys);
  of.problem.lse_low = of.problem.lse;  // the merge weights parts by both floats
  const Sizes size = sizes(of.problem);
  of.batch = size.batch, of.heads_q = size.heads_q;
  of.max_seqlen_q = size.max_seqlen_q, of.max_seqlen_k = size.max_seqlen_k;
  of.kernel = of.device.kernel = TESSERA_KERNEL_AUTO, of.family[0] = of.device.family[0] = '\0';
  of.decode_queries = 0;
  of.steps[0].keys = step_keys(part);
  if (chunks > 1) of.steps[0].num_splits = static_cast<int32_t>(chunks);
  for (const tessera_plan_step& step : steps_of(plan)) {
    if (step.keys != step_keys(part)) continue;
    of.steps[of.num_steps++] = step;
    of.device.isa = step.isa;
    of.decode_queries = std::max(of.decode_queries, step.most_queries);
  }
  return of;
}

tessera_plan plan_of(const tessera_plan& plan, PrefixPart part) {
  return plan_of(plan, part, part == kPrefix ? prefix_chunks(plan) : 1);
}

void keep_steps(tessera_plan& plan, const tessera_plan& part) {
  for (const tessera_plan_step& step : steps_of(part)) plan.steps[plan.num_steps++] = step;
}

PrefixMemory carve_prefix(char* base, const tessera_plan& plan) {
  constexpr int64_t kLine_bytes = 64;
  const tessera_problem& p = plan.problem;
  const int64_t rows = rows_total(p), groups = prefix_groups(p);
  const int64_t elem_bytes = static_cast<int64_t>(tessera_dtype_bytes(p.q.dtype));
  PrefixMemory memory{};
  const auto take = [&](int64_t bytes) {
    char* const at = base ? base + memory.bytes : nullptr;
    memory.bytes += (bytes + kLine_bytes - 1) / kLine_bytes * kLine_bytes;
    return at;
  };
  for (char*& o : memory.o) o = take(rows * plan.heads_q * plan.head_dim_v * elem_bytes);
  for (float*& lse : memory.lse) lse = reinterpret_cast<float*>(take(rows * plan.heads_q * 4));
  for (float*& low : memory.lse_low) low = reinterpret_cast<float*>(take(rows * plan.heads_q * 4));
  const auto take_indices = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count * 4)); };
  memory.group_queries = take_indices(groups + 1), memory.group_keys = take_indices(groups + 1);
  memory.group_lens = take_indices(groups);
  memory.suffix_keys = take_indices(plan.batch + 1), memory.suffix_lens = take_indices(plan.batch);
  if (const int64_t count = prefix_chunks(plan); count > 1) {
    ChunkMemory& chunks = memory.chunks;
    const int64_t heads = count * rows * plan.heads_q, sequences = chunk_sequences(count, groups);
    chunks.q = take(heads * plan.head_dim * elem_bytes), chunks.o = take(heads * plan.head_dim_v * elem_bytes);
    chunks.lse = reinterpret_cast<float*>(take(heads * 4)), chunks.lse_low = reinterpret_cast<float*>(take(heads * 4));
    if (groups > 1) chunks.rows = take_indices(sequences + 1);
    chunks.keys = take_indices(sequences + 1), chunks.lens = take_indices(sequences);
  }
  return memory;
}

tessera_buffers buffers_of(const tessera_plan& plan, PrefixPart part, const tessera_buffers& buffers,
                           const PrefixMemory& memory) {
  const bool shared = part == kPrefix, in_chunks = shared && prefix_chunks(plan) > 1;
  const ChunkMemory& chunks = memory.chunks;
  tessera_buffers of = buffers;
  of.o = memory.o[part], of.lse = memory.lse[part], of.lse_low = memory.lse_low[part];
  if (in_chunks) of.q = chunks.q, of.o = chunks.o, of.lse = chunks.lse, of.lse_low = chunks.lse_low;
  if (shared) of.cu_seqlens_q = in_chunks ? chunks.rows : memory.group_queries;
  const int32_t* const keys = in_chunks ? chunks.keys : shared ? memory.group_keys : memory.suffix_keys;
  if (paged(plan.problem)) {
    of.page_indptr = keys;
    if (present(plan.problem.page_table)) of.page_indices = buffers.page_table;
  } else {
    of.cu_seqlens_k = keys;
  }
  of.seqused_k = in_chunks ? chunks.lens : shared ? memory.group_lens : memory.suffix_lens;
  return of;
}

tessera_combine_call merge_of(const tessera_plan& plan, const tessera_buffers& buffers, const PrefixMemory& memory) {
  const tessera_problem& p = plan.problem;
  const bool packed = packed_q(p);
  const int64_t total = rows_total(p), batch = packed ? 1 : plan.batch, rows = packed ? total : p.q.shape[1];
  const int64_t heads = plan.heads_q, dv = plan.head_dim_v,
                elem_bytes = static_cast<int64_t>(tessera_dtype_bytes(p.q.dtype));
  tessera_combine_call t{};
  t.o_parts.data = memory.o[0], t.lse_parts.data = memory.lse[0];
  t.o_parts.layout = {p.q.dtype,
                      5,
                      {kPrefixParts, batch, rows, heads, dv},
                      {(memory.o[1] - memory.o[0]) / elem_bytes, rows * heads * dv, heads * dv, dv, 1}};
  t.lse_parts.layout = {
      TESSERA_FLOAT32, 4, {kPrefixParts, batch, heads, rows}, {memory.lse[1] - memory.lse[0], rows, total, 1}};
  const RowStrides o = row_strides(p.o);
  t.o.data = buffers.o, t.o.layout = {p.o.dtype, 4, {batch, rows, heads, dv}, {o.batch, o.row, o.head, 1}};
  if (present(p.lse)) {
    const LseStrides lse = lse_strides(p.lse);
    t.lse.data = buffers.lse, t.lse.layout = {TESSERA_FLOAT32, 3, {batch, heads, rows}, {lse.batch, lse.head, lse.row}};
  }
  t.lse_low_parts = {t.lse_parts.layout, memory.lse_low[0]};
  t.lse_low_parts.layout.strides[0] = memory.lse_low[1] - memory.lse_low[0];
  if (present(p.lse_low)) {
    const LseStrides low = lse_strides(p.lse_low);
    t.lse_low = {{TESSERA_FLOAT32, 3, {batch, heads, rows}, {low.batch, low.head, low.row}}, buffers.lse_low};
  }
  return t;
}

tessera_status check_prefixes(const tessera_plan& plan, const tessera_buffers& buffers) {
  const tessera_problem& p = plan.problem;
  std::string shared;  // for the text of a refusal
  for (int64_t g = 0; g < prefix_groups(p); ++g) {
    const int64_t given = at(p.prefix_lens, buffers.prefix_lens, g);
    if (given < 0) return invalid("prefix_lens[%" PRId64 "]: %" PRId64 ", accepted from 0 on", g, given);
    const int64_t end = at(p.prefix_groups, buffers.prefix_groups, g + 1);
    for (int64_t b = at(p.prefix_groups, buffers.prefix_groups, g); b < end; ++b) {
      const SequenceView view = sequence(p, buffers, b);
      if (view.sq == 0 || given <= view.sk) continue;
      return invalid("prefix_lens[%" PRId64 "]: %" PRId64 ", accepted 0 .. %" PRId64 ", the keys of sequence %" PRId64
                     " of that group",
                     g, given, view.sk, b);
    }
  }
  if (p.max_suffix_k == 0) return ok();
  int64_t g = -1;
  Group group{};  // the group of sequence b, or the last one before it
  for (int64_t b = 0; b < plan.batch; ++b) {
    while (b >= group.end && g + 1 < prefix_groups(p)) group = group_of(plan, buffers, ++g);
    const SequenceView view = sequence(p, buffers, b);
    const bool member = b >= group.begin && b < group.end;
    const int64_t others = view.sk - (member ? group.keys : 0);
    if (view.sq == 0 || others <= p.max_suffix_k) continue;
    return invalid("max_suffix_k: %" PRId64 ", but of sequence %" PRId64 " %" PRId64 " keys are not read once",
                   p.max_suffix_k, b, others);
  }
  return ok();
}

void fill_prefix_indices(const tessera_plan& plan, const tessera_buffers& buffers, const PrefixMemory& memory) {
  const tessera_problem& p = plan.problem;
  const KeyPlaces places = key_places(p);
  const int64_t groups = prefix_groups(p);
  // A sequence without queries reads nothing, whatever its keys and pages are.
  const auto fill = [&](int64_t begin, int64_t end, int64_t shared) {
    for (int64_t b = begin; b < end; ++b) {
      const SequenceView view = sequence(p, buffers, b);
      const int64_t keys = view.sq > 0 ? shared : view.sk;
      memory.suffix_keys[b] =
          static_cast<int32_t>(first_entry(p, buffers, places, b) + (view.sq > 0 ? shared / places.keys : 0));
      memory.suffix_lens[b] = static_cast<int32_t>(view.sk - keys);
    }
  };
  const int64_t first = at(p.prefix_groups, buffers.prefix_groups, 0);
  fill(0, first, 0);
  memory.group_queries[0] = static_cast<int32_t>(first_query(p, buffers, first));
  for (int64_t g = 0; g < groups; ++g) {
    const Group group = group_of(plan, buffers, g);
    memory.group_queries[g + 1] = static_cast<int32_t>(first_query(p, buffers, group.end));
    memory.group_keys[g] = static_cast<int32_t>(first_entry(p, buffers, places, group.reader));
    memory.group_lens[g] = static_cast<int32_t>(group.keys);
    fill(group.begin, group.end, group.keys);
  }
  fill(at(p.prefix_groups, buffers.prefix_groups, groups), plan.batch, 0);
  memory.group_keys[groups] = memory.suffix_keys[plan.batch] =
      static_cast<int32_t>(first_entry(p, buffers, places, plan.batch));
}

}  // namespace tessera::core
