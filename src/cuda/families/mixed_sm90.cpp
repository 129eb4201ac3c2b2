// Batches of an inference engine's step: packed queries with cached keys, where some sequences have one or a few tokens
// and some have chunks of a prompt. There are two launches over the plan's bounds; each skips the other's sequences by
// their lengths, on the GPU. decode_sm90 serves the sequences of few query rows, fwd_sm90 or fwd_sm80 the others. If
// the others have few queries and most sequences one token, another launch of decode_sm90 serves them, in which the
// whole GPU reads a chunk's keys. Neither launch reads what the other writes, so decode_sm90 begins on the
// multiprocessors that fwd_sm90 leaves free. A sequence's own queries alone decide which kernel serves it, so that with
// batch_invariant the rest of the batch does not matter.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/decode_sm90.hpp"
#include "cuda/families/fwd_sm80.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/plan_config.hpp"
#include "cuda/registry.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

// A plan's config holds the decisions of the other kernel's family where its lowering reads them (for decode_sm90, its
// DecodeSm90Plan), followed by this struct.
// it this.
struct MixedSm90Plan {
  bool by_fwd_sm90, by_decode_sm90;  // the kernel of the sequences of many rows; neither: fwd_sm80
  int64_t decode_workspace;          // offset in bytes
  DecodeSm90Plan decode;
  FwdSm80Plan
      // fwd_sm80's plan without split keys: for the others if it serves them, for all sequences if data is misaligned
      unsplit;
};
constexpr size_t kAt = TESSERA_PLAN_CONFIG_BYTES - sizeof(MixedSm90Plan);
static_assert(kAt >= kForwardConfigBytes);

// Queries that fit one work tile of decode_sm90.
int64_t decoded_queries(const tessera_plan& plan) {
  return kDecodeRows / std::max<int64_t>(1, plan.heads_q / std::max<int64_t>(1, plan.heads_kv));
}

// The plan for the family of the other sequences, which skips sequences of at most `queries` queries.
tessera_plan planned_for(const tessera_plan& plan, int64_t queries) {
  tessera_plan planned = plan;
  planned.decode_queries = static_cast<int32_t>(queries);
  return planned;
}

// If fwd_sm90 does not support the problem, fwd_sm80 serves it without splitting keys.
const Family& others_of(const tessera_plan& plan) {
  if (decodes_chunks(plan)) return kDecodeSm90;
  return kFwdSm90.refuse(plan).empty() ? kFwdSm90 : kFwdSm80;
}

std::string refuse(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const int64_t queries = decoded_queries(plan);
  if (std::string reason = refuse_decode_sm90(plan, queries); !reason.empty()) return reason;
  if (!core::packed_q(p)) return "queries are not packed: every sequence has as many";
  if (!core::paged(p) && !core::present(p.seqused_k)) return "no cache: neither page_table nor seqused_k";
  if (queries == 0) return "more than " + std::to_string(kDecodeRows) + " heads a KV head";
  if (plan.max_seqlen_q <= queries) return "no sequence has more than " + std::to_string(queries) + " queries";
  if (std::string reason = kFwdSm80.refuse(plan); !reason.empty() || p.batch_invariant) return reason;
  return plan.batch < 2 ? "one sequence" : "";
}

// Only the GPU knows how many sequences have few queries. An upper bound for the launches is the time of one kernel for
// all sequences, unless fwd_sm80 serves the others, because in a mixed batch it does not split their keys.
double estimate_us(const tessera_plan& plan) {
  constexpr double kFarAhead = 1.5;  // three launches replace one
  const bool by_fwd_sm90 = kFwdSm90.refuse(plan).empty();
  const double fwd_sm80_us = kFwdSm80.estimate_us(plan);
  const double most = by_fwd_sm90 ? std::min(fwd_sm80_us, kFwdSm90.estimate_us(plan)) : fwd_sm80_us;
  // Alone, fwd_sm90 may pack heads and split keys. Of most sequences with a token, two launches come out more evenly:
  // 16 tokens and a chunk of 16 queries over 4096 keys 84 us for 115 (an H200).
  if (by_fwd_sm90 && !most_have_few(plan)) {
    const double beside_us = kFwdSm90.estimate_us(planned_for(plan, decoded_queries(plan)));
    if (beside_us > kFarAhead * kFwdSm90.estimate_us(plan)) return kCallUs + beside_us;
  }
  if (plan.problem.batch_invariant || decodes_chunks(plan)) return most;
  if (by_fwd_sm90) {
    const tessera_plan others = planned_for(plan, decoded_queries(plan));
    const auto work_us = [&](const Family& of) { return of.estimate_us(others) - kCallUs; };
    if (kFarAhead * work_us(kFwdSm90) <= work_us(kFwdSm80)) return most;
  }
  return fwd_sm80_us + decode_sm90_tokens_us(plan);
}

void configure(tessera_plan& plan) {
  plan.decode_queries = static_cast<int32_t>(decoded_queries(plan));
  const Family& others = others_of(plan);
  if (&others == &kDecodeSm90) {
    const DecodeSm90Plan chunks = plan_decode_sm90(plan, plan.decode_queries + 1, plan.max_seqlen_q);
    describe_decode_sm90(chunks, plan);
    keep_config(plan, chunks);
  } else {
    others.configure(plan);
  }
  if (&others == &kFwdSm80) plan.num_items /= plan.num_splits, plan.num_splits = 1, plan.shared_bytes = 0;
  MixedSm90Plan own{};
  own.by_fwd_sm90 = &others == &kFwdSm90, own.by_decode_sm90 = &others == &kDecodeSm90;
  own.decode_workspace = padded_to(plan.shared_bytes, kWorkspaceAlignment);
  own.decode = plan_decode_sm90(plan, 0, plan.decode_queries);
  own.unsplit = plan_fwd_sm80(plan, Splits::kNone);
  plan.num_items += own.decode.grid.x;
  plan.shared_bytes = own.decode_workspace + decode_sm90_workspace_bytes(own.decode);
  plan.smem_bytes = std::max(plan.smem_bytes, smem_bytes(own.decode.config));
  std::memcpy(reinterpret_cast<char*>(plan.config) + kAt, &own, sizeof own);
}

tessera_status list_launches(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                             LaunchList& launches) {
  MixedSm90Plan own;
  std::memcpy(&own, reinterpret_cast<const char*>(plan.config) + kAt, sizeof own);
  const tessera_problem& p = plan.problem;
  if (plan.batch == 0 || !rows_aligned(p.q, buffers.q) || !rows_aligned(p.k, buffers.k) ||
      !rows_aligned(p.v, buffers.v)) {  // decode_sm90 does not support this: fwd_sm80 serves all sequences
    return list_fwd_sm80(planned_for(plan, 0), own.unsplit, buffers, nullptr, launches);
  }
  if (own.by_fwd_sm90) {
    TESSERA_RETURN_IF_ERROR(kFwdSm90.lower(plan, buffers, workspace, launches));
  } else if (own.by_decode_sm90) {
    const auto chunks = config_of<DecodeSm90Plan>(plan);
    TESSERA_RETURN_IF_ERROR(list_decode_sm90(plan, chunks, /*beside=*/false, buffers, workspace, launches));
  } else {
    TESSERA_RETURN_IF_ERROR(list_fwd_sm80(plan, own.unsplit, buffers, nullptr, launches));
  }
  char* const base = static_cast<char*>(workspace);
  return list_decode_sm90(plan, own.decode, own.by_fwd_sm90, buffers, base ? base + own.decode_workspace : nullptr,
                          launches);
}

// Further conditions are those of its two families, which refuse() calls.
constexpr Supports kSupports{.direction = TESSERA_FORWARD,
                             .oldest_arch = kHopper,
                             .newest_arch = kHopper,
                             .dtypes = kHalfPrecision,
                             .head_dim = 256,
                             .tensors = kAllTensors & ~kScoreTensors};

}  // namespace

constinit const Family kMixedSm90{
    {"mixed_sm90", TESSERA_KERNEL_MIXED_SM90, refuse, configure, estimate_us}, kSupports, list_launches, {}};

}  // namespace tessera::cuda
