// tessera_append: its rules, and the checks of its index tensors' values.
#include "core/append.hpp"

#include <cinttypes>
#include <string>

#include "core/caller_struct.hpp"
#include "core/dtypes.hpp"
#include "core/layout.hpp"
#include "core/names.hpp"
#include "core/own_memory.hpp"
#include "core/status.hpp"
#include "core/validate.hpp"

namespace tessera::core {

static_assert(sizeof(tessera_append_call) == offsetof(tessera_append_call, reserved_1) + sizeof(int32_t));

namespace {

// ---- layouts --------------------------------------------------------------------------------------------------------

// An axis has a fixed extent, or any extent, to which `name` then refers.
struct ExpectedAxis {
  const char* name;
  int64_t extent = -1;
};

tessera_status check_shape(const char* name, const tessera_layout& layout, std::initializer_list<ExpectedAxis> axes) {
  bool same = layout.rank == static_cast<int32_t>(axes.size());
  std::string accepted;
  int axis = 0;
  for (const ExpectedAxis& expected : axes) {
    if (same && expected.extent >= 0) same = layout.shape[axis] == expected.extent;
    accepted += (axis == 0 ? "" : ", ") + (expected.extent < 0 ? expected.name : std::to_string(expected.extent));
    ++axis;
  }
  if (same) return ok();
  return invalid("%s: shape %s, accepted [%s]", name, shape_text(layout).text, accepted.c_str());
}

bool appendable(int32_t dtype) {
  return dtype == TESSERA_FLOAT32 || dtype == TESSERA_FLOAT16 || dtype == TESSERA_BFLOAT16;
}

tessera_status check_dtypes(const tessera_append_call& call) {
  const int32_t of_k = call.k.layout.dtype;
  if (!appendable(of_k)) {
    return invalid("k: dtype %s, accepted float32, float16 and bfloat16", dtype_text(of_k).text);
  }
  const auto require = [](const char* name, const tessera_tensor& tensor, int32_t accepted, const char* whose) {
    const int32_t dtype = tensor.layout.dtype;
    if (!present(tensor) || dtype == accepted) return ok();
    return invalid("%s: dtype %s, must be %s%s", name, dtype_text(dtype).text, whose, tessera_dtype_name(accepted));
  };
  TESSERA_RETURN_IF_ERROR(require("v", call.v, of_k, "that of k: "));
  const int32_t of_cache = call.k_cache.layout.dtype;
  if (of_cache != of_k && !is_8bit(of_cache)) {
    return invalid("k_cache: dtype %s, must be that of k: %s, or float8_e4m3, float8_e5m2 or int8",
                   dtype_text(of_cache).text, tessera_dtype_name(of_k));
  }
  TESSERA_RETURN_IF_ERROR(require("v_cache", call.v_cache, of_cache, "that of k_cache: "));
  TESSERA_RETURN_IF_ERROR(require("k_descale", call.k_descale, TESSERA_FLOAT32, ""));
  TESSERA_RETURN_IF_ERROR(require("v_descale", call.v_descale, TESSERA_FLOAT32, ""));
  TESSERA_RETURN_IF_ERROR(require("q", call.q, of_k, "that of k: "));
  TESSERA_RETURN_IF_ERROR(require("q_out", call.q_out, of_k, "that of k: "));
  if (present(call.cos) && call.cos.layout.dtype != TESSERA_FLOAT32) {
    TESSERA_RETURN_IF_ERROR(require("cos", call.cos, of_k, "float32 or that of k: "));
  }
  TESSERA_RETURN_IF_ERROR(require("sin", call.sin, call.cos.layout.dtype, "that of cos: "));
  TESSERA_RETURN_IF_ERROR(require("seqused_k", call.seqused_k, TESSERA_INT32, ""));
  TESSERA_RETURN_IF_ERROR(require("cu_seqlens", call.cu_seqlens, TESSERA_INT32, ""));
  TESSERA_RETURN_IF_ERROR(require("page_table", call.page_table, TESSERA_INT32, ""));
  TESSERA_RETURN_IF_ERROR(require("positions_q", call.positions_q, TESSERA_INT32, ""));
  TESSERA_RETURN_IF_ERROR(require("positions_k", call.positions_k, TESSERA_INT32, ""));
  return require("dropped", call.dropped, TESSERA_INT32, "");
}

tessera_status check_presence(const tessera_append_call& call) {
  const auto required = [](const char* name, const tessera_tensor& tensor) {
    return present(tensor) ? ok() : invalid("%s: absent (rank 0), but it is required", name);
  };
  TESSERA_RETURN_IF_ERROR(required("k", call.k));
  TESSERA_RETURN_IF_ERROR(required("v", call.v));
  TESSERA_RETURN_IF_ERROR(required("k_cache", call.k_cache));
  TESSERA_RETURN_IF_ERROR(required("v_cache", call.v_cache));
  TESSERA_RETURN_IF_ERROR(required("seqused_k", call.seqused_k));
  if (present(call.cos) != present(call.sin)) {
    return invalid("%s: absent (rank 0), accepted both of cos and sin, or none", present(call.cos) ? "sin" : "cos");
  }
  if (present(call.q) && !present(call.cos)) return invalid("q: given without cos and sin, which rotate it");
  if (present(call.q_out) && !present(call.q)) return invalid("q_out: given without q");
  if (present(call.positions_q) && !present(call.q)) return invalid("positions_q: given without q");
  if (present(call.positions_k) && !present(call.cos)) return invalid("positions_k: given without cos and sin");
  return ok();
}

// Scales of an 8-bit cache.
tessera_status check_scales(const tessera_append_call& call, const AppendSizes& size) {
  if (call.compute_scales != 0 && call.compute_scales != 1) {
    return invalid("compute_scales: %d, accepted 0 and 1", call.compute_scales);
  }
  if (call.reserved_1 != 0) return invalid("reserved_1: %d, accepted 0", call.reserved_1);
  const int32_t dtype = call.k_cache.layout.dtype;
  if (call.compute_scales && !is_8bit(dtype)) {
    return invalid("compute_scales: 1 with a cache of %s, accepted with 8 bits: float8_e4m3, float8_e5m2 or int8",
                   tessera_dtype_name(dtype));
  }
  if (call.compute_scales && !present(call.page_table)) {
    return invalid("compute_scales: 1 without page_table, accepted with it: a scale for a token and head is for pages");
  }
  const struct {
    const char* name;
    const tessera_tensor& scales;
  } rows[] = {{"k_descale", call.k_descale}, {"v_descale", call.v_descale}};
  for (const auto& [name, scales] : rows) {
    if (!present(scales)) {
      if (!call.compute_scales) continue;
      return invalid("%s: absent (rank 0), but compute_scales requires it", name);
    }
    if (!is_8bit(dtype)) {
      return invalid("%s: given with a cache of %s, accepted with 8 bits: float8_e4m3, float8_e5m2 or int8", name,
                     tessera_dtype_name(dtype));
    }
    if (call.compute_scales) {
      TESSERA_RETURN_IF_ERROR(check_shape(
          name, scales.layout, {{"pages", size.pages}, {"page_size", size.page_size}, {"Hkv", size.heads_kv}}));
      continue;
    }
    const int64_t* shape = scales.layout.shape;
    const bool of_heads = scales.layout.rank == 1 && (shape[0] == 1 || shape[0] == size.heads_kv);
    const bool of_sequences = scales.layout.rank == 2 && shape[0] == size.batch && shape[1] == size.heads_kv;
    if (of_heads || of_sequences) continue;
    return invalid("%s: shape %s, accepted [1], [%" PRId64 "] and [%" PRId64 ", %" PRId64 "]", name,
                   shape_text(scales.layout).text, size.heads_kv, size.batch, size.heads_kv);
  }
  return ok();
}

tessera_status check_shapes(const tessera_append_call& call) {
  const bool packed = present(call.cu_seqlens), paged = present(call.page_table);
  const tessera_layout& k = call.k.layout;
  TESSERA_RETURN_IF_ERROR(packed ? check_shape("k", k, {{"T"}, {"Hkv"}, {"D"}})
                                 : check_shape("k", k, {{"B"}, {"S"}, {"Hkv"}, {"D"}}));
  TESSERA_RETURN_IF_ERROR(check_shape("seqused_k", call.seqused_k.layout, {{"B", packed ? -1 : k.shape[0]}}));
  const int64_t batch = call.seqused_k.layout.shape[0], tokens = k.shape[k.rank - 3];
  const int64_t heads = k.shape[k.rank - 2], head_dim = k.shape[k.rank - 1];
  if (packed) TESSERA_RETURN_IF_ERROR(check_shape("cu_seqlens", call.cu_seqlens.layout, {{"B + 1", batch + 1}}));
  const auto check_tokens = [&](const char* name, const tessera_tensor& tensor, int64_t count, ExpectedAxis head,
                                ExpectedAxis column) {
    if (!present(tensor)) return ok();
    return packed ? check_shape(name, tensor.layout, {{"T", count}, head, column})
                  : check_shape(name, tensor.layout, {{"B", batch}, {"S", count}, head, column});
  };
  TESSERA_RETURN_IF_ERROR(check_tokens("v", call.v, tokens, {"Hkv", heads}, {"Dv"}));
  const int64_t head_dim_v = call.v.layout.shape[call.v.layout.rank - 1];
  const struct {
    const char* name;
    int64_t given, most;
  } dims[] = {{"k", head_dim, kMaxHeadDim}, {"v", head_dim_v, kMaxHeadDimV}};
  for (const auto& dim : dims) {
    if (dim.given >= 1 && dim.given <= dim.most) continue;
    return invalid("%s: head size %" PRId64 ", accepted 1 .. %" PRId64, dim.name, dim.given, dim.most);
  }
  const ExpectedAxis pages = paged ? ExpectedAxis{"pages"} : ExpectedAxis{"B", batch};
  const char* const keys = paged ? "page_size" : "Smax";
  TESSERA_RETURN_IF_ERROR(
      check_shape("k_cache", call.k_cache.layout, {pages, {keys}, {"Hkv", heads}, {"D", head_dim}}));
  const int64_t* of_k_cache = call.k_cache.layout.shape;
  TESSERA_RETURN_IF_ERROR(
      check_shape("v_cache", call.v_cache.layout,
                  {{"pages", of_k_cache[0]}, {keys, of_k_cache[1]}, {"", heads}, {"", head_dim_v}}));
  if (paged) TESSERA_RETURN_IF_ERROR(check_shape("page_table", call.page_table.layout, {{"B", batch}, {"max_pages"}}));
  if (present(call.dropped)) TESSERA_RETURN_IF_ERROR(check_shape("dropped", call.dropped.layout, {{"1", 1}}));
  if (present(call.cos)) {
    TESSERA_RETURN_IF_ERROR(check_shape("cos", call.cos.layout, {{"R"}, {"rotary_dim / 2"}}));
    const auto [rows, half] = std::pair(call.cos.layout.shape[0], call.cos.layout.shape[1]);
    TESSERA_RETURN_IF_ERROR(check_shape("sin", call.sin.layout, {{"", rows}, {"", half}}));
    if (half < 1 || 2 * half > head_dim) {
      return invalid("cos: shape %s turns %" PRId64 " columns, accepted 2 .. %" PRId64 ", the head size",
                     shape_text(call.cos.layout).text, 2 * half, head_dim);
    }
  }
  const auto check_positions = [&](const char* name, const tessera_tensor& positions, int64_t count) {
    if (!present(positions)) return ok();
    return packed ? check_shape(name, positions.layout, {{"T", count}})
                  : check_shape(name, positions.layout, {{"B", batch}, {"S", count}});
  };
  TESSERA_RETURN_IF_ERROR(check_positions("positions_k", call.positions_k, tokens));
  if (!present(call.q)) return ok();
  TESSERA_RETURN_IF_ERROR(check_tokens("q", call.q, packed ? tokens : -1, {"Hq"}, {"D", head_dim}));
  const tessera_layout& q = call.q.layout;
  TESSERA_RETURN_IF_ERROR(
      check_tokens("q_out", call.q_out, q.shape[q.rank - 3], {"", q.shape[q.rank - 2]}, {"", head_dim}));
  return check_positions("positions_q", call.positions_q, q.shape[q.rank - 3]);
}

tessera_status check_sizes(const tessera_append_call& call) {
  const AppendSizes s = sizes(call);
  for (const int64_t extent : {s.batch, s.tokens, s.tokens_q, s.heads_kv, s.heads_q, s.pages, s.page_size, s.angles}) {
    if (extent > kMaxLength)
      return invalid("append: an extent of %" PRId64 ", accepted up to %" PRId64, extent, kMaxLength);
  }
  if (s.room > kMaxLength) {
    return invalid("page_table: room for %" PRId64 " keys a sequence, accepted at most %" PRId64, s.room, kMaxLength);
  }
  return ok();
}

}  // namespace

tessera_status validate_append(const tessera_append_call& call) {
  TESSERA_RETURN_IF_ERROR(check_presence(call));
  if (call.interleaved != 0 && call.interleaved != 1) {
    return invalid("interleaved: %d, accepted 0 and 1", call.interleaved);
  }
  if (call.reserved_0 != 0) return invalid("reserved_0: %d, accepted 0", call.reserved_0);
  tessera_status status = ok();
  for_each_tensor(call, [&](const char* name, const tessera_tensor& tensor, bool is_written) {
    if (status.code != TESSERA_OK || !present(tensor)) return;
    const tessera_layout& layout = tensor.layout;
    const bool index = layout.dtype == TESSERA_INT32 || &tensor == &call.k_descale || &tensor == &call.v_descale;
    if (layout.rank < 0 || layout.rank > TESSERA_MAX_RANK) {
      status = invalid("%s: rank %d, accepted 0 (absent) .. %d", name, layout.rank, TESSERA_MAX_RANK);
    } else {
      status = check_layout(name, layout, is_written ? Access::kWritten : Access::kRead,
                            index ? LastAxis::kAnyStride : LastAxis::kContiguous);
    }
  });
  TESSERA_RETURN_IF_ERROR(status);
  TESSERA_RETURN_IF_ERROR(check_dtypes(call));
  TESSERA_RETURN_IF_ERROR(check_shapes(call));
  TESSERA_RETURN_IF_ERROR(check_scales(call, sizes(call)));
  return check_sizes(call);
}

namespace {

// ---- values of index tensors ----------------------------------------------------------------------------------------

tessera_status check_position(const char* name, const tessera_tensor& positions, const AppendedTokens& tokens,
                              int64_t count, const AppendSizes& size, int64_t b) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = position_of(positions, tokens, b, i);
    if (position >= 0 && position < size.angles) continue;
    return invalid("%s: token %" PRId64 " of sequence %" PRId64 " stands at %" PRId64 ", accepted 0 .. %" PRId64
                   ": the rows of cos and sin",
                   present(positions) ? name : "seqused_k", i, b, position, size.angles - 1);
  }
  return ok();
}

tessera_status check_sequence(const tessera_append_call& call, const AppendSizes& size, int64_t b) {
  const AppendedTokens tokens = tokens_of(call, size, b);
  const int64_t used = tokens.first + tokens.count;
  if (tokens.first < 0 || used > size.room) {
    return invalid("seqused_k[%" PRId64 "]: %" PRId64 ", accepted %" PRId64 " .. %" PRId64
                   ": its new keys, and what its cache has room for",
                   b, used, tokens.count, size.room);
  }
  for (int64_t key = tokens.first; present(call.page_table) && key < used;
       key += size.page_size - key % size.page_size) {
    const int64_t page = index_at(call.page_table, b, key / size.page_size);
    if (page < 0 || page >= size.pages) {
      return invalid("page_table[%" PRId64 ", %" PRId64 "]: %" PRId64 ", accepted 0 .. %" PRId64
                     ": k_cache has %" PRId64 " pages",
                     b, key / size.page_size, page, size.pages - 1, size.pages);
    }
  }
  if (size.rotary_dim == 0) return ok();
  TESSERA_RETURN_IF_ERROR(check_position("positions_k", call.positions_k, tokens, tokens.count, size, b));
  return check_position("positions_q", call.positions_q, tokens, tokens.count_q, size, b);
}

}  // namespace

tessera_status read_append_call(const tessera_append_call* given, tessera_append_call& known) {
  if (!given) return invalid("call: NULL, must point to a tessera_append_call");
  known = {};
  return read_struct("call", *given, offsetof(tessera_append_call, k_descale),
                     "{.struct_size = sizeof(tessera_append_call)}", known);
}

tessera_status check_append_pointers(const tessera_append_call& call) {
  OwnMemory memory;
  tessera_status status = ok();
  for_each_tensor(call, [&](const char* name, const tessera_tensor& tensor, bool is_written) {
    if (status.code != TESSERA_OK || !present(tensor) || elements(tensor.layout) == 0) return;
    status = check_pointer(name, tensor.layout, tensor.data);
    if (status.code == TESSERA_OK) memory.add(name, tensor.layout, tensor.data, is_written);
  });
  TESSERA_RETURN_IF_ERROR(status);
  return memory.check();
}

tessera_status check_append_indices(const tessera_append_call& call) {
  const AppendSizes size = sizes(call);
  for (int64_t b = 0; present(call.cu_seqlens) && b <= size.batch; ++b) {
    const int64_t before = b == 0 ? 0 : index_at(call.cu_seqlens, b - 1), at = index_at(call.cu_seqlens, b);
    if (at < before || at > size.tokens) {
      return invalid("cu_seqlens[%" PRId64 "]: %" PRId64 ", accepted %" PRId64 " .. %" PRId64
                     ": offsets do not decrease, and k has %" PRId64 " tokens",
                     b, at, before, size.tokens, size.tokens);
    }
  }
  for (int64_t b = 0; b < size.batch; ++b) TESSERA_RETURN_IF_ERROR(check_sequence(call, size, b));
  return ok();
}

}  // namespace tessera::core
