// Batches of an engine's step: packed queries against cached keys, some sequences with a token or a few, some with chunks of a
// prompt. Two launches over the plan's bounds, each of which passes over the other's sequences by their lengths on the GPU:
// decode_sm90 serves those of few query rows, fwd_sm90 or fwd_sm80 the others, or, where these have few queries and most sequences a token, another
// launch of decode_sm90, in which all of the GPU reads a chunk's keys. Neither reads what the other writes: decode_sm90 begins on
// the multiprocessors that fwd_sm90 leaves free. Which serves a sequence depends on its own queries alone, so that with
// batch_invariant it does not matter who else is in the batch.
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

// The plan's bytes hold what the other kernel's family has decided, where its lowering reads it (of decode_sm90 its DecodeSm90Plan), and after
// it this.
struct MixedSm90Plan {
  bool by_fwd_sm90, by_decode_sm90;  // which kernel the sequences of many rows have; neither: fwd_sm80
  int64_t decode_workspace;          // offset in bytes
  DecodeSm90Plan decode;
  FwdSm80Plan
      unsplit;  // fwd_sm80's, with all keys in one part: of the others where they are its, else of all where data is misaligned
};
constexpr size_t kAt = TESSERA_PLAN_CONFIG_BYTES - sizeof(MixedSm90Plan);
static_assert(kAt >= kForwardConfigBytes);

// Queries that one work tile of decode_sm90 holds.
int64_t decoded_queries(const tessera_plan& plan) {
  return kDecodeRows / std::max<int64_t>(1, plan.heads_q / std::max<int64_t>(1, plan.heads_kv));
}

// What the families of the other sequences see: those of at most so many queries are not theirs.
tessera_plan planned_for(const tessera_plan& plan, int64_t queries) {
  tessera_plan planned = plan;
  planned.decode_queries = static_cast<int32_t>(queries);
  return planned;
}

// Where fwd_sm90 does not take the problem, fwd_sm80 has it, with all keys in one part.
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

// Only the GPU knows how many sequences have few queries. The most that the launches take is what one kernel takes for all
// sequences, unless fwd_sm80 would serve the others, which in a mixed batch does not split their keys.
double estimate_us(const tessera_plan& plan) {
  constexpr double kFarAhead = 1.5;  // three launches take the place of one
  const bool by_fwd_sm90 = kFwdSm90.refuse(plan).empty();
  const double fwd_sm80_us = kFwdSm80.estimate_us(plan);
  const double most = by_fwd_sm90 ? std::min(fwd_sm80_us, kFwdSm90.estimate_us(plan)) : fwd_sm80_us;
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
      !rows_aligned(p.v, buffers.v)) {  // which decode_sm90 does not take: all sequences are fwd_sm80's
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

// What its two families refuse beyond this, refuse() asks them.
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
