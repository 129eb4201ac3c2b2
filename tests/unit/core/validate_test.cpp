// One row for each rule: an argument that violates it, and the name in the message.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 40;

struct Rule {
  const char* name;
  std::function<Problem()> base;
  std::function<void(Problem&)> break_it;
  std::vector<const char*> message;  // the message starts with the first and contains the others
  Code code = Code::invalid_argument;
};
void PrintTo(const Rule& rule, std::ostream* out) { *out << rule.name; }

Problem dense() { return dense_problem(); }
Problem packed() { return packed_problem(); }
Problem paged() { return paged_problem(); }
Problem csr() { return csr_problem(); }
Problem backward() { return gradient_of(dense_problem()); }

Problem prefixed() {
  Problem p = paged_problem();
  share_prefixes(p);
  return p;
}
Problem biased_packed() {
  Problem p = packed_problem();
  p.max_seqlen_q = 10;
  p.max_seqlen_k = 12;
  p.bias = layout(float32, {3, 4, 10, 12});
  return p;
}
Problem block_masked() {
  Problem p = dense_problem();
  p.mask_block_q = 5;
  p.mask_block_k = 7;
  p.block_mask = layout(boolean, {2, 1, 4, 4});  // ceil(16 / 5), ceil(24 / 7)
  return p;
}

// bfloat16 queries over an 8-bit cache.
Problem cached() {
  Problem p = dense_problem(bfloat16);
  p.k.dtype = p.v.dtype = TESSERA_FLOAT8_E4M3;
  return p;
}
Problem cached_in_pages() {
  Problem p = paged_problem(float16);
  p.k.dtype = p.v.dtype = TESSERA_INT8;
  return p;
}
Problem float8() {
  Problem p = dense_problem(float8_e5m2);
  p.o.dtype = TESSERA_BFLOAT16;
  return p;
}

const Rule kRules[] = {
    // presence and rank
    {"q_absent", dense, [](Problem& p) { p.q.rank = 0; }, {"q: ", "absent"}},
    {"k_absent", dense, [](Problem& p) { p.k.rank = 0; }, {"k: ", "absent"}},
    {"v_absent", dense, [](Problem& p) { p.v.rank = 0; }, {"v: ", "absent"}},
    {"o_absent", dense, [](Problem& p) { p.o.rank = 0; }, {"o: ", "absent"}},
    {"rank_beyond_five", dense, [](Problem& p) { p.q.rank = 6; }, {"q: ", "rank 6"}},
    {"rank_negative", dense, [](Problem& p) { p.k.rank = -1; }, {"k: ", "rank -1"}},
    {"q_rank_3_unpacked",
     dense,
     [](Problem& p) {
       p.q = layout(float32, {16, 4, 8});
     },
     {"q: ", "rank 3", "[B, Sq, Hq, D]"}},
    {"q_rank_4_packed",
     packed,
     [](Problem& p) {
       p.q = layout(float32, {1, 16, 4, 8});
     },
     {"q: ", "rank 4", "[Tq, Hq, D]"}},
    {"k_rank_3_paged",
     paged,
     [](Problem& p) {
       p.k = layout(float32, {40, 2, 8});
     },
     {"k: ", "rank 3", "[pages, page_size, Hkv, D]"}},
    {"lse_rank_packed",
     packed,
     [](Problem& p) {
       p.lse = layout(float32, {1, 4, 16});
     },
     {"lse: ", "rank 3", "[Hq, Tq]"}},
    // dtypes
    {"q_int", dense, [](Problem& p) { p.q.dtype = TESSERA_INT32; }, {"q: ", "int32", "float16"}},
    {"q_unknown_dtype", dense, [](Problem& p) { p.q.dtype = 99; }, {"q: ", "unknown (99)"}},
    {"k_other_dtype", dense, [](Problem& p) { p.k.dtype = TESSERA_FLOAT16; }, {"k: ", "float16", "float32"}},
    {"o_other_dtype", dense, [](Problem& p) { p.o.dtype = TESSERA_BFLOAT16; }, {"o: ", "bfloat16", "float32"}},
    {"lse_dtype",
     dense,
     [](Problem& p) {
       p.lse = layout(float64, {2, 4, 16});
     },
     {"lse: ", "float64", "float32"}},
    {"bias_dtype",
     dense,
     [](Problem& p) {
       p.bias = layout(float16, {1, 1, 1, 24});
     },
     {"bias: ", "float16", "float32"}},
    {"mask_dtype",
     dense,
     [](Problem& p) {
       p.mask = layout(int32, {1, 1, 1, 24});
     },
     {"mask: ", "int32", "bool"}},
    {"lse_low_without_lse",
     dense,
     [](Problem& p) { p.lse_low = layout(float32, {2, 4, 16}); },
     {"lse_low: ", "without lse"}},
    {"lse_low_shape",
     dense,
     [](Problem& p) { p.lse = lse_layout(p), p.lse_low = layout(float32, {2, 4, 15}); },
     {"lse_low: ", "Sq = 16"}},
    {"dropout_state_dtype",
     dense,
     [](Problem& p) { p.dropout_state = layout(int32, {2}); },
     {"dropout_state: ", "int32", "int64"}},
    {"dropout_state_shape",
     dense,
     [](Problem& p) { p.dropout_state = layout(DType::int64, {3}); },
     {"dropout_state: shape [3], accepted [2]"}},
    {"dropout_state_and_seed",
     dense,
     [](Problem& p) { p.set_dropout(0.5, 7), p.dropout_state = layout(DType::int64, {2}); },
     {"dropout_seed: 7", "dropout_state", "accepted 0"}},
    {"dropout_state_and_offset",
     dense,
     [](Problem& p) { p.set_dropout(0.5, 0, 9), p.dropout_state = layout(DType::int64, {2}); },
     {"dropout_offset: 9", "dropout_state", "accepted 0"}},
    {"cu_seqlens_dtype",
     packed,
     [](Problem& p) { p.cu_seqlens_q.dtype = TESSERA_FLOAT32; },
     {"cu_seqlens_q: ", "float32", "int32"}},
    // 8 bits
    {"k_8bit_under_float32",
     dense,
     [](Problem& p) { p.k.dtype = p.v.dtype = TESSERA_FLOAT8_E4M3; },
     {"k: dtype float8_e4m3, must be that of q: float32", "queries of float16 or bfloat16"}},
    {"k_16bit_under_others", cached, [](Problem& p) { p.k.dtype = TESSERA_FLOAT16; }, {"k: ", "float16", "int8"}},
    {"v_not_as_k", cached, [](Problem& p) { p.v.dtype = TESSERA_INT8; }, {"v: dtype int8, must be that of k"}},
    {"k_not_as_float8_q", float8, [](Problem& p) { p.k.dtype = TESSERA_INT8; }, {"k: dtype int8", "float8_e5m2"}},
    {"q_int8", dense, [](Problem& p) { p.q.dtype = TESSERA_INT8; }, {"q: dtype int8, accepted"}},
    {"o_of_float8",
     float8,
     [](Problem& p) { p.o.dtype = TESSERA_FLOAT8_E5M2; },
     {"o: ", "bfloat16, float16 and float32"}},
    {"o_of_a_cache", cached, [](Problem& p) { p.o.dtype = TESSERA_FLOAT16; }, {"o: ", "that of q: bfloat16"}},
    {"bias_of_float8",
     float8,
     [](Problem& p) { p.bias = layout(float16, {1, 1, 1, 24}); },
     {"bias: ", "float32 and that of o, bfloat16"}},
    {"gradient_of_8bit",
     backward,
     [](Problem& p) { p.v.dtype = TESSERA_FLOAT8_E4M3; },
     {"v: dtype float8_e4m3 with direction backward"},
     Code::unsupported},
    {"scales_of_16_bits",
     cached,
     [](Problem& p) { p.q_descale = layout(float32, {1}); },
     {"q_descale: given with q of bfloat16"}},
    {"scales_dtype", cached, [](Problem& p) { p.k_descale = layout(float16, {1}); }, {"k_descale: ", "float32"}},
    {"scales_rank",
     cached,
     [](Problem& p) { p.k_descale = layout(float32, {2, 1, 1, 2}); },
     {"k_descale: rank 4, accepted [1], [Hkv], [B, Hkv] and [B, ceil(Sk / 128), Hkv]"}},
    {"scales_of_heads", cached, [](Problem& p) { p.v_descale = layout(float32, {4}); }, {"v_descale: ", "Hkv = 2"}},
    {"scales_of_the_batch",
     cached,
     [](Problem& p) { p.v_descale = layout(float32, {1, 2}); },
     {"v_descale: ", "B = 2"}},
    {"scales_of_blocks",
     cached,
     [](Problem& p) { p.k_descale = layout(float32, {2, 24, 2}); },
     {"k_descale: ", "ceil(Sk / 128) = 1"}},
    {"scales_of_blocks_in_pages",
     cached_in_pages,
     [](Problem& p) { p.k_descale = layout(float32, {2, 1, 2}); },
     {"k_descale: ", "[pages, page_size, Hkv]", "pages = 5"}},
    {"scales_of_packed_blocks",
     packed,
     [](Problem& p) {
       p.q.dtype = p.o.dtype = TESSERA_BFLOAT16, p.k.dtype = p.v.dtype = TESSERA_FLOAT8_E4M3;
       p.k_descale = layout(float32, {3, 1, 2});
     },
     {"max_seqlen_k: 0", "scales of blocks"}},
    // shapes
    {"heads_not_a_multiple",
     dense,
     [](Problem& p) {
       p.k = layout(float32, {2, 24, 3, 8});
     },
     {"k: 3 heads", "q's 4", "multiple"}},
    {"no_heads",
     dense,
     [](Problem& p) {
       p.q = layout(float32, {2, 16, 0, 8});
     },
     {"q: ", "Hq in 1"}},
    {"v_other_heads",
     dense,
     [](Problem& p) {
       p.v = layout(float32, {2, 24, 4, 6});
     },
     {"v: ", "Hkv = 2"}},
    {"k_other_head_dim",
     dense,
     [](Problem& p) {
       p.k = layout(float32, {2, 24, 2, 7});
     },
     {"k: ", "D = 8"}},
    {"k_other_batch",
     dense,
     [](Problem& p) {
       p.k = layout(float32, {3, 24, 2, 8});
     },
     {"k: ", "B = 2"}},
    {"v_other_length",
     dense,
     [](Problem& p) {
       p.v = layout(float32, {2, 23, 2, 6});
     },
     {"v: ", "Sk = 24"}},
    {"o_other_length",
     dense,
     [](Problem& p) {
       p.o = layout(float32, {2, 15, 4, 6});
     },
     {"o: ", "Sq = 16"}},
    {"o_other_value_dim",
     dense,
     [](Problem& p) {
       p.o = layout(float32, {2, 16, 4, 8});
     },
     {"o: ", "Dv = 6"}},
    {"lse_shape",
     dense,
     [](Problem& p) {
       p.lse = layout(float32, {2, 16, 4});
     },
     {"lse: ", "[2, 16, 4]", "[B, Hq, Sq]"}},
    {"head_dim_too_large",
     dense,
     [](Problem& p) {
       p.q = layout(float32, {2, 16, 4, 577});
     },
     {"q: ", "D in 1 .. 576"}},
    {"head_dim_zero",
     dense,
     [](Problem& p) {
       p.q = layout(float32, {2, 16, 4, 0});
     },
     {"q: ", "D in 1 .. 576"}},
    {"value_dim_too_large",
     dense,
     [](Problem& p) {
       p.v = layout(float32, {2, 24, 2, 600});
     },
     {"v: ", "Dv in 1 .. 512"}},
    {"negative_extent", dense, [](Problem& p) { p.q.shape[1] = -4; }, {"q: ", "-4", "at least 0"}},
    {"length_beyond_31_bits",
     dense,
     [](Problem& p) {
       p.q = layout(float32, {1, kHuge, 4, 8});
     },
     {"q: ", "Sq in 0 .. 2147483647"}},
    {"size_overflows",
     dense,
     [](Problem& p) {
       p.q = layout(float32, {kHuge, kHuge, kHuge, 8});
     },
     {"q: ", "2^63 bytes"}},
    {"stride_overflows",
     dense,
     [](Problem& p) { p.k.strides[0] = std::numeric_limits<std::int64_t>::max(); },
     {"k: ", "2^63 bytes"}},
    {"stride_least",
     dense,
     [](Problem& p) { p.k.strides[0] = std::numeric_limits<std::int64_t>::min(); },
     {"k: ", "2^63 bytes"}},
    {"too_many_heads_in_all",
     dense,
     [](Problem& p) {
       const std::int64_t batch = 1 << 20, heads = 1 << 11;
       p.q = layout(float32, {batch, 1, heads, 1});
       p.k = p.v = layout(float32, {batch, 1, 1, 1});
       p.o = p.q;
     },
     {"q: ", "heads in all"}},
    {"bias_shape",
     dense,
     [](Problem& p) {
       p.bias = layout(float32, {2, 4, 16, 23});
     },
     {"bias: ", "[2, 4, 16, 23]", "Sk = 24"}},
    {"bias_rank",
     dense,
     [](Problem& p) {
       p.bias = layout(float32, {1, 2, 4, 16, 24});
     },
     {"bias: rank 5", "[B|1, Hq|1, Sq|1, Sk|1] or its last axes"}},
    {"mask_of_rank_2",
     dense,
     [](Problem& p) {
       p.mask = layout(boolean, {24, 16});
     },
     {"mask: shape [24, 16]", "Sq = 16"}},
    {"d_bias_over_keys",
     backward,
     [](Problem& p) {
       p.bias = p.d_bias = layout(float32, {16, 1});
     },
     {"d_bias: shape [16, 1]", "Sk = 24"},
     Code::unsupported},
    {"bias_heads",
     dense,
     [](Problem& p) {
       p.bias = layout(float32, {2, 2, 16, 24});
     },
     {"bias: ", "[B|1, Hq|1, Sq|1, Sk|1]"}},
    {"mask_shape",
     dense,
     [](Problem& p) {
       p.mask = layout(boolean, {2, 4, 17, 24});
     },
     {"mask: ", "Sq = 16"}},
    {"alibi_shape", dense, [](Problem& p) { p.alibi_slopes = layout(float32, {2}); }, {"alibi_slopes: ", "Hq = 4"}},
    {"alibi_batch",
     dense,
     [](Problem& p) {
       p.alibi_slopes = layout(float32, {3, 4});
     },
     {"alibi_slopes: ", "B = 2"}},
    {"sink_shape", dense, [](Problem& p) { p.sink = layout(float32, {2}); }, {"sink: ", "Hq = 4"}},
    {"seqused_shape", dense, [](Problem& p) { p.seqused_k = layout(int32, {3}); }, {"seqused_k: ", "B = 2"}},
    {"cu_seqlens_empty",
     packed,
     [](Problem& p) { p.cu_seqlens_q = layout(int32, {0}); },
     {"cu_seqlens_q: ", "[B + 1]"}},
    {"cu_seqlens_differ", packed, [](Problem& p) { p.cu_seqlens_k = layout(int32, {5}); }, {"cu_seqlens_k: ", "B = 3"}},
    // strides
    {"q_last_axis", dense, [](Problem& p) { p.q.strides[3] = 2; }, {"q: ", "stride 2", "contiguous"}},
    {"k_last_axis_broadcast", dense, [](Problem& p) { p.k.strides[3] = 0; }, {"k: ", "stride 0", "contiguous"}},
    {"o_broadcast", dense, [](Problem& p) { p.o.strides[0] = 0; }, {"o: ", "positive strides"}},
    {"o_overlaps", dense, [](Problem& p) { p.o.strides[1] = 5; }, {"o: ", "one place"}},
    {"o_backwards", dense, [](Problem& p) { p.o.strides[1] = -24; }, {"o: ", "positive strides"}},
    {"lse_overlaps",
     dense,
     [](Problem& p) {
       p.lse = layout(float32, {2, 4, 16}, {64, 0, 1});
     },
     {"lse: ", "one place"}},
    // packed and paged
    {"paged_and_packed",
     paged,
     [](Problem& p) { p.cu_seqlens_k = layout(int32, {3}); },
     {"page_table: ", "cu_seqlens_k"}},
    {"paged_without_lengths", paged, [](Problem& p) { p.seqused_k.rank = 0; }, {"seqused_k: ", "page_table"}},
    {"page_table_batch",
     paged,
     [](Problem& p) {
       p.page_table = layout(int32, {1, 3});
     },
     {"page_table: ", "B = 2"}},
    {"page_size_zero",
     paged,
     [](Problem& p) {
       p.k = layout(float32, {5, 0, 2, 8});
     },
     {"k: ", "page_size in 1"}},
    {"pages_differ",
     paged,
     [](Problem& p) {
       p.v = layout(float32, {6, 8, 2, 6});
     },
     {"v: ", "pages = 5"}},
    {"too_many_pages",
     paged,
     [](Problem& p) {
       p.page_table = layout(int32, {2, 1 << 30});
     },
     {"page_table: ", "at most 2147483647"}},
    {"csr_and_rectangular",
     csr,
     [](Problem& p) {
       p.page_table = layout(int32, {2, 3});
     },
     {"page_indices: ", "page_table"}},
    {"csr_without_indptr", csr, [](Problem& p) { p.page_indptr.rank = 0; }, {"page_indptr: ", "page_indices"}},
    {"csr_without_indices", csr, [](Problem& p) { p.page_indices.rank = 0; }, {"page_indices: ", "page_indptr"}},
    {"csr_batch", csr, [](Problem& p) { p.page_indptr = layout(int32, {4}); }, {"page_indptr: ", "B = 2"}},
    {"csr_without_lengths", csr, [](Problem& p) { p.seqused_k.rank = 0; }, {"seqused_k: ", "page_indices"}},
    {"csr_and_packed",
     csr,
     [](Problem& p) { p.cu_seqlens_k = layout(int32, {3}); },
     {"page_indices: ", "cu_seqlens_k"}},
    {"csr_gradient", csr, [](Problem& p) { p = gradient_of(p); }, {"page_indices: ", "backward"}, Code::unsupported},
    {"csr_bias_without_max_k",
     csr,
     [](Problem& p) {
       p.bias = layout(float32, {1, 1, 16, 24});
     },
     {"max_seqlen_k: ", "page_indices"}},
    {"tree_of_float", dense, [](Problem& p) { p.tree_mask = layout(float32, {2, 16, 1}); }, {"tree_mask: ", "int32"}},
    {"tree_shape", dense, [](Problem& p) { p.tree_mask = layout(int32, {2, 15, 1}); }, {"tree_mask: ", "Sq = 16"}},
    {"tree_without_words",
     dense,
     [](Problem& p) { p.tree_mask = layout(int32, {2, 16, 0}); },
     {"tree_mask: ", "W in 1"}},
    {"tree_gradient",
     dense,
     [](Problem& p) {
       p.tree_mask = layout(int32, {2, 16, 1});
       p = gradient_of(p);
     },
     {"tree_mask: ", "backward"},
     Code::unsupported},
    {"prefix_groups_alone",
     paged,
     [](Problem& p) { p.prefix_groups = layout(int32, {2}); },
     {"prefix_lens: ", "absent"}},
    {"prefix_lens_alone", paged, [](Problem& p) { p.prefix_lens = layout(int32, {1}); }, {"prefix_groups: ", "absent"}},
    {"prefix_lens_shape", prefixed, [](Problem& p) { p.prefix_lens = layout(int32, {2}); }, {"prefix_lens: ", "G = 1"}},
    {"prefix_of_float", prefixed, [](Problem& p) { p.prefix_lens = layout(float32, {1}); }, {"prefix_lens: ", "int32"}},
    {"prefix_bound_negative", prefixed, [](Problem& p) { p.max_prefix_k = -1; }, {"max_prefix_k: -1", "0 .."}},
    {"suffix_bound_negative", prefixed, [](Problem& p) { p.max_suffix_k = -1; }, {"max_suffix_k: -1", "0 .."}},
    {"prefix_gradient",
     backward,
     [](Problem& p) { share_prefixes(p); },
     {"prefix_groups: ", "backward"},
     Code::unsupported},
    {"prefix_and_window",
     prefixed,
     [](Problem& p) { p.window_left = 9; },
     {"prefix_groups: ", "window"},
     Code::unsupported},
    {"prefix_and_alibi",
     prefixed,
     [](Problem& p) { p.alibi_slopes = layout(float32, {4}); },
     {"prefix_groups: ", "alibi_slopes"},
     Code::unsupported},
    {"prefix_and_bias",
     prefixed,
     [](Problem& p) { p.bias = layout(float32, {16, 24}); },
     {"prefix_groups: ", "bias"},
     Code::unsupported},
    {"prefix_and_invariance",
     prefixed,
     [](Problem& p) { p.batch_invariant = 1; },
     {"prefix_groups: ", "batch_invariant"},
     Code::unsupported},
    {"prefix_and_dropout",
     prefixed,
     [](Problem& p) { p.dropout_p = 0.5; },
     {"prefix_groups: ", "dropout_p"},
     Code::unsupported},
    {"prefix_and_top_left",
     prefixed,
     [](Problem& p) { p.alignment = TESSERA_TOP_LEFT; },
     {"prefix_groups: ", "top-left"},
     Code::unsupported},
    {"paged_gradient", paged, [](Problem& p) { p = gradient_of(p); }, {"page_table: ", "backward"}, Code::unsupported},
    {"bias_without_max_q", biased_packed, [](Problem& p) { p.max_seqlen_q = 0; }, {"max_seqlen_q: ", "bias"}},
    {"bias_without_max_k", biased_packed, [](Problem& p) { p.max_seqlen_k = 0; }, {"max_seqlen_k: ", "bias"}},
    {"bias_packed_shape", biased_packed, [](Problem& p) { p.max_seqlen_k = 11; }, {"bias: ", "Sk = 11"}},
    {"max_seqlen_negative", packed, [](Problem& p) { p.max_seqlen_q = -1; }, {"max_seqlen_q: -1", "0 .."}},
    {"max_seqlen_huge", packed, [](Problem& p) { p.max_seqlen_k = kHuge; }, {"max_seqlen_k: ", "2147483647"}},
    // options
    {"direction", dense, [](Problem& p) { p.direction = 2; }, {"direction: 2", "forward", "backward"}},
    {"causal", dense, [](Problem& p) { p.causal = 2; }, {"causal: 2", "0 and 1"}},
    {"has_scale", dense, [](Problem& p) { p.has_scale = -1; }, {"has_scale: -1", "0 and 1"}},
    {"deterministic", dense, [](Problem& p) { p.deterministic = 3; }, {"deterministic: 3", "0 and 1"}},
    {"batch_invariant", dense, [](Problem& p) { p.batch_invariant = 3; }, {"batch_invariant: 3", "0 and 1"}},
    {"alignment", dense, [](Problem& p) { p.alignment = 5; }, {"alignment: 5", "bottom-right", "top-left"}},
    {"window_left", dense, [](Problem& p) { p.window_left = -2; }, {"window_left: -2", "-1"}},
    {"window_right", dense, [](Problem& p) { p.window_right = -7; }, {"window_right: -7", "-1"}},
    // places in a whole, and partial results
    {"part_past_the_whole", dense, [](Problem& p) { p.set_place(8, 23, 0, 24); }, {"total_q: 23", "at least 24"}},
    {"total_k_absent", dense, [](Problem& p) { p.set_place(0, 16, 0, 0); }, {"total_k: 0", "at least 24"}},
    {"place_twice",
     dense,
     [](Problem& p) {
       p.places = layout(int32, {2, 4});
       p.first_q = 1;
     },
     {"first_q: 1", "places"}},
    {"place_with_dropout",
     dense,
     [](Problem& p) {
       p.set_place(0, 16, 40, 64);
       p.dropout_p = 0.5;
     },
     {"first_k: 40", "multiples of 32"}},
    {"total_heads", dense, [](Problem& p) { p.first_head = 2, p.total_heads = 5; }, {"total_heads: 5", "at least 6"}},
    {"accumulate", dense, [](Problem& p) { p.accumulate = 2; }, {"accumulate: 2", "0 and 1"}},
    {"accumulate_alone", dense, [](Problem& p) { p.accumulate = 1; }, {"lse_low: absent", "accumulate"}},
    {"o_accum_alone", dense, [](Problem& p) { p.o_accum = p.o; }, {"o_accum: ", "accumulate = 1"}},
    {"accumulated_gradients",
     backward,
     [](Problem& p) {
       for (tessera_layout* tensor : {&p.q, &p.k, &p.v, &p.o, &p.d_o, &p.d_q, &p.d_k, &p.d_v}) {
         tensor->dtype = TESSERA_BFLOAT16;
       }
       p.accumulate = 1;
     },
     {"d_q: dtype bfloat16", "float32"}},
    {"scale_alone", dense, [](Problem& p) { p.scale = 0.5; }, {"scale: 0.5 without has_scale", "has_scale = 1"}},
    {"scale_nan", dense, [](Problem& p) { p.set_scale(kNaN); }, {"scale: nan", "0 and 1e-18 .. 1e18"}},
    {"scale_infinite", dense, [](Problem& p) { p.set_scale(-kInfinity); }, {"scale: -inf", "1e-18 .. 1e18"}},
    {"scale_large", dense, [](Problem& p) { p.set_scale(-1e38); }, {"scale: -1e+38", "1e-18 .. 1e18"}},
    {"scale_small", dense, [](Problem& p) { p.set_scale(1e-19); }, {"scale: 1e-19", "1e-18 .. 1e18"}},
    {"softcap_negative", dense, [](Problem& p) { p.softcap = -1; }, {"softcap: -1", "0 (none) and 1e-18 .. 1e18"}},
    {"softcap_nan", dense, [](Problem& p) { p.softcap = kNaN; }, {"softcap: nan", "1e-18 .. 1e18"}},
    {"softcap_infinite", dense, [](Problem& p) { p.softcap = kInfinity; }, {"softcap: inf", "1e-18 .. 1e18"}},
    {"softcap_large", dense, [](Problem& p) { p.softcap = 1e39; }, {"softcap: 1e+39", "1e-18 .. 1e18"}},
    {"softcap_small", dense, [](Problem& p) { p.softcap = 1e-300; }, {"softcap: 1e-300", "1e-18 .. 1e18"}},
    {"dropout_one", dense, [](Problem& p) { p.dropout_p = 1; }, {"dropout_p: 1", "p < 1"}},
    {"dropout_negative", dense, [](Problem& p) { p.dropout_p = -0.1; }, {"dropout_p: -0.1", "p < 1"}},
    {"dropout_nan", dense, [](Problem& p) { p.dropout_p = kNaN; }, {"dropout_p: nan", "p < 1"}},
    {"dropout_rounds_to_one", dense, [](Problem& p) { p.dropout_p = 0.999999; }, {"dropout_p: 0.99999", "65535/65536"}},
    {"mask_block_q", block_masked, [](Problem& p) { p.mask_block_q = 0; }, {"mask_block_q: 0", "1 .."}},
    {"mask_block_k", block_masked, [](Problem& p) { p.mask_block_k = -3; }, {"mask_block_k: -3", "1 .."}},
    {"block_mask_shape",
     block_masked,
     [](Problem& p) {
       p.mask_block_q = 4;
       p.block_mask = layout(boolean, {2, 1, 3, 4});
     },
     {"block_mask: ", "ceil(Sq / mask_block_q) = 4"}},
    // backward
    {"lse_absent", backward, [](Problem& p) { p.lse.rank = 0; }, {"lse: ", "backward requires"}},
    {"d_o_absent", backward, [](Problem& p) { p.d_o.rank = 0; }, {"d_o: ", "backward requires"}},
    {"d_q_absent", backward, [](Problem& p) { p.d_q.rank = 0; }, {"d_q: ", "backward requires"}},
    {"d_k_absent", backward, [](Problem& p) { p.d_k.rank = 0; }, {"d_k: ", "backward requires"}},
    {"d_v_absent", backward, [](Problem& p) { p.d_v.rank = 0; }, {"d_v: ", "backward requires"}},
    {"d_q_shape", backward, [](Problem& p) { p.d_q = p.d_o; }, {"d_q: ", "D = 8"}},
    {"d_k_shape",
     backward,
     [](Problem& p) {
       p.d_k = layout(float32, {2, 24, 4, 8});
     },
     {"d_k: ", "Hkv = 2"}},
    {"d_o_dtype", backward, [](Problem& p) { p.d_o.dtype = TESSERA_FLOAT64; }, {"d_o: ", "float64"}},
    {"d_q_overlaps", backward, [](Problem& p) { p.d_q.strides[2] = 0; }, {"d_q: ", "one place"}},
    {"d_lse_shape",
     backward,
     [](Problem& p) {
       p.d_lse = layout(float32, {2, 16, 4});
     },
     {"d_lse: ", "[B, Hq, Sq]"}},
    {"d_bias_alone",
     backward,
     [](Problem& p) {
       p.d_bias = layout(float32, {1, 1, 16, 24});
     },
     {"d_bias: ", "without bias"}},
    {"d_bias_shape",
     backward,
     [](Problem& p) {
       p.bias = layout(float32, {1, 1, 16, 24});
       p.d_bias = layout(float32, {1, 4, 16, 24});
     },
     {"d_bias: ", "[1, 1, 16, 24]"}},
    {"d_bias_last_axis",
     backward,
     [](Problem& p) {
       p.bias = layout(float32, {1, 1, 16, 24});
       p.d_bias = layout(float32, {1, 1, 16, 24}, {0, 0, 1, 16});
     },
     {"d_bias: ", "contiguous"}},
    {"d_sink_alone", backward, [](Problem& p) { p.d_sink = layout(float32, {4}); }, {"d_sink: ", "without sink"}},
    {"d_sink_overlaps",
     backward,
     [](Problem& p) {
       p.sink = layout(float32, {4});
       p.d_sink = layout(float32, {4}, {0});
     },
     {"d_sink: ", "one place"}},
};

class Validate : public testing::TestWithParam<Rule> {};

TEST_P(Validate, RefusesAndNames) {
  const Rule& rule = GetParam();
  Problem problem = rule.base();
  Plan plan;
  ASSERT_EQ(try_plan(problem, reference_device(), plan).message(), "") << "the problem is good before it is broken";
  rule.break_it(problem);
  plan.batch = -123;
  const Status status = try_plan(problem, reference_device(), plan);
  EXPECT_EQ(status.code(), rule.code);
  const std::string message(status.message());
  EXPECT_TRUE(message.starts_with(rule.message.front())) << message;
  for (const char* part : rule.message) EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  for (const char* name : {"float32 (", "float16 (", "bfloat16 (", "float64 (", "int32 (", "bool ("}) {
    EXPECT_EQ(message.find(name), std::string::npos)
        << "the number of an enumerator is no concern of a caller: " << message;
  }
  EXPECT_LT(message.size(), sizeof tessera_status{}.message - 1) << "cut off: " << message;
  EXPECT_EQ(plan.batch, -123) << "a refused plan is untouched";
}
INSTANTIATE_TEST_SUITE_P(Rules, Validate, testing::ValuesIn(kRules), [](const auto& i) { return i.param.name; });

// ---- valid problems -------------------------------------------------------------------------------------------------

void expect_accepted(const Problem& problem) {
  Plan plan;
  EXPECT_EQ(try_plan(problem, reference_device(), plan).message(), "");
}

TEST(ValidateAccepts, EmptyAxes) {
  Problem p = dense_problem();
  p.q = layout(float32, {2, 0, 4, 8});
  p.o = layout(float32, {2, 0, 4, 6});
  expect_accepted(p);
  p = dense_problem();
  p.k = layout(float32, {2, 0, 2, 8});
  p.v = layout(float32, {2, 0, 2, 6});
  expect_accepted(p);
  p.q = layout(float32, {0, 16, 4, 8});
  p.k = layout(float32, {0, 24, 2, 8});
  p.v = layout(float32, {0, 24, 2, 6});
  p.o = layout(float32, {0, 16, 4, 6});
  expect_accepted(p);
  p = packed_problem();
  p.cu_seqlens_q = p.cu_seqlens_k = layout(int32, {1});
  expect_accepted(p);
}

TEST(ValidateAccepts, AnyStrideOrder) {
  Problem p = dense_problem();
  p.q = permute(layout(float32, {2, 4, 16, 8}), {0, 2, 1, 3});  // memory [B, H, S, D]
  p.o = permute(layout(float32, {4, 2, 16, 6}), {1, 2, 0, 3});
  expect_accepted(p);
  p.k.strides[0] = 0;    // one cache for the whole batch
  p.v.strides[1] = -12;  // read backwards
  expect_accepted(p);
}

TEST(ValidateAccepts, AnyStrideOfASingleElement) {
  Problem p = dense_problem();
  p.v = layout(float32, {2, 24, 2, 1}, {48, 2, 1, 77});
  p.o = layout(float32, {2, 16, 4, 1}, {64, 4, 1, 0});
  expect_accepted(p);
}

TEST(ValidateAccepts, BroadcastBiasAndMasks) {
  for (const std::int64_t b : {1, 2}) {
    for (const std::int64_t h : {1, 4}) {
      for (const std::int64_t s : {1, 16}) {
        Problem p = dense_problem(float16);
        p.bias = layout(b == 1 ? float16 : float32, {b, h, s, 24});
        p.mask = layout(boolean, {b, h, s, 24}, {0, 0, 0, 1});
        expect_accepted(p);
      }
    }
  }
  expect_accepted(block_masked());
  expect_accepted(biased_packed());
}

TEST(ValidateAccepts, MixedForms) {
  Problem p = packed_problem();  // packed queries over dense keys
  p.cu_seqlens_k.rank = 0;
  p.k = layout(float32, {3, 24, 2, 8});
  p.v = layout(float32, {3, 24, 2, 6});
  expect_accepted(p);
  p = paged_problem();  // packed queries over paged keys
  p.q = layout(float32, {16, 4, 8});
  p.o = layout(float32, {16, 4, 6});
  p.cu_seqlens_q = layout(int32, {3});
  expect_accepted(p);
}

TEST(ValidateAccepts, EightBitsWithScalesOfEveryShape) {
  for (const Layout& scales : {layout(float32, {1}), layout(float32, {2}), layout(float32, {2, 2}, {0, 5}),
                               layout(float32, {2, 1, 2}, {1, 8, 2})}) {
    for (Problem p : {cached(), float8()}) {
      p.k_descale = p.v_descale = scales;
      if (p.q.dtype == TESSERA_FLOAT8_E5M2) p.q_descale = scales, p.o.dtype = TESSERA_FLOAT32;
      expect_accepted(p);
    }
  }
  Problem p = cached_in_pages();
  p.k_descale = layout(float32, {5, 8, 2}), p.v_descale = layout(float32, {2, 2});
  expect_accepted(p);
}

TEST(ValidateAccepts, GradientsGivenToAForwardProblem) {
  Problem p = gradient_of(dense_problem());
  p.direction = TESSERA_FORWARD;
  p.d_q.rank = 2;  // nothing reads it
  expect_accepted(p);
}

TEST(ValidateDevice, NamesWhatIsWrong) {
  const Problem problem = dense_problem();
  Plan plan;
  const auto message = [&](auto&& break_it) {
    Device device = reference_device();
    break_it(device);
    return std::string(try_plan(problem, device, plan).message());
  };
  EXPECT_EQ(message([](Device& d) { d.isa = 1, d.isa_limit = 0; }),
            "device.isa: avx2, accepted baseline .. baseline, which this CPU has");
  EXPECT_TRUE(message([](Device& d) { d.vector_isa = d.isa_limit + 1; }).starts_with("device.vector_isa: "));
  EXPECT_TRUE(message([](Device& d) { d.isa_limit = 17; }).starts_with("device.isa_limit: 17"));
  EXPECT_TRUE(message([](Device& d) { d.kernel = TESSERA_KERNEL_SHARED_PREFIX + 1; }).starts_with("device.kernel: 15"));
  EXPECT_TRUE(message([](Device& d) { d.threads = 0; }).starts_with("device.threads: 0"));
  EXPECT_TRUE(message([](Device& d) { d.cores = -1; }).starts_with("device.cores: -1"));
}

}  // namespace
}  // namespace tessera::test
