// Problem and device to plan: each candidate refuses with a reason or estimates its time, and the fastest is chosen.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/candidates.hpp"
#include "core/asking.hpp"
#include "core/caller_struct.hpp"
#include "core/fields.hpp"
#include "core/geometry.hpp"
#include "core/guarded.hpp"
#include "core/philox.hpp"
#include "core/score/bound.hpp"
#include "core/score/handle.hpp"
#include "core/score/indices.hpp"
#include "core/score/to_options.hpp"
#include "core/seal.hpp"
#include "core/shared_prefix.hpp"
#include "core/status.hpp"
#include "core/steps.hpp"
#include "core/validate.hpp"
#include "cpu/cpu.hpp"
#include "cuda/cuda.hpp"
#include "cuda/registry.hpp"

namespace tessera::api {
using namespace core;  // a call is made of what is there: fields, layouts, rules
namespace {

// Broadcasts to [B|1, Hq|1, Sq|1, Sk] by NumPy's rules: missing leading axes have 1 entry, and one entry of the last
// axis serves all keys.
void broadcast_scores(tessera_layout& layout, const Sizes& size) {
  constexpr int kRank = 4;
  if (!present(layout)) return;
  const int missing = kRank - layout.rank;
  for (int axis = kRank - 1; axis >= 0; --axis) {
    layout.shape[axis] = axis >= missing ? layout.shape[axis - missing] : 1;
    layout.strides[axis] = axis >= missing ? layout.strides[axis - missing] : 0;
  }
  layout.rank = kRank;
  if (layout.shape[kRank - 1] == 1 && size.max_seqlen_k != 1) {
    layout.shape[kRank - 1] = size.max_seqlen_k;
    layout.strides[kRank - 1] = 0;
  }
}

void fill_defaults(tessera_problem& problem, const Sizes& size) {
  if (!problem.has_scale) {
    problem.has_scale = 1;
    problem.scale = 1 / std::sqrt(static_cast<double>(size.head_dim));
  }
  // Wider than any sequence is as good as unbounded, and saves every reader from overflow.
  if (problem.window_left > INT32_MAX) problem.window_left = -1;
  if (problem.window_right > INT32_MAX) problem.window_right = -1;
  problem.dropout_p = dropout_threshold(problem.dropout_p) / 65536.0;
  for (tessera_layout* scores : {&problem.bias, &problem.mask, &problem.d_bias}) broadcast_scores(*scores, size);
}

// ---- what it costs --------------------------------------------------------------------------------------------------

// sum of min(u, cap) over 0 <= u < end
double ramp_sum(double end, double cap) {
  if (end <= 0) return 0;
  return end <= cap ? end * (end - 1) / 2 : cap * (cap - 1) / 2 + (end - cap) * cap;
}

// Pairs (i, j) that causal and the window leave of one Sq x Sk head: row i sees [i + d - left, i + d + right].
double visible_pairs(const tessera_problem& problem, int64_t sq, int64_t sk) {
  const int64_t d = diagonal(problem, place_of(problem, sq, sk));
  const double rows = static_cast<double>(sq), keys = static_cast<double>(sk);
  const auto keys_below = [&](int64_t shift) {  // sum over rows of the keys j < i + shift
    return ramp_sum(rows + static_cast<double>(shift), keys) - ramp_sum(static_cast<double>(shift), keys);
  };
  int64_t right = problem.window_right;
  if (problem.causal) right = 0;
  const double up_to_last = right < 0 ? rows * keys : keys_below(d + right + 1);
  return up_to_last - (problem.window_left < 0 ? 0 : keys_below(d - problem.window_left));
}

double tensor_bytes(const tessera_layout& layout) {
  return static_cast<double>(elements(layout)) * static_cast<double>(tessera_dtype_bytes(layout.dtype));
}

// Of keys or values in pages: those that the longest sequence needs, for all sequences, or all that there are.
double bytes_in_use(const tessera_layout& layout, const Sizes& size) {
  if (size.pages == 0) return 0;
  const int64_t a_sequence = (size.max_seqlen_k + size.page_size - 1) / size.page_size;
  const double pages =
      std::min(static_cast<double>(size.batch) * static_cast<double>(a_sequence), static_cast<double>(size.pages));
  return tensor_bytes(layout) * pages / static_cast<double>(size.pages);
}

// Of the keys of all sequences, those that are read where prefixes are read once: 1 where the bounds do not tell.
double fraction_read(const tessera_problem& problem, const Sizes& size) {
  const double all = static_cast<double>(size.batch) * static_cast<double>(size.max_seqlen_k);
  if (!shares_prefixes(problem) || problem.max_suffix_k == 0 || all == 0) return 1;
  const int64_t prefix = problem.max_prefix_k > 0 ? problem.max_prefix_k : size.max_seqlen_k;
  const double read = static_cast<double>(prefix_groups(problem)) * static_cast<double>(prefix) +
                      static_cast<double>(size.batch) * static_cast<double>(problem.max_suffix_k);
  return std::min(1.0, read / all);
}

// Packed: as if all sequences were equally long. Key lengths and masks are data, and taken as full.
void fill_costs(tessera_plan& plan, const Sizes& size) {
  const tessera_problem& p = plan.problem;
  const int64_t sequences = std::max<int64_t>(size.batch, 1);
  const int64_t sq = packed_q(p) ? size.rows_q / sequences : size.rows_q;
  const int64_t sk = packed_k(p) ? size.rows_k / sequences : size.max_seqlen_k;
  const double heads = static_cast<double>(size.batch * size.heads_q);
  const double d = static_cast<double>(size.head_dim), dv = static_cast<double>(size.head_dim_v);
  const bool backward = p.direction == TESSERA_BACKWARD;
  // Forward QK', PV; backward QK', dO V', P' dO, dS K, dS' Q. Two operations a multiply-add.
  plan.flops = 2 * heads * visible_pairs(p, sq, sk) * (backward ? 3 * d + 2 * dv : d + dv);

  plan.lengths_are_data = present(p.seqused_k);
  for (const TensorField& field : kTensorFields) {
    if (!takes_part(field, backward)) continue;
    const bool in_pages = field.form == Form::kKeys && paged(p);
    const double bytes = in_pages ? bytes_in_use(p.*field.layout, size) : tensor_bytes(p.*field.layout);
    plan.bytes_moved += bytes * (field.form == Form::kKeys ? fraction_read(p, size) : 1);
  }
  for (int n = 0; n < plan.program.num_tensors; ++n)
    plan.bytes_moved += tensor_bytes(p.captured[plan.program.tensors[n]]);
  for (const tessera_layout& gradient : p.d_captured) {
    if (backward && score::has_program(plan)) plan.bytes_moved += tensor_bytes(gradient);
  }
  // Three-step attention writes S, reads it for the softmax, writes P, reads it for PV, one matrix in place. Backward
  // reads the stored P for dV, writes dP, reads both for dS, writes dS, reads it for dQ and for dK: two matrices.
  const double score_bytes =
      heads * static_cast<double>(sq) * static_cast<double>(sk) * static_cast<double>(tessera_dtype_bytes(p.o.dtype));
  plan.standard_bytes = plan.bytes_moved + (backward ? 7 : 4) * score_bytes;
  plan.standard_extra_bytes = (backward ? 2 : 1) * score_bytes;
}

constexpr int64_t kAlignment = 64;  // a cache line

bool fill_workspace_bytes(tessera_plan& plan) {
  const auto align = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  for (const tessera_plan_step& step : steps_of(plan)) {
    plan.shared_bytes = std::max(plan.shared_bytes, step.workspace_at + step.workspace_bytes);
  }
  plan.scratch_bytes = align(plan.scratch_bytes);
  plan.shared_bytes = align(plan.shared_bytes);
  int64_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(plan.scratch_bytes, int64_t{plan.device.threads}, &bytes) ||
                        __builtin_add_overflow(bytes, plan.shared_bytes, &bytes) ||
                        __builtin_add_overflow(bytes, kAlignment, &bytes);
  plan.workspace_bytes = bytes;
  return !overflow;
}

// ---- the choice -----------------------------------------------------------------------------------------------------

std::string refusal(const Candidate& candidate, const tessera_plan& plan) {
  const std::string_view asked = asked_family(plan.device);
  if (!asked.empty() && asked != candidate.name) return "the device asks for " + std::string(asked);
  if (candidate.for_comparison && asked.empty()) return "for comparison only: chosen on request";
  return candidate.refuse(plan);
}

// The one that takes the least time of those that can do the problem.
const Candidate* choose(const tessera_plan& plan) {
  const Asking asking(plan);
  const Candidate* best = nullptr;
  double least = 0;
  const bool by_name = !asked_family(plan.device).empty();
  for (const Candidate* const candidate : candidates_of(plan.device.backend)) {
    if (candidate->for_comparison && !by_name) continue;
    if (!refusal(*candidate, plan).empty()) continue;
    const double us = candidate->estimate_us(plan);
    if (!best || us < least) best = candidate, least = us;
  }
  return best;
}

// As candidates are asked: without what the chosen one filled in that they read.
tessera_plan undecided(const tessera_plan& plan) {
  tessera_plan asked = question_of(plan);
  asked.decode_queries = 0;
  return asked;
}

const char* why_accepted(const Candidate& candidate, const tessera_plan& plan) {
  if (std::strcmp(candidate.name, plan.family) != 0) return "supports it too";
  return is_asked(plan.device, candidate) ? "chosen: the device asks for it" : "chosen: the least time";
}

// Those that are there for comparison would have said no in any case.
tessera_status refused_by_all(const tessera_plan& plan) {
  std::string all;
  const std::vector<const Candidate*>& candidates = candidates_of(plan.device.backend);
  const std::vector<tessera_candidate> said = answers(plan);
  for (size_t n = 0; n < said.size(); ++n) {
    if (candidates[n]->for_comparison && !is_asked(plan.device, *candidates[n])) continue;
    all += std::string(all.empty() ? "" : "; ") + said[n].kernel + ": " + said[n].reason;
  }
  return unsupported("no kernel supports this problem: %s", all.c_str());
}

// Every family once, whatever back ends it is on.
std::vector<tessera_family> all_families() {
  std::vector<tessera_family> all;
  for (const int32_t backend : {TESSERA_BACKEND_CPU, TESSERA_BACKEND_CUDA}) {
    for (const Candidate* const candidate : candidates_of(backend)) {
      const auto named = [&](const tessera_family& family) { return std::strcmp(family.name, candidate->name) == 0; };
      auto found = std::ranges::find_if(all, named);
      if (found == all.end()) {
        found = all.insert(found, tessera_family{{}, candidate->kernel, 0, 0, candidate->for_comparison});
        std::snprintf(found->name, sizeof found->name, "%s", candidate->name);
      }
      (backend == TESSERA_BACKEND_CPU ? found->on_cpu : found->on_cuda) = 1;
    }
  }
  return all;
}

tessera_status check_family(const tessera_device& device) {
  if (device.family[0] == '\0') return ok();
  std::string accepted;
  for (const tessera_family& family : all_families()) {
    if (std::strcmp(family.name, device.family) == 0) return ok();
    accepted += (accepted.empty() ? "" : ", ") + std::string(family.name);
  }
  return invalid("device.family: '%s', accepted %s", device.family, accepted.c_str());
}

// The problem's score program: what the options can say goes there, the rest is kept.
tessera_status keep_program(tessera_plan& plan) {
  tessera_problem& p = plan.problem;
  if (!p.program) return ok();
  const tessera_program& handle = *p.program;
  std::shared_ptr<const score::Checked> checked = handle.checked;
  const bool wants_gradients =
      p.direction == TESSERA_BACKWARD && std::ranges::any_of(p.d_captured, [](const auto& d) { return present(d); });
  score::Program left = checked->program;
  tessera_problem changed = p;
  const int slopes = score::move_to_options(left, handle.tensors, changed);
  const bool nothing_left = left.score < 0 && left.mask < 0;
  if (nothing_left && wants_gradients) {  // of what it does not read: written as zeros where programs are run
    score::keep(*checked, handle, plan.program);
    return ok();
  }
  p = changed;
  if (nothing_left) {
    p.program = nullptr;
    for (tessera_layout& layout : p.captured) layout = {};
  } else {
    TESSERA_RETURN_IF_ERROR(score::check(left, checked));
    score::keep(*checked, handle, plan.program);
  }
  plan.program.alibi_slopes = slopes + 1;
  return ok();
}

tessera_status make_plan(const tessera_problem* given, const tessera_device* given_device, tessera_plan& result) {
  tessera_plan plan;
  begin_plan(plan);
  TESSERA_RETURN_IF_ERROR(read_problem(given, plan.problem));
  tessera_device& device = plan.device;
  if (given_device) {
    device = *given_device;
  } else {
    TESSERA_RETURN_IF_ERROR(cpu::detect_once(device));
  }
  TESSERA_RETURN_IF_ERROR(validate(plan.problem));
  TESSERA_RETURN_IF_ERROR(validate(device));
  TESSERA_RETURN_IF_ERROR(check_family(device));
  const Sizes size = sizes(plan.problem);
  plan.struct_size = sizeof plan;
  plan.version = TESSERA_VERSION;
  fill_defaults(plan.problem, size);
  TESSERA_RETURN_IF_ERROR(keep_program(plan));
  plan.batch = size.batch;
  plan.max_seqlen_q = size.max_seqlen_q;
  plan.max_seqlen_k = size.max_seqlen_k;
  plan.heads_q = size.heads_q;
  plan.heads_kv = size.heads_kv;
  plan.head_dim = size.head_dim;
  plan.head_dim_v = size.head_dim_v;
  fill_costs(plan, size);
  TESSERA_RETURN_IF_ERROR(score::check_planned_indices(plan));
  const Candidate* chosen = choose(plan);
  if (!chosen) return refused_by_all(plan);
  set_family(plan, *chosen);
  chosen->configure(plan);
  if (plan.device.backend == TESSERA_BACKEND_CUDA) cuda::add_stand_in(plan);
  if (!fill_workspace_bytes(plan)) return unsupported("q: the workspace for its shape is more than 2^63 bytes");
  plan.seal = seal_of(plan);
  store_plan(plan, result);
  return ok();
}

// Number `index` of `all`.
template <class Answers, class Answer>
tessera_status take(const Answers& all, const char* what, int32_t index, Answer* result) {
  if (index < 0 || static_cast<size_t>(index) >= all.size()) {
    return invalid("index: %d, the plan has %zu %s, counted from 0", index, all.size(), what);
  }
  *result = all[static_cast<size_t>(index)];
  return ok();
}

std::vector<tessera_launch> launches_of(const tessera_plan& plan, bool aligned) {
  if (plan.device.backend != TESSERA_BACKEND_CUDA) return {};
  return cuda::planned_launches(plan, aligned);
}

}  // namespace

// Never destroyed: threads that outlive main() may still be in a call.
const std::vector<const Candidate*>& candidates_of(int32_t backend) {
  using List = std::vector<const Candidate*>;
  static const List& on_cpu = *new List([] {
    List candidates;
    for (const cpu::Kernel& kernel : cpu::kernels()) candidates.push_back(&kernel);
    return candidates;
  }());
  static const List& on_cuda = *new List(cuda::families().begin(), cuda::families().end());
  return backend == TESSERA_BACKEND_CPU ? on_cpu : on_cuda;
}

std::vector<tessera_candidate> answers(const tessera_plan& plan) {
  std::vector<tessera_candidate> all;
  const tessera_plan asked = undecided(plan);
  for (const Candidate* const candidate : candidates_of(plan.device.backend)) {
    tessera_candidate answer{};
    std::string reason = refusal(*candidate, asked);
    answer.accepted = reason.empty();
    if (answer.accepted) {
      reason = why_accepted(*candidate, plan);
      answer.estimate_us = candidate->estimate_us(asked);
    }
    std::snprintf(answer.kernel, sizeof answer.kernel, "%s", candidate->name);
    std::snprintf(answer.reason, sizeof answer.reason, "%s", reason.c_str());
    all.push_back(answer);
  }
  return all;
}

}  // namespace tessera::api

extern "C" {

void tessera_problem_init_sized(tessera_problem* problem, size_t struct_size) {
  if (!problem) return;
  tessera_problem known{};
  known.window_left = known.window_right = -1;
  known.struct_size = struct_size;
  std::memset(problem, 0, struct_size);
  std::memcpy(problem, &known, std::min(struct_size, sizeof known));
}

tessera_status tessera_device_cpu(tessera_device* device) {
  if (!device) return tessera::invalid("device: NULL, must point to a tessera_device");
  return tessera::core::guarded("tessera_device_cpu", [&] {
    tessera_device found{};
    TESSERA_RETURN_IF_ERROR(tessera::cpu::detect(found));
    *device = found;
    return tessera::ok();
  });
}

tessera_status tessera_device_cuda(int32_t ordinal, tessera_device* device) {
  if (!device) return tessera::invalid("device: NULL, must point to a tessera_device");
  return tessera::core::guarded("tessera_device_cuda", [&] {
    tessera_device found{};
    TESSERA_RETURN_IF_ERROR(tessera::cuda::detect(ordinal, found));
    *device = found;
    return tessera::ok();
  });
}

tessera_status tessera_device_cuda_arch(int32_t arch, tessera_device* device) {
  if (!device) return tessera::invalid("device: NULL, must point to a tessera_device");
  return tessera::core::guarded("tessera_device_cuda_arch", [&] { return tessera::cuda::describe(arch, *device); });
}

int32_t tessera_num_families(void) {
  try {
    return static_cast<int32_t>(tessera::api::all_families().size());
  } catch (...) {
    return 0;
  }
}

tessera_status tessera_family_at(int32_t index, tessera_family* family) {
  if (!family) return tessera::invalid("family: NULL, must point to a tessera_family");
  return tessera::core::guarded("tessera_family_at", [&] {
    const std::vector<tessera_family> all = tessera::api::all_families();
    if (index < 0 || static_cast<size_t>(index) >= all.size()) {
      return tessera::invalid("index: %d, the library has %zu families, counted from 0", index, all.size());
    }
    *family = all[static_cast<size_t>(index)];
    return tessera::ok();
  });
}

tessera_status tessera_make_plan(const tessera_problem* problem, const tessera_device* device, tessera_plan* plan) {
  if (!plan) return tessera::invalid("plan: NULL, must point to a tessera_plan");
  return tessera::core::guarded("tessera_make_plan", [&] { return tessera::api::make_plan(problem, device, *plan); });
}

size_t tessera_workspace_bytes(const tessera_plan* plan) {
  const bool usable = tessera::core::check_plan(plan).code == TESSERA_OK;
  return usable ? static_cast<size_t>(plan->workspace_bytes) : 0;
}

int32_t tessera_plan_num_candidates(const tessera_plan* plan) {
  if (tessera::core::check_plan(plan).code != TESSERA_OK) return 0;
  return static_cast<int32_t>(tessera::api::candidates_of(plan->device.backend).size());
}

tessera_status tessera_plan_candidate(const tessera_plan* plan, int32_t index, tessera_candidate* candidate) {
  if (!candidate) return tessera::invalid("candidate: NULL, must point to a tessera_candidate");
  TESSERA_RETURN_IF_ERROR(tessera::core::check_plan(plan));
  return tessera::core::guarded("tessera_plan_candidate", [&] {
    return tessera::api::take(tessera::api::answers(*plan), "candidates", index, candidate);
  });
}

int32_t tessera_plan_num_launches(const tessera_plan* plan, int32_t aligned) {
  if (tessera::core::check_plan(plan).code != TESSERA_OK) return 0;
  return static_cast<int32_t>(tessera::api::launches_of(*plan, aligned != 0).size());
}

tessera_status tessera_plan_launch(const tessera_plan* plan, int32_t aligned, int32_t index, tessera_launch* launch) {
  if (!launch) return tessera::invalid("launch: NULL, must point to a tessera_launch");
  TESSERA_RETURN_IF_ERROR(tessera::core::check_plan(plan));
  return tessera::core::guarded("tessera_plan_launch", [&] {
    return tessera::api::take(tessera::api::launches_of(*plan, aligned != 0), "launches", index, launch);
  });
}

}  // extern "C"
