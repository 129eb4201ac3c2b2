#include "cpu/score/program_call.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "core/convert.hpp"
#include "core/geometry.hpp"
#include "core/score/builder.hpp"
#include "core/score/facts.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {
namespace {

// The most bytes of the sums of all chains; there is always at least one chain.
constexpr int64_t kMaxSums_bytes = int64_t{256} << 20;
constexpr int64_t kChainsPerCore = 2;
constexpr int64_t kElementsPerItem = 16384;

std::vector<CodeTensor> code_tensors(const core::score::Bound& bound) {
  std::vector<CodeTensor> tensors;
  for (int n = 0; n < bound.num_tensors; ++n) {
    const core::score::BoundTensor& from = bound.tensors[static_cast<size_t>(n)];
    CodeTensor to{static_cast<const char*>(from.data), from.dtype, from.rank, {}, {}, true};
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    int64_t reach = 0;
    for (int axis = 0; axis < from.rank; ++axis) {
      const int64_t extent = from.shape[static_cast<size_t>(axis)],
                    stride = from.stride_bytes[static_cast<size_t>(axis)];
      to.stride[axis] = stride;
      to.shape[axis] = static_cast<int32_t>(std::min(extent, kMost));
      const int64_t steps = std::max<int64_t>(0, extent - 1), magnitude = stride < 0 ? -stride : stride;
      to.near = to.near && magnitude <= kMost && steps <= kMost && (magnitude == 0 || steps <= kMost / magnitude);
      reach += to.near ? magnitude * steps : 0;
    }
    to.near = to.near && reach <= kMost;
    tensors.push_back(to);
  }
  return tensors;
}

void widen(core::score::Interval& all, double x) {
  all.nan = all.nan || std::isnan(x);
  all.low = std::min(all.low, x), all.high = std::max(all.high, x);
}

template <class T>
void widen(core::score::Interval& all, const char* from, int64_t stride, int64_t count) {
  T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::lowest();
  bool nan = false;
  for (int64_t n = 0; n < count; ++n, from += stride) {
    T x;
    std::memcpy(&x, from, sizeof x);
    nan = nan || x != x;
    low = std::min(low, x), high = std::max(high, x);
  }
  widen(all, static_cast<double>(low)), widen(all, static_cast<double>(high));
  all.nan = all.nan || nan;
}

}  // namespace

ProgramCall::ProgramCall(const tessera_plan& plan, core::score::Bound bound)
    : bound_(std::move(bound)),
      group_(core::whole_heads(plan.problem).group),
      backward_(plan.problem.direction == TESSERA_BACKWARD) {
  if (const core::score::Program& program = bound_.program(); program.mask >= 0) {
    int root = program.mask;
    mask_ = core::score::reachable(program, {&root});
    mask_.mask = root;
    const auto place = [](const std::vector<core::score::Name>& names, const core::score::Name& name) {
      return static_cast<size_t>(std::ranges::find(names, name.text, &core::score::Name::text) - names.begin());
    };
    for (const core::score::Name& name : mask_.tensors) {
      mask_tensors_.push_back(place(program.tensors, name));
    }
    for (const core::score::Name& name : mask_.scalars) {
      mask_scalars_.push_back(bound_.scalars[place(program.scalars, name)]);
    }
  }
  const std::vector<CodeTensor> tensors = code_tensors(bound_);
  core::score::Program program = bound_.program();
  program_ = LoweredScore(program, tensors, bound_.scalars);
  program_code_ = program_.code();
  mask_first_ = program.mask >= 0 &&
                !(core::score::inputs_of(program, program.mask) & core::score::input_bit(core::score::Op::kS));
  if (mask_first_) {
    const int mask = std::exchange(program.mask, -1);
    only_score_ = LoweredScore(program, tensors, bound_.scalars);
    score_code_ = only_score_.code();
    program.mask = mask, program.score = -1;
    only_mask_ = LoweredScore(program, tensors, bound_.scalars);
    mask_code_ = only_mask_.code();
  }
  if (!backward_) return;
  bool needed[core::score::kMaxTensors] = {};
  std::ranges::fill(begin_, kNoSums);
  for (const core::score::LoadGradient& load : bound_.gradient().loads) {
    const auto n = static_cast<size_t>(load.tensor);
    needed[n] = bound_.gradients[n].needed;
    if (!needed[n] || begin_[n] != kNoSums) continue;
    begin_[n] = sums_;
    sums_ += bound_.tensors[n].elements();
  }
  gradient_ = LoweredScore(bound_.gradient(), tensors, bound_.scalars, needed);
  gradient_code_ = gradient_.code();
}

int64_t ProgramCall::floats(int64_t vecs, int64_t lanes) const {
  int64_t floats = 0;
  for (const ScoreCode& code : {program_code_, mask_code_, score_code_, gradient_code_}) {
    floats = std::max(floats, code_floats(code, vecs, lanes));
  }
  return floats;
}

int64_t ProgramCall::chains(const tessera_plan& plan) const {
  if (sums_ == 0) return 0;
  const int64_t fit = kMaxSums_bytes / (sums_ * static_cast<int64_t>(sizeof(double)));
  const int64_t cores = plan.device.cores, busy = cores == 1 ? 1 : kChainsPerCore * cores;
  return std::max<int64_t>(1, std::min({step_of(plan).num_items, fit, busy}));
}

// The smallest and the largest element within the indices' bounds if there are few such elements; otherwise anything.
core::score::Interval ProgramCall::bound_of_elements(const core::score::BoundTensor& tensor,
                                                     const core::score::Interval* index) const {
  constexpr int64_t kMostElements = 1024;
  int64_t low[core::score::kMaxRank] = {}, extent[core::score::kMaxRank] = {}, count = 1;
  bool inside = true;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    const double end = static_cast<double>(tensor.shape[static_cast<size_t>(axis)]) - 1;
    inside = inside && index[axis].low >= 0 && index[axis].high <= end;
    low[axis] = static_cast<int64_t>(std::clamp(index[axis].low, 0.0, std::max(end, 0.0)));
    extent[axis] = static_cast<int64_t>(std::min(index[axis].high, end)) - low[axis] + 1;
    count *= std::clamp<int64_t>(extent[axis], 0, kMostElements + 1);
    if (count > kMostElements) return core::score::Interval::everything();
  }
  if (count <= 0) return core::score::Interval::exactly(0);
  core::score::Interval all{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  if (!inside) all = core::score::Interval::exactly(0);
  // Rows along the last axis.
  const int last = tensor.rank - 1;
  const int64_t columns = last < 0 ? 1 : extent[last];
  for (int64_t row = 0; row < count / columns; ++row) {
    int64_t at[core::score::kMaxRank] = {}, rest = row;
    for (int axis = last; axis-- > 0; rest /= extent[axis]) at[axis] = low[axis] + rest % extent[axis];
    if (last >= 0) at[last] = low[last];
    const char* const first = static_cast<const char*>(tensor.data) + tensor.offset_bytes(at);
    const int64_t stride = last < 0 ? 0 : tensor.stride_bytes[static_cast<size_t>(last)];
    if (tensor.dtype == TESSERA_INT32) {
      widen<int32_t>(all, first, stride, columns);
    } else if (tensor.dtype == TESSERA_FLOAT32) {
      widen<float>(all, first, stride, columns);
    } else {
      for (int64_t n = 0; n < columns; ++n) {
        if (last >= 0) at[last] = low[last] + n;
        widen(all, core::score::load_element(tensor, at));
      }
    }
    if (all.nan) return core::score::Interval::everything();
  }
  return all;
}

int32_t ProgramCall::shows(const ScoreBlock& block) const {
  const auto from = [](int64_t low, int64_t high) {
    return core::score::Interval{static_cast<double>(low), static_cast<double>(high)};
  };
  const int64_t diagonal = block.len_k - block.len_q;
  core::score::Bounds bounds;
  bounds.b = from(block.batch, block.batch);
  bounds.h = from(block.head_low, block.head_high);
  bounds.h_kv = from(block.head_low / group_, block.head_high / group_);
  bounds.i = from(block.query_low, block.query_high);
  bounds.q_pos = from(block.query_low + diagonal, block.query_high + diagonal);
  bounds.j = from(block.key_low, block.key_high);
  bounds.len_q = from(block.len_q, block.len_q), bounds.len_k = from(block.len_k, block.len_k);
  bounds.element = [this](int tensor, const core::score::Interval* index) {
    return bound_of_elements(bound_.tensors[mask_tensors_[static_cast<size_t>(tensor)]], index);
  };
  bounds.scalar = [this](int scalar) {
    return core::score::Interval::exactly(mask_scalars_[static_cast<size_t>(scalar)]);
  };
  switch (core::score::visible(mask_, bounds)) {
    case core::score::Visible::kNone:
      return 0;
    case core::score::Visible::kAll:
      return 2;
    default:
      return 1;
  }
}

void ProgramCall::fill(Params& p) const {
  p.program = &program_code_;
  if (mask_first_) p.program_mask = &mask_code_;
  if (mask_first_ && score_code_.score.index >= 0) p.program_score = &score_code_;
  p.program_call = this;
  if (mask_.mask >= 0) {
    p.program_shows = [](const void* call, const ScoreBlock& block) {
      return static_cast<const ProgramCall*>(call)->shows(block);
    };
  }
  if (backward_) p.program_gradient = &gradient_code_;
  std::copy(std::begin(begin_), std::end(begin_), p.program_sums_begin);
}

int64_t ProgramCall::gradient_items() const {
  int64_t items = 0;
  for (int n = 0; n < bound_.num_tensors; ++n) items += items_of(n);
  return items;
}

int64_t ProgramCall::items_of(int tensor) const {
  const auto n = static_cast<size_t>(tensor);
  return bound_.gradients[n].needed ? core::divide_up(bound_.tensors[n].elements(), kElementsPerItem) : 0;
}

void ProgramCall::write_gradients(const double* sums, int64_t chains, int64_t item) const {
  int tensor = 0;
  for (; item >= items_of(tensor); ++tensor) item -= items_of(tensor);
  const core::score::BoundTensor& from = bound_.tensors[static_cast<size_t>(tensor)];
  const core::score::BoundGradient& to = bound_.gradients[static_cast<size_t>(tensor)];
  // The index of the item's first element, which then advances step by step.
  int64_t index[core::score::kMaxRank] = {}, offset_bytes = 0;
  const int64_t first = item * kElementsPerItem, end = std::min(from.elements(), first + kElementsPerItem);
  int64_t rest = first;
  for (int axis = from.rank; axis-- > 0;) {
    const auto n = static_cast<size_t>(axis);
    index[axis] = rest % from.shape[n], rest /= from.shape[n];
    offset_bytes += index[axis] * to.stride_bytes[n];
  }
  for (int64_t at = first; at < end; ++at) {
    double sum = 0;
    if (begin_[tensor] != kNoSums) {
      for (int64_t chain = 0; chain < chains; ++chain) sum += sums[chain * sums_ + begin_[tensor] + at];
    }
    core::store(to.dtype, static_cast<char*>(to.data) + offset_bytes, 0, sum);
    for (int axis = from.rank; axis-- > 0;) {
      const auto n = static_cast<size_t>(axis);
      offset_bytes += to.stride_bytes[n];
      if (++index[axis] < from.shape[n]) break;
      offset_bytes -= index[axis] * to.stride_bytes[n];
      index[axis] = 0;
    }
  }
}

int64_t program_floats(const tessera_plan& plan, int64_t vecs, int64_t lanes) {
  return core::score::has_program(plan) ? ProgramCall(plan).floats(vecs, lanes) : 0;
}

}  // namespace tessera::cpu
