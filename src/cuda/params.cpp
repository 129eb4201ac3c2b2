#include "cuda/params.hpp"

#include <algorithm>
#include <cstdint>
#include <numbers>

#include "core/geometry.hpp"
#include "core/problem_view.hpp"
#include "core/score/bound.hpp"
#include "core/status.hpp"

namespace tessera::cuda {

using core::present;

namespace {

RowTensor row_tensor(const core::TensorView<core::RowStrides>& view) {
  return {view.data, view.stride.batch, view.stride.row, view.stride.head};
}
ScoreTensor score_tensor(const core::ScoreView& view) {
  return {view.data, view.stride.batch, view.stride.head, view.stride.row, view.stride.col};
}

// Whether the tensor has an entry for each score, [B|1, H|1, Sq|1, Sk].
constexpr bool has_entries(core::TensorName name) {
  return core::kTensorFields[name.index].form == core::Form::kLastAxes;
}

}  // namespace

RowTensor row_tensor(const tessera_layout& layout, const void* data) {
  return row_tensor(core::row_view(layout, data));
}

StatTensor stat_tensor(const tessera_layout& layout, const void* data) {
  const core::TensorView<core::LseStrides> view = core::lse_view(layout, data);
  return {static_cast<float*>(view.data), view.stride.batch, view.stride.head, view.stride.row};
}

ScoreTensor score_tensor(const tessera_layout& layout, const void* data) {
  if (!present(layout)) return {};
  const core::ScoreStrides stride = core::score_strides(layout);
  return {const_cast<void*>(data), stride.batch, stride.head, stride.row, stride.col};
}

ScaleTensor scale_tensor(const tessera_layout& layout, const float* data, bool in_pages) {
  if (!present(layout)) return {};
  const core::ScaleStrides s = core::scale_strides(layout, in_pages);
  return {data, s.batch, s.row, s.head, s.tokens == 1};
}

// The number of keys whose entries can be read in one word of at most 16 bytes; the first key must be a multiple of it.
constexpr int kMostEntryKeys = 8;
int entry_keys(const ScoreTensor& tensor, const tessera_layout& layout) {
  constexpr uintptr_t kWordBytes = 16;
  const uintptr_t bytes = static_cast<uintptr_t>(tessera_dtype_bytes(layout.dtype));
  for (const int keys : {kMostEntryKeys, 2}) {
    const bool apart = tensor.batch % keys == 0 && tensor.head % keys == 0 && tensor.row % keys == 0;
    const uintptr_t word = std::min(keys * bytes, kWordBytes);
    if (!tensor.data || (tensor.col == 1 && apart && reinterpret_cast<uintptr_t>(tensor.data) % word == 0)) return keys;
  }
  return 1;
}

// Packed sequences use tile indices padded over the whole batch.
bool head_by_head(const tessera_problem& problem, const ProblemParams& p) {
  bool own_heads = false, own_sequences = false;
  const auto add = [&](const ScoreTensor& tensor) {
    own_heads |= tensor.head != 0 && tensor.batch == 0;
    own_sequences |= tensor.head == 0 && tensor.batch != 0;
  };
#define TESSERA_TENSOR(Class, flag, tensor, ...) \
  if constexpr (has_entries(#tensor)) add(p.tensor);
  TESSERA_SCORE_OPTIONS(TESSERA_NO_OPTION, TESSERA_TENSOR, TESSERA_NO_OPTION)
#undef TESSERA_TENSOR
  return own_heads && !own_sequences && !core::packed_q(problem) && !core::packed_k(problem);
}

bool rows_aligned(const tessera_layout& layout, const void* data) {
  constexpr int64_t kLoadBytes = 16;
  const int64_t bytes = static_cast<int64_t>(tessera_dtype_bytes(layout.dtype));
  bool aligned = reinterpret_cast<uintptr_t>(data) % kLoadBytes == 0;
  for (int axis = 0; axis + 1 < layout.rank; ++axis) {
    aligned = aligned && (layout.shape[axis] == 1 || layout.strides[axis] * bytes % kLoadBytes == 0);
  }
  return aligned;
}

tessera_status check_address_beside_codes(const char* name, const void* data, int32_t codes) {
  constexpr uintptr_t kLoadBytes = 16;
  if (reinterpret_cast<uintptr_t>(data) % kLoadBytes == 0) return ok();
  return invalid("%s: address %p, %s on a GPU accepts multiples of %d bytes", name, data, tessera_dtype_name(codes),
                 static_cast<int>(kLoadBytes));
}

tessera_layout codes_in_pairs(tessera_layout layout) {
  layout.dtype = TESSERA_FLOAT16;
  layout.shape[layout.rank - 1] /= 2;
  for (int axis = 0; axis + 1 < layout.rank; ++axis) layout.strides[axis] /= 2;
  return layout;
}

int64_t rows_total(const tessera_plan& plan) { return core::rows_total(plan.problem); }

ScoreConfig score_config(const tessera_plan& plan) {
  const tessera_problem& problem = plan.problem;
  ScoreConfig score{};
#define TESSERA_TENSOR(Class, flag, tensor, ...) score.flag = present(problem.tensor);
  TESSERA_SCORE_OPTIONS(TESSERA_NO_OPTION, TESSERA_TENSOR, TESSERA_TENSOR)
#undef TESSERA_TENSOR
  score.softcap = problem.softcap > 0;
  score.bias_dtype = static_cast<Dtype>(score.bias ? problem.bias.dtype : 0);
  score.program = problem.program != nullptr;  // of a plan: what is left of it is more than options
  score.only_hides = core::score::only_hides(plan);
  score.dropout = problem.dropout_p > 0;
  score.dropout_state = score.dropout && present(problem.dropout_state);
  score.scale_first = !(problem.scale > 0);
  score.causal_seqs = present(problem.causal_seqs);
  score.sequence_places = present(problem.places);
  score.places = score.dropout || score.program ? core::is_part(problem) : score.alibi && core::has_place(problem);
  return score;
}

PositionMasks position_masks(const tessera_problem& problem, const tessera_buffers& buffers) {
  PositionMasks masks{};
  if (present(problem.causal_seqs)) {
    masks.causal_seqs = buffers.causal_seqs, masks.causal_seqs_stride = problem.causal_seqs.strides[0];
  }
  if (present(problem.tree_mask)) {
    const core::TreeStrides s = core::tree_strides(problem.tree_mask);
    masks.tree_mask = reinterpret_cast<const uint32_t*>(buffers.tree_mask);
    masks.tree_mask_batch = s.batch, masks.tree_mask_row = s.row, masks.tree_mask_word = s.word;
    masks.tree_words = static_cast<int>(core::tree_words(problem.tree_mask));
  }
  return masks;
}

ScoreConfig score_config_beside_block_mask(const tessera_plan& plan) {
  ScoreConfig score = score_config(plan);
  score.block_mask = false;
  return score;
}

CombineConfig combine_config(const tessera_combine_call& t) {
  return {static_cast<Dtype>(t.o.layout.dtype), static_cast<Dtype>(t.o_parts.layout.dtype), false};
}

CombineParams combine_params(const tessera_combine_call& t) {
  const auto [parts, batch, rows, heads, head_dim_v] = t.o_parts.layout.shape;
  CombineParams p{};
  p.parts = static_cast<int>(parts), p.batch = static_cast<int>(batch), p.rows = Divisor(static_cast<int>(rows));
  p.heads = Divisor(static_cast<int>(heads)), p.head_dim_v = static_cast<int>(head_dim_v);
  p.o_parts = t.o_parts.data;
  const auto& o_strides = t.o_parts.layout.strides;
  p.o_part = o_strides[0], p.o_part_batch = o_strides[1], p.o_part_row = o_strides[2], p.o_part_head = o_strides[3];
  const auto part_stats = [](const tessera_tensor& tensor) {
    const auto& strides = tensor.layout.strides;
    return PartStats{static_cast<const float*>(tensor.data), strides[0], strides[1], strides[2], strides[3]};
  };
  p.lse_parts = part_stats(t.lse_parts), p.lse_low_parts = part_stats(t.lse_low_parts);
  p.o = row_tensor(t.o.layout, t.o.data);
  p.lse = stat_tensor(t.lse.layout, t.lse.data), p.lse_low = stat_tensor(t.lse_low.layout, t.lse_low.data);
  return p;
}

int64_t tiles_of(bool packed, int64_t batch, int64_t rows, int64_t rows_a_query, int64_t block) {
  return packed ? rows * rows_a_query / block + batch : divide_up(rows * rows_a_query, block);
}

namespace {

void fill_indices(ProblemParams& p, const core::ProblemView& view, const tessera_plan& plan,
                  const tessera_buffers& buffers) {
  const tessera_problem& problem = plan.problem;
  const core::Sizes size = core::sizes(problem);
  p.seqlen_q = p.rows_q = static_cast<int>(size.rows_q);
  p.seqlen_k = p.keys_limit = static_cast<int>(size.rows_k);
  p.max_seqlen_q = static_cast<int>(plan.max_seqlen_q), p.max_seqlen_k = static_cast<int>(plan.max_seqlen_k);
  p.rows_total = view.rows_total;
  if (core::packed_q(problem)) {
    p.cu_seqlens_q = buffers.cu_seqlens_q;
    p.cu_seqlens_q_stride = problem.cu_seqlens_q.strides[0];
    p.decoded_queries = plan.decode_queries;
  }
  if (core::packed_k(problem)) {
    p.keys.begins = buffers.cu_seqlens_k, p.keys.begins_stride = problem.cu_seqlens_k.strides[0];
  }
  if (core::csr_pages(problem)) {
    p.keys.begins = buffers.page_indptr, p.keys.begins_stride = problem.page_indptr.strides[0];
    p.keys_limit = static_cast<int>(problem.page_indices.shape[0]);
  }
  if (present(problem.seqused_k)) {
    p.seqused_k = buffers.seqused_k;
    p.seqused_k_stride = problem.seqused_k.strides[0];
  }
  p.keys.table = view.page_table;
  p.keys.table_batch = view.page_table_batch, p.keys.table_col = view.page_table_col;
  p.keys.page_size = static_cast<int>(size.page_size), p.keys.pages = static_cast<int>(size.pages);
}

void fill_scores(ProblemParams& p, const core::ProblemView& view, const tessera_plan& plan,
                 const tessera_buffers& buffers) {
  const tessera_problem& problem = plan.problem;
  p.scale = view.scale, p.scale_log2 = view.scale_log2;
  const double log2e =
      score_config(plan).scaled() ? double{std::numbers::log2e_v<float>} : double{p.scale_log2} / p.scale;
  p.lse_log2e = static_cast<float>(log2e), p.lse_log2e_low = static_cast<float>(log2e - p.lse_log2e);
  p.lse_ln2 = static_cast<float>(1 / log2e), p.lse_ln2_low = static_cast<float>(1 / log2e - p.lse_ln2);
  p.softcap = view.softcap;
  p.causal = view.causal, p.fixed_diagonal = view.top_left || core::has_place(problem);
  const core::Place place = core::place_of(problem, 0, 0);
  p.diagonal = static_cast<int>(core::diagonal(problem, place));
  p.bottom_right = core::has_place(problem) ? static_cast<int>(core::bottom_right(place)) : kNoPlace;
  p.first_q = static_cast<int>(place.first_q), p.first_k = static_cast<int>(place.first_k);
  if (present(problem.places)) {
    p.places = {buffers.places, problem.places.strides[0], problem.places.strides[1], view.top_left};
  }
  const core::WholeHeads whole = core::whole_heads(problem);
  p.first_head = static_cast<int>(whole.first_sequence * whole.heads + whole.first_head);
  p.whole_heads = static_cast<int>(whole.heads);
  p.window_left = static_cast<int>(view.window_left), p.window_right = static_cast<int>(view.window_right);
  p.bias_mask_keys = kMostEntryKeys;
#define TESSERA_TENSOR(Class, flag, tensor, ...)                                         \
  p.tensor = score_tensor(core::score_view(#tensor, problem, buffers));                  \
  if constexpr (has_entries(#tensor)) {                                                  \
    p.bias_mask_keys = std::min(p.bias_mask_keys, entry_keys(p.tensor, problem.tensor)); \
  }
  TESSERA_SCORE_OPTIONS(TESSERA_NO_OPTION, TESSERA_TENSOR, TESSERA_NO_OPTION)
#undef TESSERA_TENSOR
  p.head_by_head = head_by_head(problem, p);
  p.mask_block_q = static_cast<int>(view.mask_block_q), p.mask_block_k = static_cast<int>(view.mask_block_k);
  const core::ScoreView slopes = core::score_view("alibi_slopes", problem, buffers);
  p.alibi_slopes = static_cast<const float*>(slopes.data);
  p.alibi_batch = slopes.stride.batch, p.alibi_head = slopes.stride.head;
  p.sink = view.sink, p.sink_head = view.sink_stride;
  p.dropout_threshold = view.dropout_threshold, p.dropout_scale = view.dropout_scale;
  static_assert(kPhiloxRounds == core::kPhiloxRounds &&
                core::next_key({}) == core::PhiloxKey{kPhiloxWeyl0, kPhiloxWeyl1});
  core::PhiloxKey key = view.dropout_key;
  for (auto& keys : p.dropout_keys) {
    keys[0] = key[0], keys[1] = key[1];
    key = core::next_key(key);
  }
  p.dropout_offset = view.dropout_offset;
  p.dropout_state = reinterpret_cast<const int64*>(view.dropout_state),
  p.dropout_state_stride = view.dropout_state_stride;
}

}  // namespace

void fill_problem_params(ProblemParams& p, const tessera_plan& plan, const tessera_buffers& buffers) {
  p.batch = static_cast<int>(plan.batch);
  p.heads_q = Divisor(static_cast<int>(plan.heads_q)), p.heads_kv = Divisor(static_cast<int>(plan.heads_kv));
  p.group = Divisor(plan.heads_kv > 0 ? static_cast<int>(plan.heads_q / plan.heads_kv) : 1);
  p.head_dim = static_cast<int>(plan.head_dim), p.head_dim_v = static_cast<int>(plan.head_dim_v);
  const core::ProblemView view = core::problem_view(plan.problem, buffers);
  p.q = row_tensor(view.q), p.k = row_tensor(view.k), p.v = row_tensor(view.v);
  fill_indices(p, view, plan, buffers);
  fill_scores(p, view, plan, buffers);
}

}  // namespace tessera::cuda
