#include "sized_problem.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "error.hpp"
#include "extents.hpp"

namespace tessera::cli {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

void require(bool holds, const char* flag, std::int64_t given, const char* accepted) {
  if (!holds) throw WrongUse(std::string(flag) + ": " + std::to_string(given) + ", accepted " + accepted);
}

tessera_layout layout_of(tessera_dtype dtype, const Shape& shape, const char* flag) {
  checked_bytes(shape, static_cast<std::int64_t>(tessera_dtype_bytes(dtype)), flag);
  tessera_layout layout{};
  layout.dtype = dtype;
  layout.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    layout.shape[axis] = shape[axis];
    layout.strides[axis] = stride;
    stride *= std::max<std::int64_t>(shape[axis], 1);
  }
  return layout;
}

Extents extents_of(const ProblemSizes& s, const tessera_problem& problem) {
  const std::int64_t seqlen_k = s.seqlen_k.value_or(s.seqlen_q);
  Extents extents;
  extents[core::kB] = s.batch;
  extents[core::kSq] = s.seqlen_q;
  extents[core::kSk] = seqlen_k;
  extents[core::kHq] = s.heads_q;
  extents[core::kHkv] = s.heads_kv.value_or(s.heads_q);
  extents[core::kD] = s.head_dim;
  extents[core::kDv] = s.head_dim_v.value_or(s.head_dim);
  const std::pair<const char*, core::Symbol> flags[] = {
      {"-B", core::kB},           {"--sq", core::kSq}, {"--sk", core::kSk}, {"-H", core::kHq},
      {"--kv-heads", core::kHkv}, {"-D", core::kD},    {"--dv", core::kDv}};
  for (const auto& [flag, symbol] : flags) {
    require(extents[symbol] >= 0 && extents[symbol] <= core::kMaxLength, flag, extents[symbol], "0 .. 2^31 - 1");
  }
  constexpr std::int64_t kWordBits = 32;
  extents[core::kTreeWords] = std::max<std::int64_t>(1, ceil_div(s.seqlen_q, kWordBits));
  extents[core::kGroups] = 1;  // one group of all sequences
  extents[core::kTwo] = 2;
  extents[core::kTq] = s.batch * s.seqlen_q;
  extents[core::kTk] = s.batch * seqlen_k;
  if (s.page_size) {
    require(*s.page_size > 0 && *s.page_size <= core::kMaxLength, "--page-size", *s.page_size, "at least 1");
    extents[core::kPageSize] = *s.page_size;
    extents[core::kMaxPages] = ceil_div(seqlen_k, *s.page_size);
    extents[core::kPages] = s.batch * extents[core::kMaxPages];
  }
  extents[core::kScaleBlocksQ] = ceil_div(s.seqlen_q, core::kScaleTokens);
  extents[core::kScaleBlocksK] = ceil_div(seqlen_k, core::kScaleTokens);
  if (s[core::kTensorFields[core::TensorName("block_mask").index]]) {
    if (problem.mask_block_q < 1 || problem.mask_block_k < 1) {
      throw WrongUse("--block-mask: needs --mask-block with two numbers of at least 1");
    }
    extents[core::kBlocksQ] = ceil_div(s.seqlen_q, problem.mask_block_q);
    extents[core::kBlocksK] = ceil_div(seqlen_k, problem.mask_block_k);
  }
  return extents;
}

bool is_there(const core::TensorField& field, const ProblemSizes& sizes) {
  const bool backward = sizes.direction == TESSERA_BACKWARD;
  const auto is = [&field](core::TensorName name) { return &field == &core::kTensorFields[name.index]; };
  if (field.need == core::Need::kAlways || (field.need == core::Need::kBackward && backward)) return true;
  if (is("lse") && sizes[core::kTensorFields[core::TensorName("lse_low").index]]) return true;
  if (is("cu_seqlens_q") && sizes.packed) return true;
  if (is("cu_seqlens_k") && sizes.packed && !sizes.page_size) return true;
  if ((is("page_table") || is("seqused_k")) && sizes.page_size) return true;
  if (is("prefix_lens")) return sizes[core::kTensorFields[core::TensorName("prefix_groups").index]];
  return sizes[field];
}

// The flags that a user would change if the tensor is too large.
const char* flag_of(const core::TensorField& field) {
  if (!core::is_sequence(field)) return field.flag;
  return field.dense.axes[field.dense.rank - 1].symbol == core::kDv ? "--dv" : "-D";
}

}  // namespace

tessera_problem problem_of(const ProblemSizes& sizes, const std::function<void(tessera_problem&)>& set_options) {
  tessera_problem problem;
  tessera_problem_init(&problem);
  problem.direction = sizes.direction;
  if (sizes.packed || sizes.page_size) {
    problem.max_seqlen_q = sizes.seqlen_q;
    problem.max_seqlen_k = sizes.seqlen_k.value_or(sizes.seqlen_q);
  }
  set_options(problem);
  const Extents extents = extents_of(sizes, problem);
  // cu_seqlens and page_table are among the first, since other shapes depend on them.
  for (const bool by_rank : {true, false}) {
    for (const core::TensorField& field : core::kTensorFields) {
      if ((field.form == core::Form::kByRank) != by_rank || !is_there(field, sizes)) continue;
      const Shape shape = extents.shape(field, core::shape_of(field, problem));
      // What a call adds to is float32, but for float64's.
      const core::Written now =
          sizes.direction == TESSERA_BACKWARD ? core::Written::kBackward : core::Written::kForward;
      const bool summed = problem.accumulate && core::is_sequence(field) && field.written == now;
      const tessera_dtype dtype = dtype_of(field, sizes.dtype, sizes.kv_dtype.value_or(sizes.dtype));
      problem.*field.layout =
          layout_of(summed && dtype != TESSERA_FLOAT64 ? TESSERA_FLOAT32 : dtype, shape, flag_of(field));
    }
  }
  return problem;
}

}  // namespace tessera::cli
