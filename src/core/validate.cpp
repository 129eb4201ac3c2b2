#include "core/validate.hpp"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "core/dtypes.hpp"
#include "core/fields.hpp"
#include "core/geometry.hpp"
#include "core/isa.hpp"
#include "core/layout.hpp"
#include "core/names.hpp"
#include "core/philox.hpp"
#include "core/score/handle.hpp"
#include "core/score/operations.hpp"
#include "core/status.hpp"

namespace tessera::core {
namespace {

bool floating(int32_t dtype) {
  return dtype == TESSERA_FLOAT32 || dtype == TESSERA_FLOAT16 || dtype == TESSERA_BFLOAT16 || dtype == TESSERA_FLOAT64;
}

tessera_status check_dtype(const TensorField& tensor, int32_t dtype, const tessera_problem& problem) {
  const auto given = [dtype] { return dtype_text(dtype); };  // for the text of a refusal
  const int32_t q_dtype = problem.q.dtype;
  const char* of_q = tessera_dtype_name(q_dtype);
  const bool half = q_dtype == TESSERA_FLOAT16 || q_dtype == TESSERA_BFLOAT16;
  switch (tensor.dtypes) {
    case Dtypes::kFloating:
      if (floating(dtype) || is_float8(dtype)) return ok();
      return invalid("%s: dtype %s, accepted float32, float16, bfloat16, float64, float8_e4m3 and float8_e5m2",
                     tensor.name, given().text);
    case Dtypes::kAsQ:
      if (dtype == q_dtype) return ok();
      return invalid("%s: dtype %s, must be that of q: %s", tensor.name, given().text, of_q);
    case Dtypes::kAsQOrFloat32:
      if (dtype == q_dtype || dtype == TESSERA_FLOAT32) return ok();
      return invalid("%s: dtype %s, must be that of q: %s, or float32", tensor.name, given().text, of_q);
    case Dtypes::kKeys:
      if (dtype == q_dtype || (half && is_8bit(dtype))) {
        if (tensor.layout != &tessera_problem::v || dtype == problem.k.dtype) return ok();
        return invalid("v: dtype %s, must be that of k: %s", given().text, tessera_dtype_name(problem.k.dtype));
      }
      return invalid("%s: dtype %s, must be that of q: %s%s", tensor.name, given().text, of_q,
                     half             ? ", or float8_e4m3, float8_e5m2 or int8"
                     : is_8bit(dtype) ? "; a cache of 8 bits is for queries of float16 or bfloat16"
                                      : "");
    case Dtypes::kOutput:
      if (!is_float8(q_dtype)) {
        if (dtype == q_dtype || dtype == TESSERA_FLOAT32) return ok();
        return invalid("%s: dtype %s, must be that of q: %s, or float32", tensor.name, given().text, of_q);
      }
      if (floating(dtype) && dtype != TESSERA_FLOAT64) return ok();
      return invalid("%s: dtype %s, accepted bfloat16, float16 and float32 with q of %s", tensor.name, given().text,
                     of_q);
    case Dtypes::kFloat32OrAsQ: {
      const int32_t other = is_float8(q_dtype) ? problem.o.dtype : q_dtype;
      if (dtype == TESSERA_FLOAT32 || dtype == other) return ok();
      return invalid("%s: dtype %s, accepted float32 and that of %s, %s", tensor.name, given().text,
                     is_float8(q_dtype) ? "o" : "q", tessera_dtype_name(other));
    }
    case Dtypes::kFloat32:
    case Dtypes::kInt32:
    case Dtypes::kInt64:
    case Dtypes::kBool:
      break;
  }
  const int32_t accepted = tensor.dtypes == Dtypes::kFloat32 ? TESSERA_FLOAT32
                           : tensor.dtypes == Dtypes::kInt32 ? TESSERA_INT32
                           : tensor.dtypes == Dtypes::kInt64 ? TESSERA_INT64
                                                             : TESSERA_BOOL;
  if (dtype == accepted) return ok();
  return invalid("%s: dtype %s, accepted %s", tensor.name, given().text, tessera_dtype_name(accepted));
}

// ---- shapes ---------------------------------------------------------------------------------------------------------

class Shapes {
 public:
  bool bound(Symbol symbol) const { return values_[symbol] != kUnbound; }
  int64_t operator[](Symbol symbol) const { return values_[symbol]; }
  void bind(Symbol symbol, int64_t value) { values_[symbol] = value; }

  // Binds the symbols of the shape that are not bound yet, and compares the others. `may_lack`: number of leading axes
  // that may be missing.
  tessera_status match(const char* name, const tessera_layout& layout, const Shape& shape, bool may_lack) {
    if (layout.rank != shape.rank && !(may_lack && layout.rank < shape.rank)) {
      return invalid("%s: rank %d, accepted %s%s", name, layout.rank, symbols_of(shape).text,
                     may_lack ? " or its last axes" : "");
    }
    const int missing = shape.rank - layout.rank;
    for (int axis = 0; axis < layout.rank; ++axis) {
      const auto [symbol, kind] = shape.axes[axis + missing];
      const int64_t extent = layout.shape[axis];
      if (kind == kEqualOrOne && extent == 1) continue;
      const int64_t value = kind == kPlusOne ? extent - 1 : extent;
      const SymbolRule& rule = kSymbolRules[symbol];
      if (value != rule.min && rule.min == rule.max) {
        return invalid("%s: shape %s, accepted %s", name, shape_text(layout).text, symbols_of(shape).text);
      }
      if (value < rule.min || value > rule.max) {
        return invalid("%s: shape %s, accepted %s with %s in %" PRId64 " .. %" PRId64, name, shape_text(layout).text,
                       symbols_of(shape).text, rule.name, rule.min, rule.max);
      }
      if (!bound(symbol)) bind(symbol, value);
      if (values_[symbol] != value) {
        return invalid("%s: shape %s, accepted %s with %s = %" PRId64, name, shape_text(layout).text,
                       symbols_of(shape).text, rule.name, values_[symbol]);
      }
    }
    return ok();
  }

 private:
  static constexpr int64_t kUnbound = -1;

  std::array<int64_t, kSymbols> values_ = [] {
    std::array<int64_t, kSymbols> values;
    values.fill(kUnbound);
    return values;
  }();
};

// Binds Sq, Sk and the block mask's extents if no layout binds them; the shapes of bias and masks depend on them.
tessera_status bind_lengths(const tessera_problem& problem, Shapes& shapes) {
  const bool has_scores = present(problem.bias) || present(problem.mask) || present(problem.block_mask);
  if (!shapes.bound(kSq)) {
    if (has_scores && problem.max_seqlen_q == 0 && shapes[kTq] > 0) {
      return invalid(
          "max_seqlen_q: 0 with packed queries and a bias, mask or block_mask, whose shape it gives; "
          "accepted is the longest sequence's length");
    }
    shapes.bind(kSq, problem.max_seqlen_q);
  }
  if (!shapes.bound(kSk)) {
    const bool packed = packed_k(problem) && shapes[kTk] > 0, csr = csr_pages(problem) && shapes[kPageIndices] > 0;
    if (has_scores && problem.max_seqlen_k == 0 && (packed || csr)) {
      return invalid(
          "max_seqlen_k: 0 with %s and a bias, mask or block_mask, whose shape it gives; accepted is "
          "the longest sequence's length",
          csr ? "page_indices" : "packed keys");
    }
    const int64_t capacity = present(problem.page_table) ? shapes[kMaxPages] * shapes[kPageSize] : 0;
    shapes.bind(kSk, problem.max_seqlen_k > 0 ? problem.max_seqlen_k : capacity);
  }
  if (present(problem.block_mask)) {
    if (problem.mask_block_q < 1 || problem.mask_block_q > kMaxLength) {
      return invalid("mask_block_q: %" PRId64 ", accepted 1 .. %" PRId64 " with a block_mask", problem.mask_block_q,
                     kMaxLength);
    }
    if (problem.mask_block_k < 1 || problem.mask_block_k > kMaxLength) {
      return invalid("mask_block_k: %" PRId64 ", accepted 1 .. %" PRId64 " with a block_mask", problem.mask_block_k,
                     kMaxLength);
    }
    shapes.bind(kBlocksQ, (shapes[kSq] + problem.mask_block_q - 1) / problem.mask_block_q);
    shapes.bind(kBlocksK, (shapes[kSk] + problem.mask_block_k - 1) / problem.mask_block_k);
  }
  shapes.bind(kScaleBlocksQ, (shapes[kSq] + kScaleTokens - 1) / kScaleTokens);
  shapes.bind(kScaleBlocksK, (shapes[kSk] + kScaleTokens - 1) / kScaleTokens);
  return ok();
}

tessera_status check_page_table(const Shapes& shapes) {
  if (shapes[kMaxPages] * shapes[kPageSize] > kMaxLength) {
    return invalid("page_table: %" PRId64 " pages of %" PRId64 " keys a sequence, accepted at most %" PRId64 " keys",
                   shapes[kMaxPages], shapes[kPageSize], kMaxLength);
  }
  return ok();
}

tessera_status check_heads(const Shapes& shapes) {
  if (shapes[kHq] % shapes[kHkv] != 0) {
    return invalid("k: %" PRId64 " heads with q's %" PRId64
                   ": the number of query heads must be a multiple of the number of key heads",
                   shapes[kHkv], shapes[kHq]);
  }
  return ok();
}

tessera_status check_tensor(const TensorField& tensor, const tessera_problem& problem, Shapes& shapes) {
  const tessera_layout& layout = problem.*tensor.layout;
  const bool backward = problem.direction == TESSERA_BACKWARD;
  if (!takes_part(tensor, backward)) return ok();
  if (layout.rank < 0 || layout.rank > TESSERA_MAX_RANK) {
    return invalid("%s: rank %d, accepted 0 (absent) .. %d", tensor.name, layout.rank, TESSERA_MAX_RANK);
  }
  if (!present(layout)) {
    if (tensor.need == Need::kAlways) return invalid("%s: absent (rank 0), but it is required", tensor.name);
    if (tensor.need == Need::kBackward && backward) {
      return invalid("%s: absent (rank 0), but backward requires it", tensor.name);
    }
    return ok();
  }
  TESSERA_RETURN_IF_ERROR(check_dtype(tensor, layout.dtype, problem));
  const Access access = written(tensor, backward) ? Access::kWritten : Access::kRead;
  TESSERA_RETURN_IF_ERROR(check_layout(tensor.name, layout, access, tensor.last_axis));
  return shapes.match(tensor.name, layout, shape_of(tensor, problem), tensor.form == Form::kLastAxes);
}

// ---- options --------------------------------------------------------------------------------------------------------

tessera_status check_range(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return ok();
  return invalid("%s: %" PRId64 ", accepted %" PRId64 " .. %" PRId64, name, value, min, max);
}

tessera_status check_member(const OptionMember& member, const tessera_problem& p) {
  if (member.unsigned_integer) return ok();
  if (member.number) {
    const double value = p.*member.number;
    const bool vanishes = value != 0 && std::fabs(value) < member.smallest;
    const bool accepted = value >= member.min && value <= member.max && !vanishes;  // false for NaN
    return accepted ? ok() : invalid("%s: %g, accepted %s", member.name, value, member.accepted);
  }
  const int64_t value = member.flag ? p.*member.flag : p.*member.integer;
  const bool accepted = static_cast<double>(value) >= member.min && static_cast<double>(value) <= member.max;
  return accepted ? ok() : invalid("%s: %" PRId64 ", accepted %s", member.name, value, member.accepted);
}

tessera_status check_options(const tessera_problem& p) {
  if (p.has_scale != 0 && p.has_scale != 1) return invalid("has_scale: %d, accepted 0 and 1", p.has_scale);
  for (const OptionField& option : kOptionFields) {
    if (option.kind == OptionKind::kOptionalNumber && !p.has_scale) {
      const double value = p.*option.members[0].number;
      if (value == 0) continue;
      return invalid("%s: %g without has_scale, which is 0; accepted has_scale = 1 with it", option.name, value);
    }
    for (const OptionMember& member : option.members) {
      if (member.name) TESSERA_RETURN_IF_ERROR(check_member(member, p));
    }
  }
  if (dropout_threshold(p.dropout_p) == 65536) {
    return invalid("dropout_p: %.17g is 1 in steps of 2^-16, accepted at most 65535/65536", p.dropout_p);
  }
  return ok();
}

// Refuses options that depend on a query's position, since a prefix is read once for queries at many positions.
tessera_status check_prefix_options(const tessera_problem& p) {
  if (present(p.prefix_groups) != present(p.prefix_lens)) {
    const bool groups = present(p.prefix_groups);
    return invalid("%s: absent, but %s requires it: shared prefixes are both", groups ? "prefix_lens" : "prefix_groups",
                   groups ? "prefix_groups" : "prefix_lens");
  }
  if (!present(p.prefix_groups)) return ok();
  const char* scores = nullptr;
  for (const TensorField& field : kTensorFields) {
    const bool for_suffixes = field.layout == &tessera_problem::tree_mask;  // of keys after every prefix
    if (changes_scores(field) && !for_suffixes && present(p.*field.layout) && !scores) scores = field.name;
  }
  const struct {
    bool given;
    const char* what;
  } rows[] = {
      {p.direction == TESSERA_BACKWARD, "direction backward"},
      {p.window_left >= 0 || p.window_right >= 0, "a window"},
      {p.alignment == TESSERA_TOP_LEFT, "top-left alignment"},
      {scores != nullptr, scores},
      {p.dropout_p > 0, "dropout_p"},
      {p.batch_invariant != 0, "batch_invariant"},
  };
  for (const auto& [given, what] : rows) {
    if (given) {
      return unsupported(
          "prefix_groups: given with %s, accepted without: a prefix is read once for the queries of a group, "
          "wherever they stand, forward only",
          what);
    }
  }
  return ok();
}

// Scales belong to 8-bit tensors, which are for the forward pass alone.
tessera_status check_scales(const tessera_problem& p) {
  const struct {
    const char *name, *of;
    const tessera_layout &scales, &tensor;
    bool is_packed;
    int64_t longest;
  } rows[] = {{"q_descale", "q", p.q_descale, p.q, packed_q(p), p.max_seqlen_q},
              {"k_descale", "k", p.k_descale, p.k, packed_k(p), p.max_seqlen_k},
              {"v_descale", "v", p.v_descale, p.v, packed_k(p), p.max_seqlen_k}};
  for (const auto& row : rows) {
    if (p.direction == TESSERA_BACKWARD && is_8bit(row.tensor.dtype)) {
      return unsupported("%s: dtype %s with direction backward; 8-bit tensors are for inference, and have no gradient",
                         row.of, tessera_dtype_name(row.tensor.dtype));
    }
    if (row.scales.rank == 0) continue;
    if (!is_8bit(row.tensor.dtype)) {
      return invalid("%s: given with %s of %s, accepted with 8 bits: float8_e4m3, float8_e5m2 or int8", row.name,
                     row.of, dtype_text(row.tensor.dtype).text);
    }
    if (row.scales.rank < 1 || row.scales.rank > 3) {
      const bool by_token = paged(p) && row.tensor.rank == 4 && &row.tensor != &p.q;
      return invalid("%s: rank %d, accepted [1], [Hkv], [B, Hkv] and %s", row.name, row.scales.rank,
                     by_token              ? "[pages, page_size, Hkv]"
                     : &row.tensor == &p.q ? "[B, ceil(Sq / 128), Hkv]"
                                           : "[B, ceil(Sk / 128), Hkv]");
    }
    if (row.scales.rank == 3 && row.is_packed && row.longest == 0 && row.tensor.shape[0] > 0) {
      const char* name = &row.tensor == &p.q ? "max_seqlen_q" : "max_seqlen_k";
      return invalid(
          "%s: 0 with packed %s and scales of blocks, whose shape it gives; accepted is the longest "
          "sequence's length",
          name, row.of);
    }
  }
  return ok();
}

// A part must be inside the whole. `count`: its queries or keys; -1: each sequence has its own number.
tessera_status check_place(const char* of, int64_t first, int64_t total, int64_t count) {
  const int64_t least = first + (count < 0 ? 1 : count);
  if (total >= least) return ok();
  return invalid("total_%s: %" PRId64 " with first_%s %" PRId64 ", accepted at least %" PRId64 ", where the part ends",
                 of, total, of, first, least);
}

tessera_status check_places(const tessera_problem& p) {
  const Sizes size = sizes(p);
  if (!is_part(p)) return ok();
  for (const auto& [given, what] :
       {std::pair{present(p.tree_mask), "tree_mask"}, std::pair{present(p.prefix_groups), "prefix_groups"}}) {
    if (given) return unsupported("%s: given with a global place, accepted without", what);
  }
  if (present(p.places)) {
    const struct {
      const char* name;
      int64_t value;
    } numbers[] = {{"first_q", p.first_q}, {"total_q", p.total_q}, {"first_k", p.first_k}, {"total_k", p.total_k}};
    for (const auto& [name, value] : numbers) {
      if (value == 0) continue;
      return invalid("%s: %" PRId64 " together with places, accepted 0: places holds it for each sequence", name,
                     value);
    }
  }
  if (has_place(p) && !present(p.places)) {
    TESSERA_RETURN_IF_ERROR(check_place("q", p.first_q, p.total_q, packed_q(p) ? -1 : size.rows_q));
    TESSERA_RETURN_IF_ERROR(check_place("k", p.first_k, p.total_k, packed_k(p) || paged(p) ? -1 : size.rows_k));
  }
  if (p.dropout_p > 0 && p.first_k % kDropoutKeys != 0) {
    return invalid("first_k: %" PRId64 " with dropout_p, accepted multiples of %" PRId64, p.first_k, kDropoutKeys);
  }
  const bool has_heads = p.first_head > 0 || p.total_heads > 0;
  if (has_heads && p.total_heads < p.first_head + size.heads_q) {
    return invalid("total_heads: %" PRId64 " with first_head %" PRId64 ", accepted at least %" PRId64
                   ", where the part ends",
                   p.total_heads, p.first_head, p.first_head + size.heads_q);
  }
  if (p.total_heads_kv > 0 && (p.total_heads == 0 || p.total_heads % p.total_heads_kv != 0)) {
    return invalid("total_heads_kv: %" PRId64 " with total_heads %" PRId64 ", accepted a divisor of total_heads",
                   p.total_heads_kv, p.total_heads);
  }
  const WholeHeads whole = whole_heads(p);
  for (int64_t h = 0; h < size.heads_q; ++h) {
    const int64_t of_whole = (whole.first_head + h) / whole.group - whole.first_head / whole.group;
    if (of_whole == h / (size.heads_q / size.heads_kv)) continue;
    return invalid("first_head: %" PRId64 " with %" PRId64 " query and %" PRId64
                   " key heads, accepted a part whose heads share key heads as in the whole, where %" PRId64
                   " query heads share one",
                   p.first_head, size.heads_q, size.heads_kv, whole.group);
  }
  if ((whole.first_sequence + size.batch) * whole.heads > kMaxLength) {
    return invalid("first_sequence: %" PRId64 " and %" PRId64 " sequences of %" PRId64
                   " heads in the whole, accepted at most %" PRId64 " heads in all",
                   whole.first_sequence, size.batch, whole.heads, kMaxLength);
  }
  return ok();
}

// The members of tessera_problem's `accumulate`, whose layouts are valid.
tessera_status check_partials(const tessera_problem& p) {
  const bool backward = p.direction == TESSERA_BACKWARD, wide = p.q.dtype == TESSERA_FLOAT64;
  const int32_t sum_dtype = wide ? TESSERA_FLOAT64 : TESSERA_FLOAT32;
  const auto check_sum = [&](const char* name, const tessera_layout& layout) {
    if (layout.dtype == sum_dtype) return ok();
    return invalid("%s: dtype %s with accumulate, accepted %s", name, tessera_dtype_name(layout.dtype),
                   tessera_dtype_name(sum_dtype));
  };
  if (present(p.o_accum) && (backward || p.accumulate == 0)) {
    return invalid("o_accum: given %s, accepted forward with accumulate = 1",
                   backward ? "with direction backward" : "without accumulate");
  }
  if (backward) {
    if (p.o.dtype != p.q.dtype) {
      return invalid("o: dtype %s, must be that of q in the backward pass: %s", tessera_dtype_name(p.o.dtype),
                     tessera_dtype_name(p.q.dtype));
    }
    for (const auto& [name, layout] : {std::pair{"d_k", &p.d_k}, std::pair{"d_v", &p.d_v}}) {
      if (layout->dtype == p.d_q.dtype) continue;
      return invalid("%s: dtype %s, must be that of d_q: %s", name, tessera_dtype_name(layout->dtype),
                     tessera_dtype_name(p.d_q.dtype));
    }
    return p.accumulate ? check_sum("d_q", p.d_q) : ok();
  }
  if (p.accumulate == 0) return ok();
  if (present(p.prefix_groups)) return unsupported("prefix_groups: given with accumulate, accepted without");
  if (!present(p.lse_low))
    return invalid("lse_low: absent, but accumulate requires it and lse: a partial result's LSE");
  return present(p.o_accum) ? check_sum("o_accum", p.o_accum) : check_sum("o", p.o);
}

// Dependencies of arguments on each other.
tessera_status check_dependencies(const tessera_problem& p) {
  const char* table = csr_pages(p) ? "page_indices" : "page_table";
  if (present(p.page_table) && csr_pages(p)) {
    return invalid("page_indices: given together with page_table, accepted one of them: a page table has one form");
  }
  if (present(p.page_indptr) != csr_pages(p)) {
    const bool lists = csr_pages(p);
    return invalid("%s: absent, but %s requires it: a CSR page table is both", lists ? "page_indptr" : "page_indices",
                   lists ? "page_indices" : "page_indptr");
  }
  if (paged(p) && packed_k(p)) {
    return invalid("%s: given together with cu_seqlens_k, accepted one of them: keys are paged or packed", table);
  }
  if (paged(p) && !present(p.seqused_k)) {
    return invalid("seqused_k: absent, but %s requires it: the key length of each sequence", table);
  }
  if (p.causal && present(p.causal_seqs)) {
    return invalid(
        "causal: 1 together with causal_seqs, accepted one of them: all sequences are causal, or those it says");
  }
  TESSERA_RETURN_IF_ERROR(check_prefix_options(p));
  TESSERA_RETURN_IF_ERROR(check_scales(p));
  if (present(p.lse_low) && !present(p.lse)) return invalid("lse_low: given without lse, whose lower digits it holds");
  if (present(p.dropout_state)) {
    const struct {
      const char* name;
      uint64_t value;
    } numbers[] = {{"dropout_seed", p.dropout_seed}, {"dropout_offset", p.dropout_offset}};
    for (const auto& [name, value] : numbers) {
      if (value == 0) continue;
      return invalid("%s: %" PRIu64 " together with dropout_state, accepted 0: the state holds both seed and offset",
                     name, value);
    }
  }
  if (p.direction != TESSERA_BACKWARD) return ok();
  if (present(p.tree_mask)) {
    return unsupported(
        "tree_mask: given with direction backward; drafted tokens are for inference, and have no gradient");
  }
  if (paged(p)) {
    return unsupported(
        "%s: given with direction backward; a paged cache is for inference, gradients need dense "
        "or packed keys and values",
        table);
  }
  if (present(p.d_bias) && !present(p.bias)) return invalid("d_bias: given without bias, whose gradient it is");
  if (present(p.d_sink) && !present(p.sink)) return invalid("d_sink: given without sink, whose gradient it is");
  return ok();
}

tessera_status check_same_shape(const char* name, const tessera_layout& layout, const char* twin_name,
                                const tessera_layout& twin) {
  if (layout.rank == twin.rank && std::memcmp(layout.shape, twin.shape, sizeof(int64_t) * layout.rank) == 0)
    return ok();
  return invalid("%s: shape %s, must be that of %s: %s", name, shape_text(layout).text, twin_name,
                 shape_text(twin).text);
}

// ---- score programs -------------------------------------------------------------------------------------------------

bool is_of_type(int32_t dtype, score::Type type) {
  switch (type) {
    case score::Type::kFloat:
      return floating(dtype);
    case score::Type::kInt:
      return dtype == TESSERA_INT32 || dtype == TESSERA_INT64 || dtype == TESSERA_INT8 || dtype == TESSERA_INT16 ||
             dtype == TESSERA_UINT8;
    case score::Type::kBool:
      break;
  }
  return dtype == TESSERA_BOOL;
}

// "captured[2] (bias)"
std::string captured_name(const char* member, int slot, const score::Name& name) {
  return std::string(member) + "[" + std::to_string(slot) + "] (" + name.text + ")";
}

tessera_status check_captured(const std::string& name, const score::Name& declared, const tessera_layout& layout,
                              Access access) {
  if (layout.rank < 0 || layout.rank > TESSERA_MAX_RANK) {
    return invalid("%s: rank %d, accepted 0 (absent) .. %d", name.c_str(), layout.rank, TESSERA_MAX_RANK);
  }
  const int rank = std::max(declared.rank, 1);
  const bool is_one = declared.rank > 0 || (layout.rank == 1 && layout.shape[0] == 1);
  if (layout.rank != rank || !is_one) {
    return declared.rank > 0 ? invalid("%s: shape %s, accepted rank %d, as the program declares", name.c_str(),
                                       shape_text(layout).text, rank)
                             : invalid("%s: shape %s, accepted [1]: the program declares rank 0", name.c_str(),
                                       shape_text(layout).text);
  }
  constexpr const char* kAccepted[] = {"float32, float16, bfloat16 and float64", "int8, int16, int32, int64 and uint8",
                                       "bool"};
  if (!is_of_type(layout.dtype, declared.type)) {
    return invalid("%s: dtype %s, accepted %s: the program declares %s", name.c_str(), dtype_text(layout.dtype).text,
                   kAccepted[static_cast<int>(declared.type)], score::kTypeNames[static_cast<int>(declared.type)]);
  }
  TESSERA_RETURN_IF_ERROR(check_layout(name.c_str(), layout, access, LastAxis::kAnyStride));
  for (int axis = 0; axis < layout.rank; ++axis) {
    if (layout.shape[axis] > kMaxLength) {
      return invalid("%s: shape %s, accepted extents up to %" PRId64, name.c_str(), shape_text(layout).text,
                     kMaxLength);
    }
  }
  return ok();
}

tessera_status check_gradient_of_captured(const tessera_problem& p, const score::Name& declared, int slot) {
  const std::string name = captured_name("d_captured", slot, declared);
  const tessera_layout &layout = p.d_captured[slot], &primal = p.captured[slot];
  if (declared.type != score::Type::kFloat) {
    return invalid("%s: given, but the program declares %s, which has no gradient", name.c_str(),
                   score::kTypeNames[static_cast<int>(declared.type)]);
  }
  TESSERA_RETURN_IF_ERROR(check_captured(name, declared, layout, Access::kWritten));
  if (!present(primal)) return ok();
  if (layout.dtype != TESSERA_FLOAT32 && layout.dtype != primal.dtype) {
    return invalid("%s: dtype %s, accepted float32 and that of captured[%d], %s", name.c_str(),
                   dtype_text(layout.dtype).text, slot, tessera_dtype_name(primal.dtype));
  }
  return check_same_shape(name.c_str(), layout, captured_name("captured", slot, declared).c_str(), primal);
}

// A prefix that is read once serves queries of many sequences and positions.
tessera_status check_program_of_prefixes(const score::Program& program) {
  using score::Op;
  constexpr Op kPlaces[] = {Op::kB, Op::kI, Op::kJ, Op::kQPos, Op::kLenQ, Op::kLenK};
  for (const score::Value& value : program.values) {
    if (std::ranges::find(kPlaces, value.op) == std::end(kPlaces)) continue;
    return unsupported(
        "prefix_groups: given with a program that uses %s, accepted without b, i, j, q_pos, len_q and len_k",
        score::operation(value.op).text);
  }
  return ok();
}

tessera_status check_program(const tessera_problem& p) {
  const bool backward = p.direction == TESSERA_BACKWARD;
  const size_t declared = p.program ? p.program->tensors.size() : 0;
  for (int slot = static_cast<int>(declared); slot < TESSERA_MAX_CAPTURED_TENSORS; ++slot) {
    for (const auto& [member, layouts] : {std::pair{"captured", p.captured}, std::pair{"d_captured", p.d_captured}}) {
      if (layouts[slot].rank == 0 || (layouts == p.d_captured && !backward)) continue;
      return p.program
                 ? invalid("%s[%d]: given, accepted what the program declares, %zu tensors", member, slot, declared)
                 : invalid("%s[%d]: given without a program", member, slot);
    }
  }
  if (!p.program) return ok();
  const score::Program& program = p.program->checked->program;
  for (int slot = 0; slot < static_cast<int>(declared); ++slot) {
    const score::Name& name = p.program->tensors[static_cast<size_t>(slot)];
    const bool used = std::ranges::count(program.tensors, name.text, &score::Name::text) > 0;
    if (p.captured[slot].rank != 0 || used) {
      TESSERA_RETURN_IF_ERROR(
          check_captured(captured_name("captured", slot, name), name, p.captured[slot], Access::kRead));
    }
    if (backward && p.d_captured[slot].rank != 0) TESSERA_RETURN_IF_ERROR(check_gradient_of_captured(p, name, slot));
  }
  return present(p.prefix_groups) ? check_program_of_prefixes(program) : ok();
}

}  // namespace

tessera_status validate(const tessera_problem& problem) {
  if (problem.direction != TESSERA_FORWARD && problem.direction != TESSERA_BACKWARD) {
    return invalid("direction: %d, accepted 0 (forward) and 1 (backward)", problem.direction);
  }
  TESSERA_RETURN_IF_ERROR(check_options(problem));
  TESSERA_RETURN_IF_ERROR(check_dependencies(problem));
  TESSERA_RETURN_IF_ERROR(check_program(problem));
  Shapes shapes;
  for (const TensorField& tensor : kTensorFields) {
    // Bias and masks are checked after everything that their shape depends on.
    if (tensor.layout == &tessera_problem::bias) TESSERA_RETURN_IF_ERROR(bind_lengths(problem, shapes));
    TESSERA_RETURN_IF_ERROR(check_tensor(tensor, problem, shapes));
    if (tensor.layout == &tessera_problem::k) TESSERA_RETURN_IF_ERROR(check_heads(shapes));
    if (tensor.layout == &tessera_problem::page_table && present(problem.page_table))
      TESSERA_RETURN_IF_ERROR(check_page_table(shapes));
  }
  if (shapes[kB] * shapes[kHq] > kMaxLength) {
    return invalid("q: %" PRId64 " sequences of %" PRId64 " heads, accepted at most %" PRId64 " heads in all",
                   shapes[kB], shapes[kHq], kMaxLength);
  }
  TESSERA_RETURN_IF_ERROR(check_places(problem));
  TESSERA_RETURN_IF_ERROR(check_partials(problem));
  if (problem.direction == TESSERA_BACKWARD && present(problem.d_bias)) {
    TESSERA_RETURN_IF_ERROR(check_same_shape("d_bias", problem.d_bias, "bias", problem.bias));
    const tessera_layout& d_bias = problem.d_bias;
    if (d_bias.shape[d_bias.rank - 1] != shapes[kSk]) {
      return unsupported("d_bias: shape %s, accepted a last axis of Sk = %" PRId64
                         ": the gradient of a bias that is one for all keys is not computed",
                         shape_text(d_bias).text, shapes[kSk]);
    }
  }
  return ok();
}

tessera_status validate(const tessera_device& device) {
  if (device.struct_size != sizeof device) {
    return invalid("device: struct_size %zu, accepted %zu, as tessera_device_cpu and tessera_device_cuda fill it in",
                   device.struct_size, sizeof device);
  }
  const auto is_zero = [](char byte) { return byte == 0; };
  if (!std::all_of(std::begin(device.reserved), std::end(device.reserved), is_zero)) {
    return invalid("device: a member is set that version %s does not know, accepted 0 there", tessera_version());
  }
  TESSERA_RETURN_IF_ERROR(check_range("device.backend", device.backend, TESSERA_BACKEND_CPU, TESSERA_BACKEND_CUDA));
  TESSERA_RETURN_IF_ERROR(
      check_range("device.isa_limit", device.isa_limit, TESSERA_ISA_BASELINE, TESSERA_ISA_NEON_BF16));
  if (!has_isa(device.isa_limit, device.isa)) {
    return invalid("device.isa: %s, accepted baseline .. %s, which this CPU has", isa_text(device.isa).text,
                   tessera_isa_name(device.isa_limit));
  }
  TESSERA_RETURN_IF_ERROR(check_range("device.vector_isa", device.vector_isa, 0, device.isa_limit));
  TESSERA_RETURN_IF_ERROR(check_range("device.kernel", device.kernel, TESSERA_KERNEL_AUTO, kNumKernels - 1));
  if (!std::memchr(device.family, '\0', sizeof device.family)) {
    return invalid("device.family: longer than %zu characters", sizeof device.family - 1);
  }
  if (device.kernel != TESSERA_KERNEL_AUTO && device.family[0] != '\0' &&
      std::strcmp(device.family, tessera_kernel_name(device.kernel)) != 0) {
    return invalid("device.family: %s with device.kernel %s, accepted one of the two, or both alike", device.family,
                   tessera_kernel_name(device.kernel));
  }
  constexpr int64_t kMaxThreads = 4096;
  TESSERA_RETURN_IF_ERROR(check_range("device.cores", device.cores, 1, kMaxThreads));
  TESSERA_RETURN_IF_ERROR(check_range("device.threads", device.threads, 1, kMaxThreads));
  TESSERA_RETURN_IF_ERROR(check_range("device.l1_bytes", device.l1_bytes, 0, INT64_MAX));
  TESSERA_RETURN_IF_ERROR(check_range("device.l2_bytes", device.l2_bytes, 0, INT64_MAX));
  if (device.backend != TESSERA_BACKEND_CUDA) return ok();
  TESSERA_RETURN_IF_ERROR(check_range("device.ordinal", device.ordinal, -1, INT32_MAX));
  constexpr int64_t kOldestArch = 80, kNewestArch = 999;  // later GPUs run PTX
  TESSERA_RETURN_IF_ERROR(check_range("device.arch", device.arch, kOldestArch, kNewestArch));
  return check_range("device.smem_bytes", device.smem_bytes, 48 << 10, INT32_MAX);
}

tessera_status validate(const tessera_combine_call& call) {
  const tessera_layout &o_parts = call.o_parts.layout, &lse_parts = call.lse_parts.layout, &o = call.o.layout;
  struct Row {
    const char* name;
    const tessera_layout* layout;
    int rank;
    bool any_float;  // otherwise only float32
    Access access;
    LastAxis last_axis;
  };
  const Row rows[] = {
      {"o_parts", &o_parts, 5, true, Access::kRead, LastAxis::kContiguous},
      {"lse_parts", &lse_parts, 4, false, Access::kRead, LastAxis::kAnyStride},
      {"o", &o, 4, true, Access::kWritten, LastAxis::kContiguous},
      {"lse", &call.lse.layout, 3, false, Access::kWritten, LastAxis::kAnyStride},
      {"lse_low_parts", &call.lse_low_parts.layout, 4, false, Access::kRead, LastAxis::kAnyStride},
      {"lse_low", &call.lse_low.layout, 3, false, Access::kWritten, LastAxis::kAnyStride},
  };
  constexpr int kRequired = 3;  // the first rows are required
  for (const Row& row : rows) {
    if (&row >= rows + kRequired && !present(*row.layout)) continue;
    if (row.layout->rank != row.rank) return invalid("%s: rank %d, accepted %d", row.name, row.layout->rank, row.rank);
    const int32_t dtype = row.layout->dtype;
    const bool accepted = row.any_float ? floating(dtype) && dtype != TESSERA_FLOAT64 : dtype == TESSERA_FLOAT32;
    if (!accepted) {
      return invalid("%s: dtype %s, accepted %s", row.name, dtype_text(dtype).text,
                     row.any_float ? "float32, float16 and bfloat16" : "float32");
    }
    TESSERA_RETURN_IF_ERROR(check_layout(row.name, *row.layout, row.access, row.last_axis));
  }
  const auto [parts, batch, rows_q, heads, head_dim_v] = o_parts.shape;
  for (const int64_t extent : {parts, batch, rows_q, heads}) {
    if (extent > kMaxLength) {
      return invalid("o_parts: shape %s, accepted extents up to %" PRId64, shape_text(o_parts).text, kMaxLength);
    }
  }
  if (head_dim_v < 1 || head_dim_v > kMaxHeadDimV) {
    return invalid("o_parts: shape %s, accepted [N, B, S, H, Dv] with Dv in 1 .. %" PRId64, shape_text(o_parts).text,
                   kMaxHeadDimV);
  }
  if (parts < 1) return invalid("o_parts: shape %s, accepted [N, B, S, H, Dv] with N >= 1", shape_text(o_parts).text);
  const auto check_shape = [](const char* name, const tessera_layout& layout, const tessera_layout& expected) {
    return check_same_shape(name, layout, "o_parts' sizes", expected);
  };
  tessera_layout expected{};
  expected = {0, 4, {parts, batch, heads, rows_q}, {}};
  TESSERA_RETURN_IF_ERROR(check_shape("lse_parts", lse_parts, expected));
  expected = {0, 4, {batch, rows_q, heads, head_dim_v}, {}};
  TESSERA_RETURN_IF_ERROR(check_shape("o", o, expected));
  if (present(call.lse_low.layout) && !present(call.lse.layout)) {
    return invalid("lse_low: given without lse, whose lower digits it holds");
  }
  if (present(call.lse_low_parts.layout)) {
    TESSERA_RETURN_IF_ERROR(check_same_shape("lse_low_parts", call.lse_low_parts.layout, "lse_parts", lse_parts));
  }
  expected = {0, 3, {batch, heads, rows_q}, {}};
  if (present(call.lse.layout)) TESSERA_RETURN_IF_ERROR(check_shape("lse", call.lse.layout, expected));
  return present(call.lse_low.layout) ? check_shape("lse_low", call.lse_low.layout, expected) : ok();
}

}  // namespace tessera::core
