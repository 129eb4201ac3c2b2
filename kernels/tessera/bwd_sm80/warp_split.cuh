// The backward pass of bwd_sm80/kernel.cuh with the S/dP warp split, for problems without options: half of the warps,
// the S warps, compute S^T, P^T and dV; the other half, the dP warps, compute dP^T, dS^T and dK. Each warp's part of a
// product is twice as large as without the split, so shared memory is read less. A dP warp gets P^T from its partner,
// the S warp with the same keys and queries; in float16 if the operands are bfloat16 too (bwd_raises).
//
// An S warp owns the tile of dO and a dP warp that of Q: it loads the next tile, and may stage its additions to dQ in
// the tile's memory. Grid, block and shared memory are those of bwd_sm80/kernel.cuh. Details:
// docs/reference/kernels/bwd_sm80.md.
#pragma once

#include "tessera/bwd_sm80/dq.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

// The products of a step except dQ. S warps: S^T, P^T, rAcc = dV += P^T dO. dP warps: dP^T, dS^T, rAcc = dK += dS^T Q.
// The warps of a role call load_next() once the bulk copies of their additions to the previous step's dQ have read
// shared memory. At the end dS^T is visible to all warps; the S warps have finished reading dO, the dP warps Q.
template <BwdConfig kCfg, int kM, int kN, class LoadNext>
TESSERA_DEVICE void multiply_split(float (&rAcc)[kM][kN][4], const KeyBlock<kCfg>& b, const ScoreTile& scores,
                                   int stage, bool full, LoadNext&& load_next) {
  using Warps = BwdWarps<kCfg>;
  constexpr int kRoleThreads = Warps::kRoleWarps * 32;
  const BwdParams& p = b.p;
  auto& shared = b.shared;
  const bool is_dp = b.is_dp_warp();
  auto& sP = shared.sScores[1];
  auto& sMine = is_dp ? shared.sScores[0] : sP;
  const int row = b.score_key, col = b.warp_query;

  constexpr int kScoreM = Warps::kScoreM, kQueryTiles = Warps::kQueries / 8;
  float rS[kScoreM][kQueryTiles][4];
  clear(rS);
  product_abt(rS, is_dp ? shared.sV : shared.sK, row, is_dp ? shared.sdO[stage] : shared.sQ[stage], col);
  if (is_dp) {
    ptx::barrier_sync(kPartnerBarrier + b.role_warp, 64);
    const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
    const auto probability = [&](int m, int n, int half) {
      if constexpr (bwd_raises(kCfg)) {
        const uint4 pairs = shared.weights[b.role_warp][m * kQueryTiles / 2 + n / 2][lane];
        return unpack_pair<Dtype::kFloat16>(n % 2 ? (half ? pairs.w : pairs.z) : (half ? pairs.y : pairs.x));
      } else {
        return load_pair<kCfg.dtype>(sP.pointer(row + m * 16 + half * 8 + lane_row(), col + n * 8 + lane_col()));
      }
    };
    if (full || !Warps::kMasksApart) {
      score_gradients<false>(p, b.s, scores, rS, probability);
    } else {
      score_gradients<true>(p, b.s, scores, rS, probability);
    }
  } else {
    if (full || !Warps::kMasksApart) {
      probabilities<false, bwd_raises(kCfg)>(p, b.s, scores, rS);
    } else {
      probabilities<true, bwd_raises(kCfg)>(p, b.s, scores, rS);
    }
  }
  store_accumulator<1>(sMine, rS, row, col, 1.0f);
  // Masked elements become 0 in shared memory: masking them in registers, before the store, would need registers of the
  // products and slow down full tiles.
  if (!full && !Warps::kMasksApart) {
    const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
    char* mine = sMine.pointer(row + lane / 4, col + lane % 4 * 2);
    for_masked<kScoreM, kQueryTiles>(p, b.s, scores, [&](int m, int n, int e) {
      reinterpret_cast<unsigned short*>(mine + (m * 16 + e / 2 * 8) * sMine.kPitchBytes)[n * 8 + e % 2] = 0;
    });
  }
  if (is_dp) {
    ptx::barrier_arrive(kGradientsBarrier, 2 * kRoleThreads);
  } else {
    // This follows the store of the operand, in a separate piece of code: among the exponentials, each conversion would
    // wait for the exponential before it.
    if constexpr (bwd_raises(kCfg)) {
      const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
#pragma unroll
      for (int m = 0; m < kScoreM; ++m)
#pragma unroll
        for (int n = 0; n < kQueryTiles; n += 2) {
          const float(&x)[4] = rS[m][n], (&y)[4] = rS[m][n + 1];  // saturating, because the LSE is rounded
          shared.weights[b.role_warp][m * kQueryTiles / 2 + n / 2][lane] =
              make_uint4(ptx::cvt_rn_satfinite_f16x2(x[0], x[1]), ptx::cvt_rn_satfinite_f16x2(x[2], x[3]),
                         ptx::cvt_rn_satfinite_f16x2(y[0], y[1]), ptx::cvt_rn_satfinite_f16x2(y[2], y[3]));
        }
    }
    ptx::barrier_arrive(kPartnerBarrier + b.role_warp, 64);
  }
  if constexpr (kCfg.bulk_dq) {
    if (lane_id() == 0) ptx::cp_async_bulk_wait_group_read();
  }
  ptx::barrier_sync(is_dp ? kDpWarpsBarrier : kSWarpsBarrier, kRoleThreads);
  load_next();
  product_ab<Warps::kColumnParts>(rAcc, sMine, b.warp_key, is_dp ? shared.sQ[stage] : shared.sdO[stage],
                                  b.part * (kN * 8));
  ptx::barrier_sync(is_dp ? kDpWarpsBarrier : kGradientsBarrier, is_dp ? kRoleThreads : 2 * kRoleThreads);
}

template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_key_block_split(const KeyBlock<kCfg>& b) {
  using Warps = BwdWarps<kCfg>;
  const BwdParams& p = b.p;
  auto& shared = b.shared;
  constexpr int kBlockM = kCfg.block_m, kM = Warps::kM, kBlockThreads = kCfg.warps * 32;
  const int warp = b.warp;  // the S warps are those below kRoleWarps

  // 1. K and V: global -> shared, with the first tiles of Q and dO.
  const auto load_step = [&](int stage, const QueryStep& step) {
    const bool is_dp = warp >= Warps::kRoleWarps;
    b.load_queries(is_dp ? shared.sQ[stage] : shared.sdO[stage], is_dp ? p.q : p.d_o, step, p.head_dim);
    b.load_stats(stage, step);
  };
  QueryStep next{b.head_kv * p.group, b.first_tile};
  const auto load_next = [&](int stage) {
    if (b.tiles > 0 && next.head < (b.head_kv + 1) * p.group) {
      load_step(stage, next);
      next.advance(b.first_tile, b.tiles);
    }
    ptx::cp_async_commit_group();
  };
  if (b.tiles > 0) {
    for_both(shared.sK, shared.sV,
             [&](auto& tile, bool v) { b.load_keys(tile, v ? p.v : p.k, v ? p.head_dim_v : p.head_dim); });
  }
#pragma unroll
  for (int stage = 0; stage < kCfg.stages - 1; ++stage) load_next(stage);

  // 2. For every query tile that sees some of the keys.
  float rAcc[kM][Warps::kDV][4];  // dV of an S warp, dK of a dP warp
  clear(rAcc);
  int stage = 0;
  QueryStep step{b.head_kv * p.group, b.first_tile};
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // the first tiles are visible
  for (int left = b.tiles * p.group; left > 0; --left) {
    const int row0 = step.tile * kBlockM;
    const bool full = b.full(row0);
    const auto score_tile = [&](int col) { return b.score_tile(step, row0, col, stage); };

    //    S^T = K Q^T, P^T, dV += P^T dO | dP^T = V dO^T, dS^T, dK += dS^T Q
    multiply_split<kCfg>(rAcc, b, score_tile(b.warp_query), stage, full, [&] {
      if (left > 1) {
        QueryStep following = step;
        following.advance(b.first_tile, b.tiles);
        load_step(1 - stage, following);
      }
    });
    // Waits for the next tiles here: after its additions to dQ, a thread would wait for those too. The S warps may then
    // begin the next step while the dP warps compute this step's dQ.
    ptx::cp_async_wait_all();
    if (warp >= Warps::kRoleWarps) ptx::barrier_arrive(kQueriesBarrier, kBlockThreads);

    //    dQ += dS K
    const DqPart<kCfg> dq_part_of_warp(b.warp);
    float rdQ[Warps::kQM][Warps::kQN][4];
    dq_part_of_warp.multiply(rdQ, shared);
    if (warp < Warps::kRoleWarps) ptx::barrier_arrive(kOutputsBarrier, kBlockThreads);
    add_dq(p, b, step, stage, row0, dq_part_of_warp, rdQ);
    ptx::barrier_sync(warp < Warps::kRoleWarps ? kQueriesBarrier : kOutputsBarrier, kBlockThreads);
    step.advance(b.first_tile, b.tiles);
    stage = stage + 1 == shared.kStages ? 0 : stage + 1;
  }

  // 3. dK and dV: registers -> shared -> global, or sums: registers -> global.
  ptx::cp_async_wait_group<0>();
  if constexpr (kCfg.bulk_dq) {
    if (lane_id() == 0) ptx::cp_async_bulk_wait_group_read();  // before another block uses this shared memory
  }
  const bool is_dp = warp >= Warps::kRoleWarps;
  const float unit = (is_dp ? p.scale : 1.0f) * (bwd_raises(kCfg) ? kBwdLower : 1.0f);
  if constexpr (kCfg.sums) {
    if (is_dp) {
      b.template write_sums<false>(rAcc, unit);
    } else {
      b.template write_sums<true>(rAcc, unit);
    }
    return;
  }
  __syncthreads();  // no warp reads or loads K and V any more, which dK and dV overlay
  store_accumulator<Warps::kColumnParts>(is_dp ? shared.sK : shared.sV, rAcc, b.warp_key, b.part * (Warps::kDV * 8),
                                         unit);
  __syncthreads();
  b.store_dk_dv();
}

template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_sm80_split(const BwdSm80Params& p) {
  static_assert(kCfg.s_dp_split, "that is bwd_sm80");
  for_key_blocks<kCfg>(p, [](const KeyBlock<kCfg>& block) { bwd_key_block_split(block); });
}

}  // namespace tessera
