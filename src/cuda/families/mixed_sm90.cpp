// Batches of an inference engine's step: packed queries with cached keys, where some sequences have one or a few tokens
// and some have chunks of a prompt. There are two launches over the plan's bounds; each skips the other's sequences by
// their lengths, on the GPU. decode_sm90 serves the sequences of few query rows, fwd_sm90 or fwd_sm80 the others. If
// the others have few queries and most sequences one token, another launch of decode_sm90 serves them, in which the
// whole GPU reads a chunk's keys. Neither launch reads what the other writes, so decode_sm90 begins on the
// multiprocessors that fwd_sm90 leaves free. A sequence's own queries alone decide which kernel serves it, so that with
// batch_invariant the rest of the batch does not matter.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/dtypes.hpp"
#include "core/geometry.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/decode_sm90.hpp"
#include "cuda/families/fwd_sm80.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

// Queries that fit one work tile of decode_sm90.
int64_t decoded_queries(const tessera_plan& plan) {
  return kDecodeRows / std::max<int64_t>(1, plan.heads_q / std::max<int64_t>(1, plan.heads_kv));
}

// The plan for the family of the other sequences, which skips sequences of at most `queries` queries.
tessera_plan planned_for(const tessera_plan& plan, int64_t queries) {
  tessera_plan planned = core::question_of(plan);
  planned.decode_queries = static_cast<int32_t>(queries);
  return planned;
}

// If fwd_sm90 does not support the problem, as with 8-bit caches, fwd_sm80 serves it without splitting keys.
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
  // A token of an 8-bit cache takes half of decode_sm90's time for 16 bits; of fwd_sm80, a whole tile.
  const bool codes = core::is_8bit(plan.problem.k.dtype);
  if (plan.problem.batch_invariant || codes || decodes_chunks(plan)) return most;
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
    add_decode_sm90(plan, plan.decode_queries + 1, plan.max_seqlen_q);
  } else if (&others == &kFwdSm80) {
    add_fwd_sm80(plan, Splits::kNone);
  } else {
    others.configure(plan);
  }
  plan.steps[0].sequences = TESSERA_STEP_MANY_QUERIES;
  tessera_plan_step& few = add_decode_sm90(plan, 0, plan.decode_queries, /*beside=*/&others == &kFwdSm90);
  few.sequences = TESSERA_STEP_FEW_QUERIES, few.most_queries = plan.decode_queries;
  few.workspace_at = padded_to(plan.steps[0].workspace_bytes, kWorkspaceAlignment);
}

// Further conditions are those of its two families, which refuse() calls.
constexpr Supports kSupports{.direction = TESSERA_FORWARD,
                             .oldest_arch = kHopper,
                             .newest_arch = kHopper,
                             .dtypes = kHalfPrecision,
                             .head_dim = 256,
                             .tensors = kAllTensors & ~(kScoreTensors | kPlaceTensors),
                             .cache_dtypes = bits({TESSERA_FLOAT8_E4M3, TESSERA_FLOAT8_E5M2})};

}  // namespace

constinit const Family kMixedSm90{
    {"mixed_sm90", TESSERA_KERNEL_MIXED_SM90, refuse, configure, estimate_us}, kSupports, nullptr, {}};

}  // namespace tessera::cuda
