// From a checked plan and buffers to kernel parameters, and the parallel regions of each direction.
#include "cpu/run.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>
#include <string>

#include "core/convert.hpp"
#include "core/dtypes.hpp"
#include "core/geometry.hpp"
#include "core/guarded.hpp"
#include "core/problem_view.hpp"
#include "cpu/cpu.hpp"
#include "cpu/packed_keys.hpp"
#include "cpu/runner.hpp"
#include "cpu/score/program_call.hpp"
#include "cpu/score/step.hpp"
#include "cpu/tables.hpp"
#include "cpu/unowned_rows.hpp"

namespace tessera::cpu {
namespace {

// With less work a second thread costs more than it gains.
constexpr double kMinParallelFlops = 4e5;

// `fraction`: the part of the plan's work that this call has.
Runner runner_of(const tessera_plan& plan, void* workspace, const tessera_executor& executor, core::Cancel& cancel,
                 double fraction) {
  const bool small = std::max(plan.flops, plan.bytes_moved) * fraction < kMinParallelFlops;
  char* const scratch = static_cast<char*>(workspace) + plan.shared_bytes;
  return Runner(plan.device.threads, scratch, plan.scratch_bytes, executor, cancel, small);
}

// Converts strides in elements to bytes.
RowTensor row_tensor(const core::TensorView<core::RowStrides>& view) {
  const core::RowStrides& s = view.stride;
  return {static_cast<char*>(view.data), s.batch * view.elem_bytes, s.row * view.elem_bytes, s.head * view.elem_bytes};
}

ScoreTensor score_tensor(const core::ScoreView& view) {
  const core::ScoreStrides& s = view.stride;
  const int64_t bytes = view.elem_bytes;
  return {static_cast<char*>(view.data),
          s.batch * bytes,
          s.head * bytes,
          s.row * bytes,
          s.col * bytes,
          view.cols,
          view.dtype};
}

Scales scales_of(const core::TensorView<core::ScaleStrides>& view, bool paged) {
  const core::ScaleStrides& s = view.stride;
  const bool in_pages = paged && s.tokens == 1;
  return {static_cast<const char*>(view.data),
          s.batch * view.elem_bytes,
          s.row * view.elem_bytes,
          s.head * view.elem_bytes,
          view.data ? s.tokens : 1,
          in_pages};
}

void fill_tensors(Params& p, const core::ProblemView& view, const tessera_problem& problem,
                  const tessera_buffers& buffers) {
  p.q = row_tensor(view.q), p.k = row_tensor(view.k), p.v = row_tensor(view.v);
  p.o = row_tensor(core::row_view(problem.o, buffers.o));
  p.q_scales = scales_of(view.q_scales, false);
  p.k_scales = scales_of(view.k_scales, core::paged(problem));
  p.v_scales = scales_of(view.v_scales, core::paged(problem));
  const core::TensorView<core::LseStrides> lse = core::lse_view(problem.lse, buffers.lse);
  p.lse = static_cast<char*>(lse.data);
  p.lse_batch = lse.stride.batch * 4, p.lse_head = lse.stride.head * 4, p.lse_row = lse.stride.row * 4;
  const core::TensorView<core::LseStrides> low = core::lse_view(problem.lse_low, buffers.lse_low);
  p.lse_low = static_cast<char*>(low.data);
  p.lse_low_batch = low.stride.batch * 4, p.lse_low_head = low.stride.head * 4, p.lse_low_row = low.stride.row * 4;
  p.page_table = view.page_table;
  p.page_table_col = view.page_table_col * 4;
  if (core::paged(problem)) p.page_size = problem.k.shape[1];
#define TESSERA_TENSOR(Class, flag, tensor, ...) p.tensor = score_tensor(core::score_view(#tensor, problem, buffers));
  TESSERA_SCORE_OPTIONS(TESSERA_NO_OPTION, TESSERA_TENSOR, TESSERA_TENSOR)
#undef TESSERA_TENSOR
  p.mask_block_q = view.mask_block_q, p.mask_block_k = view.mask_block_k;
  p.sink = view.sink, p.sink_head = view.sink_stride * 4;
}

void fill_options(Params& p, const core::ProblemView& view, const tessera_problem& problem,
                  const tessera_buffers& buffers) {
  p.scale = view.scale, p.scale_log2 = view.scale_log2;
  p.softcap = view.softcap;
  const bool products_alone = !ScoreStep<QueryLanes>::changes_scores(p) && p.scale != 0;
  p.units_log2 = products_alone ? double{p.scale_log2} / p.scale : std::numbers::log2e;
  p.causal = view.causal || core::present(problem.causal_seqs);
  p.window_left = view.window_left, p.window_right = view.window_right;
  p.dropout_threshold = view.dropout_threshold, p.dropout_scale = view.dropout_scale;
  const core::Dropout dropout = core::dropout_on_host(problem, buffers);
  const core::PhiloxKey key = core::dropout_key(dropout.seed, dropout.offset);
  p.dropout_key[0] = key[0], p.dropout_key[1] = key[1];
  p.dropout_offset = static_cast<uint32_t>(dropout.offset);
  const core::WholeHeads whole = core::whole_heads(problem);
  p.first_head = whole.first_head, p.heads = whole.heads, p.group = whole.group;
  p.first_sequence = whole.first_sequence;
}

// The rounding of a maximum or LSE of this magnitude, in log2 units, is visible in the weights: 5e-6 of them in
// float32, and 8e-5 if P is rounded to bfloat16, whose own error is 2e-3. Normally distributed scores of deviation 1
// have maxima of 4 to 7; larger magnitudes use a slower path.
float huge_score(bool rounded_p) { return rounded_p ? 1024.0f : 64.0f; }

// The keys that a call's sequences have in use.
struct KeysInUse {
  int64_t longest = 0;  // the most of a sequence that is not decoded
  int64_t decoded = 0;  // of all sequences that are decoded
  double fraction = 1;  // the part of the keys that the plan counted
};

// The keys that the sequences of a plan have in use.
KeysInUse keys_in_use(const tessera_plan& plan, const tessera_buffers& buffers) {
  const core::Sizes size = core::sizes(plan.problem);
  KeysInUse in_use;
  int64_t keys = 0;
  for (int64_t b = 0; b < plan.batch; ++b) {
    const core::SequenceView view = core::sequence(plan.problem, buffers, b);
    keys += view.sk;
    if (way_of(plan, view.sq) == kDecode) {
      in_use.decoded += view.sk;
    } else {
      in_use.longest = std::max(in_use.longest, view.sk);
    }
  }
  const int64_t counted = core::packed_k(plan.problem) ? size.rows_k : plan.batch * size.max_seqlen_k;
  if (keys < counted) in_use.fraction = static_cast<double>(keys) / static_cast<double>(counted);
  return in_use;
}

constexpr int64_t kMergeRowsPerItem = 16;

// The offset of a sequence's first page in the page table, in bytes.
int64_t page_begin(const tessera_problem& problem, const tessera_buffers& buffers, int64_t b) {
  if (core::csr_pages(problem)) {
    return buffers.page_indptr[b * problem.page_indptr.strides[0]] * problem.page_indices.strides[0] * 4;
  }
  return core::paged(problem) ? b * problem.page_table.strides[0] * 4 : 0;
}

// Fills in the place of every sequence and the running counts of tiles and items. Sequences with another path have no
// queries.
void fill_sequences(Sequence* out, const tessera_plan& plan, const tessera_buffers& buffers, Way way,
                    const KeysInUse& keys) {
  const int64_t rows_a_query = way == kPackedTile ? plan.heads_q / plan.heads_kv : 1;
  const bool backward = plan.problem.direction == TESSERA_BACKWARD;
  const int64_t rows_an_item = int64_t{step_of(plan).block_m} * (backward ? 1 : own_of(step_of(plan)).tiles_per_item);
  const core::Sizes size = core::sizes(plan.problem);
  const bool packed = core::packed_q(plan.problem);
  int64_t tiles = 0, items = 0, merges = 0, packs = 0;
  for (int64_t b = 0; b < plan.batch; ++b) {
    core::SequenceView view = core::sequence(plan.problem, buffers, b);
    if (way_of(plan, view.sq) != way) view.sq = 0;
    const int64_t row_begin = packed ? view.q_begin : b * size.rows_q;
    const PackedBlocks packed_keys = packed_blocks(plan, way, view);
    out[b] = {view.q_begin,
              view.sq,
              view.k_begin,
              view.sk,
              view.k_rows,
              row_begin,
              tiles,
              items,
              merges,
              view.causal,
              page_begin(plan.problem, buffers, b),
              packed_keys.first,
              packs,
              view.place.first_q,
              view.place.total_q,
              view.place.first_k,
              view.place.total_k,
              core::bottom_right(view.place),
              core::diagonal(plan.problem, view.place)};
    packs += packed_keys.count;
    tiles += (view.sq + step_of(plan).block_m - 1) / step_of(plan).block_m;
    if (way != kDecode) {
      items += (view.sq * rows_a_query + rows_an_item - 1) / rows_an_item;
    } else if (view.sq > 0) {
      items += decode_parts(plan, view.sk, keys.decoded);
    }
    merges += (view.sq * plan.heads_q + kMergeRowsPerItem - 1) / kMergeRowsPerItem;
  }
  out[plan.batch] = {};
  out[plan.batch].tile_begin = tiles, out[plan.batch].item_begin = items, out[plan.batch].merge_begin = merges;
  out[plan.batch].packed_begin = packs;
}

// `program`: the call's program, or none. The result points into it.
Params make_params(const tessera_plan& plan, const tessera_buffers& buffers, const SharedMemory& shared,
                   const std::optional<ProgramCall>& program, core::Cancel& cancel) {
  Params p{};
  if (program) program->fill(p);
  p.batch = plan.batch, p.heads_q = plan.heads_q, p.heads_kv = plan.heads_kv;
  p.head_dim = plan.head_dim, p.head_dim_v = plan.head_dim_v;
  p.dtype = plan.problem.q.dtype;
  const core::ProblemView view = core::problem_view(plan.problem, buffers);
  p.elem_bytes = static_cast<int32_t>(view.q.elem_bytes);
  p.kv_dtype = plan.problem.k.dtype, p.kv_elem_bytes = static_cast<int32_t>(view.k.elem_bytes);
  p.o_dtype = plan.problem.o.dtype, p.o_elem_bytes = static_cast<int32_t>(tessera_dtype_bytes(p.o_dtype));
  p.d_dtype = plan.problem.d_q.dtype, p.d_elem_bytes = static_cast<int32_t>(tessera_dtype_bytes(p.d_dtype));
  p.accumulate = plan.problem.accumulate != 0;
  fill_tensors(p, view, plan.problem, buffers);
  fill_options(p, view, plan.problem, buffers);
  if (cancel.can_be_asked()) p.cancelled = core::Cancel::ask, p.cancel = &cancel;
  p.block_n = step_of(plan).block_n, p.tiles_per_item = own_of(step_of(plan)).tiles_per_item;
  p.rows_collide = rows_collide(plan);
  p.rows_total = view.rows_total;
  p.sequences = shared.sequences[kTile];
  p.partial_o = shared.partial_o, p.partial_lse = shared.partial_lse, p.partial_lse_low = shared.partial_lse_low;
  p.huge_score = huge_score(own_of(step_of(plan)).use_dot);
  return p;
}

std::optional<ProgramCall> program_of(const tessera_plan& plan, const core::score::Bound* bound) {
  if (!bound) return {};
  return ProgramCall(plan, *bound);
}

// The sequences of one path, and the kernels that serve them.
struct Served {
  Params params;
  void (*kernel)(const Params&, int64_t item, char* scratch) = nullptr;
  int64_t items = 0, merges = 0;
  int64_t packs = 0;  // super-blocks of keys to pack before the items
};

// Whether decoding multiplies bfloat16 queries with codes of 8 bits.
bool multiplies_codes(const tessera_plan& plan) {
  return has_codes_for_bfloat16(plan.problem) && decode_table(plan).decode_codes && can_multiply_codes();
}

Served serve_decoded(const tessera_plan& plan, const SharedMemory& shared, const Params& base) {
  const KernelTable& table = decode_table(plan);
  const AmxKernelTable* amx = amx_decoder(plan);
  const bool codes = multiplies_codes(plan);
  const bool dot = codes || (table.has_dot && is_bfloat16(plan.problem));
  Served served{base, amx ? amx->decode : codes ? table.decode_codes : dot ? table.decode_dot : table.decode};
  if (plan.decode_queries == 0) return served;
  Params& p = served.params;
  p.sequences = shared.sequences[kDecode];
  p.block_n = decode_keys(plan), p.tiles_per_item = own_of(decode_step_of(plan)).tiles_per_item;
  p.rows_total = plan.decode_queries;
  p.partial_o = shared.decode_o, p.partial_lse = shared.decode_lse, p.partial_lse_low = shared.decode_lse_low;
  p.huge_score = huge_score(amx || dot);
  const Sequence& totals = p.sequences[plan.batch];
  served.items = totals.item_begin * (plan.heads_kv / own_of(decode_step_of(plan)).tiles_per_item);
  served.merges = totals.merge_begin;
  return served;
}

Served serve_tiled(const tessera_plan& plan, const KernelTable& table, const SharedMemory& shared, const Params& base,
                   bool pack_gqa, const KeySplits& splits) {
  const AmxKernelTable* amx = amx_kernels(plan);
  Served served{base, amx ? amx->forward : own_of(step_of(plan)).use_dot ? table.forward_dot : table.forward};
  Params& p = served.params;
  p.sequences = shared.sequences[pack_gqa ? kPackedTile : kTile];
  p.pack_gqa = pack_gqa;
  p.num_splits = splits.count, p.split_keys = splits.keys;
  p.partial = p.num_splits > 1 || p.accumulate;
  const Sequence& totals = p.sequences[plan.batch];
  served.packs = totals.packed_begin * plan.heads_kv;
  if (served.packs > 0) {
    const int64_t before = pack_gqa ? shared.sequences[kTile][plan.batch].packed_begin * plan.heads_kv : 0;
    p.packed_keys = shared.packed_keys + before * packed_block_bytes(plan);
  }
  served.items = totals.item_begin * (pack_gqa ? plan.heads_kv : plan.heads_q) * p.num_splits;
  served.merges = p.partial ? totals.merge_begin : 0;
  return served;
}

// Merges partial results of some rows of one sequence into o and lse.
void merge_rows(const Served& served, const core::TensorView<core::RowStrides>& accumulated, Way way,
                const KernelTable& table, int64_t item) {
  const Params& p = served.params;
  const Sequence* const end = p.sequences + p.batch;
  const Sequence& sequence = *(
      std::upper_bound(p.sequences, end, item, [](int64_t index, const Sequence& s) { return index < s.merge_begin; }) -
      1);
  const int64_t batch = &sequence - p.sequences;
  // In decoding, parts are counted for each sequence; splits of tiles are the same for all.
  const bool decoded = way == kDecode;
  const int64_t first_part = decoded ? sequence.item_begin : 0, first_row = decoded ? 0 : sequence.row_begin;
  const int64_t first = first_part * p.heads_q * p.rows_total + first_row;
  CombineParams c{};
  c.parts = decoded ? (&sequence)[1].item_begin - sequence.item_begin : p.num_splits;
  c.batch = 1, c.rows = sequence.sq, c.heads = p.heads_q, c.head_dim_v = p.head_dim_v;
  c.part_dtype = TESSERA_FLOAT32, c.dtype = p.o_dtype;
  const int64_t row_bytes = p.head_dim_v * 4;
  c.o_parts = reinterpret_cast<const char*>(p.partial_o) + first * row_bytes;
  c.o_part = p.heads_q * p.rows_total * row_bytes, c.o_part_row = row_bytes, c.o_part_head = p.rows_total * row_bytes;
  c.lse_parts = reinterpret_cast<const char*>(p.partial_lse) + first * 4;
  c.lse_part = p.heads_q * p.rows_total * 4, c.lse_part_head = p.rows_total * 4, c.lse_part_row = 4;
  c.lse_low_parts = reinterpret_cast<const char*>(p.partial_lse_low) + first * 4;
  c.lse_low_part = c.lse_part, c.lse_low_part_head = c.lse_part_head, c.lse_low_part_row = c.lse_part_row;
  c.o = p.o.data + p.o.batch * batch + p.o.row * sequence.q_begin;
  c.o_row = p.o.row, c.o_head = p.o.head;
  if (p.lse) c.lse = p.lse + p.lse_batch * batch + p.lse_row * sequence.q_begin;
  c.lse_head = p.lse_head, c.lse_row = p.lse_row;
  if (p.lse_low) c.lse_low = p.lse_low + p.lse_low_batch * batch + p.lse_low_row * sequence.q_begin;
  c.lse_low_head = p.lse_low_head, c.lse_low_row = p.lse_low_row;
  c.sink = p.sink, c.sink_head = p.sink_head;
  if (p.accumulate) {
    const RowTensor from = row_tensor(accumulated);
    c.accum_o = from.data + from.batch * batch + from.row * sequence.q_begin;
    c.accum_row = from.row, c.accum_head = from.head, c.accum_dtype = TESSERA_FLOAT32;
  }
  const int64_t begin = (item - sequence.merge_begin) * kMergeRowsPerItem;
  table.combine(c, begin, std::min(c.rows * c.heads, begin + kMergeRowsPerItem));
}

// Rows that belong to no sequence: o = 0 and LSE = -inf, or the partial result.
void clear_outputs(const Params& p, const core::TensorView<core::RowStrides>& accumulated, const UnownedRows& rows,
                   int64_t item) {
  rows.for_each(item, [&](int64_t row) {
    if (p.accumulate) {
      const RowTensor from = row_tensor(accumulated);
      for (int64_t head = 0; from.data != p.o.data && head < p.heads_q; ++head) {
        const char* of_partial = from.data + from.row * row + from.head * head;
        char* out = p.o.data + p.o.row * row + p.o.head * head;
        for (int64_t d = 0; d < p.head_dim_v; ++d) {
          core::store(p.o_dtype, out, d, core::load(TESSERA_FLOAT32, of_partial, d));
        }
      }
      return;
    }
    clear_row(p.o, row, p.heads_q, p.head_dim_v * p.o_elem_bytes);
    for (int64_t head = 0; p.lse && head < p.heads_q; ++head) {
      *reinterpret_cast<float*>(p.lse + p.lse_head * head + p.lse_row * row) = -std::numeric_limits<float>::infinity();
      if (p.lse_low) *reinterpret_cast<float*>(p.lse_low + p.lse_low_head * head + p.lse_low_row * row) = 0.0f;
    }
  });
}

void clear_bias_gradient(const tessera_layout& layout, float* d_bias) {
  for (int64_t b = 0; b < layout.shape[0]; ++b) {
    for (int64_t h = 0; h < layout.shape[1]; ++h) {
      for (int64_t i = 0; i < layout.shape[2]; ++i) {
        std::fill_n(d_bias + b * layout.strides[0] + h * layout.strides[1] + i * layout.strides[2], layout.shape[3],
                    0.0f);
      }
    }
  }
}

}  // namespace

void forward(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound, void* workspace,
             const tessera_executor& executor, core::Cancel& cancel) {
  const KernelTable& table = kernel_table(plan.device.isa);
  const SharedMemory shared = carve_shared(static_cast<char*>(workspace), plan);
  const std::optional<ProgramCall> program = program_of(plan, bound);
  const Params p = make_params(plan, buffers, shared, program, cancel);
  const KeysInUse keys = keys_in_use(plan, buffers);
  for (const Way way : {kDecode, kPackedTile, kTile}) fill_sequences(shared.sequences[way], plan, buffers, way, keys);
  const KeySplits splits = key_splits(plan, keys.longest);
  // Tiles first: their items are the longest, and decoding's short items fill the cores at the end.
  constexpr Way kOrder[] = {kTile, kPackedTile, kDecode};
  const Served ways[] = {serve_tiled(plan, table, shared, p, false, splits),
                         serve_tiled(plan, table, shared, p, true, splits), serve_decoded(plan, shared, p)};
  const Runner runner = runner_of(plan, workspace, executor, cancel, keys.fraction);
  const tessera_problem& problem = plan.problem;
  const bool in_place = !core::present(problem.o_accum);
  const auto accumulated =
      core::row_view(in_place ? problem.o : problem.o_accum, in_place ? buffers.o : buffers.o_accum);
  const UnownedRows unowned(plan.problem.cu_seqlens_q, buffers.cu_seqlens_q, core::sizes(plan.problem).rows_q);
  int64_t items = unowned.items(), merges = 0, packs = 0;
  for (const Served& served : ways) items += served.items, merges += served.merges, packs += served.packs;
  runner.run(packs, [&](int64_t item, char*) {
    for (const Served& served : ways) {
      if (item < served.packs) return amx_kernels(plan)->pack_keys(served.params, item);
      item -= served.packs;
    }
  });
  runner.run(items, [&](int64_t item, char* scratch) {
    for (const Served& served : ways) {
      if (item < served.items) return served.kernel(served.params, item, scratch);
      item -= served.items;
    }
    clear_outputs(p, accumulated, unowned, item);
  });
  if (merges == 0) return;
  runner.run(merges, [&](int64_t item, char*) {
    for (int n = 0; n < kWays; ++n) {
      const KernelTable& merger = kOrder[n] == kDecode ? decode_table(plan) : table;
      if (item < ways[n].merges) return merge_rows(ways[n], accumulated, kOrder[n], merger, item);
      item -= ways[n].merges;
    }
  });
}

void backward(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
              void* workspace, const tessera_executor& executor, core::Cancel& cancel) {
  const KernelTable& table = kernel_table(plan.device.isa);
  const tessera_problem& problem = plan.problem;
  const SharedMemory shared = carve_shared(static_cast<char*>(workspace), plan);
  const std::optional<ProgramCall> program = program_of(plan, bound);
  Params p = make_params(plan, buffers, shared, program, cancel);
  p.num_splits = step_of(plan).num_splits;
  p.d_o = row_tensor(core::row_view(problem.d_o, buffers.d_o));
  p.d_q = row_tensor(core::row_view(problem.d_q, buffers.d_q));
  p.d_k = row_tensor(core::row_view(problem.d_k, buffers.d_k));
  p.d_v = row_tensor(core::row_view(problem.d_v, buffers.d_v));
  const core::TensorView<core::LseStrides> d_lse = core::lse_view(problem.d_lse, buffers.d_lse);
  p.d_lse = static_cast<const char*>(d_lse.data);
  p.d_lse_batch = d_lse.stride.batch * 4, p.d_lse_head = d_lse.stride.head * 4, p.d_lse_row = d_lse.stride.row * 4;
  if (core::present(problem.d_bias)) {
    const core::ScoreStrides s = core::score_strides(problem.d_bias);
    p.d_bias = reinterpret_cast<char*>(buffers.d_bias);
    p.d_bias_batch = s.batch * 4, p.d_bias_head = s.head * 4, p.d_bias_row = s.row * 4;
    clear_bias_gradient(problem.d_bias, buffers.d_bias);
  }
  const bool d_sink = core::present(problem.d_sink);
  if (d_sink) p.d_sink = buffers.d_sink, p.d_sink_head = problem.d_sink.strides[0] * 4;
  p.row_shift = shared.row_shift, p.row_lse = shared.row_lse, p.row_delta = shared.row_delta;
  p.acc_dq = shared.acc_dq;
  p.acc_dq_ld = (plan.head_dim + table.lanes - 1) / table.lanes * table.lanes;
  const BackwardOwners owners = backward_owners(plan);
  p.groups_batch = static_cast<int32_t>(owners.batch), p.groups_head = static_cast<int32_t>(owners.heads);
  const KeysInUse keys = keys_in_use(plan, buffers);
  fill_sequences(shared.sequences[kTile], plan, buffers, kTile, keys);
  const Runner runner = runner_of(plan, workspace, executor, cancel, keys.fraction);

  const int64_t tiles = p.sequences[plan.batch].tile_begin;
  const AmxKernelTable* amx = amx_kernels(plan);
  p.rows_in_items = amx && step_of(plan).num_splits == 1 && p.d_dtype == p.dtype;
  const auto preprocess = amx ? amx->backward_preprocess : table.backward_preprocess;
  const int64_t row_items = p.rows_in_items ? 0 : tiles * plan.heads_q;
  const core::Sizes size = core::sizes(problem);
  const UnownedRows unowned_queries(problem.cu_seqlens_q, buffers.cu_seqlens_q, size.rows_q);
  const UnownedRows unowned_keys(problem.cu_seqlens_k, buffers.cu_seqlens_k, size.rows_k);
  runner.run(row_items + unowned_queries.items() + unowned_keys.items(), [&](int64_t item, char* scratch) {
    if (item < row_items) return preprocess(p, item, scratch);
    item -= row_items;
    if (p.accumulate) return;
    if (item < unowned_queries.items()) {
      return unowned_queries.for_each(
          item, [&](int64_t row) { clear_row(p.d_q, row, p.heads_q, p.head_dim * p.d_elem_bytes); });
    }
    unowned_keys.for_each(item - unowned_queries.items(), [&](int64_t row) {
      clear_row(p.d_k, row, p.heads_kv, p.head_dim * p.d_elem_bytes);
      clear_row(p.d_v, row, p.heads_kv, p.head_dim_v * p.d_elem_bytes);
    });
  });
  const auto kernel = amx ? amx->backward : own_of(step_of(plan)).use_dot ? table.backward_dot : table.backward;
  const int64_t items = owners.count * step_of(plan).num_splits, chains = program ? program->chains(plan) : 0;
  if (chains == 0) {
    runner.run(items, [&](int64_t item, char* scratch) { kernel(p, item, scratch); });
  } else {
    const int64_t sums = program->sums();
    runner.run(chains, [&](int64_t chain, char* scratch) {
      Params of_chain = p;
      of_chain.program_sums = shared.program_sums + chain * sums;
      std::fill_n(of_chain.program_sums, sums, 0.0);
      for (int64_t item = chain; item < items && !cancel.asked(); item += chains) kernel(of_chain, item, scratch);
    });
  }
  runner.run(program ? program->gradient_items() : 0,
             [&](int64_t item, char*) { program->write_gradients(shared.program_sums, chains, item); });
  const int64_t finish = (p.acc_dq ? row_items : 0) + (d_sink ? plan.heads_q : 0);
  const auto postprocess = amx ? amx->backward_postprocess : table.backward_postprocess;
  runner.run(finish, [&](int64_t item, char* scratch) { postprocess(p, item, scratch); });
}

}  // namespace tessera::cpu
