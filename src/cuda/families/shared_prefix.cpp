// Shared prefixes: the groups' queries against the keys that are read once, every sequence's queries against its other
// keys, each part by a forward family, and their merge. One kernel first writes the index tensors of both parts
// (kernels/tessera/shared_prefix).
#include "cuda/families/shared_prefix.hpp"

#include <algorithm>
#include <string>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/estimate.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"

namespace tessera::cuda {
namespace {

constexpr core::PrefixPart kParts[] = {core::kPrefix, core::kSuffix};
constexpr const Family* kPartFamilies[] = {&kDecodeSm90, &kFwdSm90, &kFwdSm80};

// NULL: no family supports it.
const Family* family_of(const tessera_plan& plan, core::PrefixPart n) {
  return cheapest(kPartFamilies, core::plan_of(plan, n));
}

// The fewest keys for which a chunk is worth its merge.
constexpr int64_t kLeastChunkKeys = 256;

// The number of chunks of the prefixes' keys that gives fwd_sm90 work for the whole GPU, with two warpgroups' rows for
// each tile. 1: it has enough work without chunks, or does not support them.
int32_t chunks_of(const tessera_plan& plan) {
  const int64_t rows = rows_total(plan) * plan.heads_q / std::max<int64_t>(1, plan.heads_kv);
  if (rows == 0 || core::prefix_groups(plan.problem) == 0) return 1;
  const int64_t tiles = std::max(divide_up(rows, 2 * kConsumerRows), core::prefix_groups(plan.problem)) * plan.heads_kv;
  const int64_t most = core::plan_of(plan, core::kPrefix).max_seqlen_k / kLeastChunkKeys;
  const auto chunks = static_cast<int32_t>(std::min(plan.device.cores / tiles, most));
  if (chunks <= 1) return 1;
  const tessera_plan part = core::plan_of(plan, core::kPrefix, chunks);
  constexpr const Family* kTiles[] = {&kFwdSm90, &kFwdSm80};
  return cheapest(kTiles, part) == &kFwdSm90 ? chunks : 1;
}

constexpr Supports kSupports{.direction = TESSERA_FORWARD,
                             .oldest_arch = 80,
                             .newest_arch = kAnyNewer,
                             .dtypes = kHalfPrecision | bits({TESSERA_FLOAT32}),
                             .head_dim = core::kMaxHeadDim,
                             .tensors = kAllTensors,
                             .programs = true};

std::string refuse(const tessera_plan& plan) {
  if (!core::shares_prefixes(plan.problem)) return "no prefix_groups";
  if (std::string reason = refusal(kSupports, core::plan_of(plan, core::kSuffix)); !reason.empty()) return reason;
  if (std::string reason = core::refuse_prefixes(plan.problem); !reason.empty()) return reason;
  for (const core::PrefixPart n : kParts) {
    if (!family_of(plan, n)) return "fwd_sm80, of a part: " + kFwdSm80.refuse(core::plan_of(plan, n));
  }
  return "";
}

void configure(tessera_plan& plan) {
  const int32_t chunks = chunks_of(plan);
  for (const core::PrefixPart n : kParts) {
    tessera_plan part = core::plan_of(plan, n, n == core::kPrefix ? chunks : 1);
    const bool in_chunks = n == core::kPrefix && chunks > 1;
    const Family& family = in_chunks ? kFwdSm90 : *family_of(plan, n);
    family.configure(part);
    if (in_chunks) part.steps[0].num_splits = chunks;
    core::keep_steps(plan, part);
  }
  int64_t at = core::carve_prefix(nullptr, plan).bytes;
  for (const core::PrefixPart n : kParts) {
    plan.steps[n].workspace_at = at;
    at += padded_to(plan.steps[n].workspace_bytes, kWorkspaceAlignment);
  }
}

// The time of a call's two parts and their merge.
double estimate_us(const tessera_plan& plan) {
  double us = kCallUs;
  for (const core::PrefixPart n : kParts) us += family_of(plan, n)->estimate_us(core::plan_of(plan, n));
  return us;
}

// Extends the merge of the two parts: the chunks replace the first part.
void merge_chunks(const tessera_plan& plan, const core::PrefixMemory& memory, CombineParams& c) {
  const core::ChunkMemory& chunks = memory.chunks;
  const int64_t tokens = rows_total(plan), heads = plan.heads_kv, group = plan.heads_q / heads, dv = plan.head_dim_v;
  const int64_t count = core::prefix_chunks(plan), rows = tokens * group;
  const auto own_stats = [&](float* const(&of)[core::kPrefixParts]) {
    return StatTensor{of[core::kSuffix], c.lse_parts.batch, c.lse_parts.head, c.lse_parts.row};
  };
  c.chunks = {Divisor(static_cast<int>(group)),
              heads * dv,
              1,
              memory.o[core::kSuffix],
              c.o_part_batch,
              c.o_part_row,
              c.o_part_head,
              own_stats(memory.lse),
              own_stats(memory.lse_low)};
  c.parts = static_cast<int>(count);
  c.o_parts = chunks.o, c.o_part = rows * heads * dv;
  c.o_part_row = group * heads * dv, c.o_part_batch = c.rows.value * c.o_part_row, c.o_part_head = dv;
  c.lse_parts = {chunks.lse, rows, c.rows.value * group, count * rows, group};
  c.lse_low_parts = c.lse_parts, c.lse_low_parts.data = chunks.lse_low;
  c.rows_begin = memory.group_queries, c.rows_end = memory.group_queries + core::prefix_groups(plan.problem);
}

tessera_status list_call(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                         LaunchList& launches) {
  const core::PrefixMemory memory = core::carve_prefix(static_cast<char*>(workspace), plan);
  PrefixIndicesParams p = prefix_index_params(plan, buffers, memory);
  for (const core::PrefixPart n : kParts) {  // the counters of a part's work tiles
    const tessera_plan_step& step = plan.steps[n];
    if (workspace && find_family(step.family) == &kFwdSm90 && step.workspace_bytes > 0)
      p.counters[n] = reinterpret_cast<int*>(static_cast<char*>(workspace) + step.workspace_at);
  }
  launch_prefix_indices({core::paged(plan.problem)}, p, launches);
  for (const core::PrefixPart n : kParts) {
    const tessera_plan part = core::plan_of(plan, n);
    TESSERA_RETURN_IF_ERROR(
        lower_step(part, plan.steps[n], core::buffers_of(plan, n, buffers, memory), workspace, launches));
  }
  launches.clear(nullptr);  // the first kernel clears the memory of both parts
  const tessera_combine_call parts = core::merge_of(plan, buffers, memory);
  CombineConfig config = combine_config(parts);
  CombineParams c = combine_params(parts);
  if (core::prefix_chunks(plan) > 1) config.chunks = true, merge_chunks(plan, memory, c);
  const tessera_layout& sink = plan.problem.sink;
  if (core::present(sink)) c.sink = buffers.sink, c.sink_head = sink.strides[0];
  return launch_combine(config, c, launches);
}

}  // namespace

constinit const Family kSharedPrefix{{"shared_prefix", TESSERA_KERNEL_SHARED_PREFIX, refuse, configure, estimate_us},
                                     kSupports,
                                     nullptr,
                                     {},
                                     nullptr,
                                     nullptr,
                                     list_call};

}  // namespace tessera::cuda

namespace tessera {

PrefixIndicesParams prefix_index_params(const tessera_plan& plan, const tessera_buffers& buffers,
                                        const core::PrefixMemory& memory) {
  const tessera_problem& problem = plan.problem;
  PrefixIndicesParams p{};
  cuda::fill_problem_params(p, plan, buffers);
  p.prefix_groups = buffers.prefix_groups, p.prefix_groups_stride = problem.prefix_groups.strides[0];
  p.prefix_lens = buffers.prefix_lens, p.prefix_lens_stride = problem.prefix_lens.strides[0];
  p.groups = static_cast<int>(core::prefix_groups(problem));
  p.max_prefix = static_cast<int>(problem.max_prefix_k > 0 ? problem.max_prefix_k : plan.max_seqlen_k);
  p.hides_keys = core::hides_keys(problem, problem.causal != 0);
  const PositionMasks masks = cuda::position_masks(problem, buffers);
  p.causal_seqs = masks.causal_seqs, p.causal_seqs_stride = masks.causal_seqs_stride;
  const core::KeyPlaces places = core::key_places(problem);
  p.a_sequence = places.a_sequence;
  p.entries = static_cast<int>(places.entries), p.keys_an_entry = static_cast<int>(places.keys);
  p.group_queries = memory.group_queries, p.group_keys = memory.group_keys, p.group_lens = memory.group_lens;
  p.suffix_keys = memory.suffix_keys, p.suffix_lens = memory.suffix_lens;
  if (const int64_t chunks = core::prefix_chunks(plan); chunks > 1) {
    const tessera_layout q = core::joined_queries(problem);
    p.chunks = {static_cast<int>(chunks),
                static_cast<int>(core::chunk_unit(places.keys)),
                memory.chunks.rows,
                memory.chunks.keys,
                memory.chunks.lens,
                buffers.q,
                q.strides[0],
                q.strides[1],
                cuda::rows_aligned(q, buffers.q),
                memory.chunks.q};
  }
  return p;
}

}  // namespace tessera
