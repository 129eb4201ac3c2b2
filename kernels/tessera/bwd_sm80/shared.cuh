// How the products of a backward block are divided among its warps, and its shared memory.
#pragma once

#include "tessera/bwd_sm80/config.hpp"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// Named barriers of the S/dP warp split; __syncthreads uses 0.
enum SplitBarrier : int {
  kSWarpsBarrier = 1,
  kDpWarpsBarrier,
  kGradientsBarrier,  // dS^T of the dP warps is visible, and the S warps have finished reading dO
  kQueriesBarrier,    // the next tile of Q is visible
  kOutputsBarrier,    // the next tile of dO is visible, and the S warps have finished reading dS^T
  kPartnerBarrier,    // P^T of an S warp is visible to its partner warp; one barrier for each of kRoleWarps pairs
};

// How a tile's products are divided among the warps.
template <BwdConfig kCfg>
struct BwdWarps {
  // Warps of one role compute the same products: all warps or, with the S/dP warp split, the S warps (S^T, P^T, dV) or
  // the dP warps (dP^T, dS^T, dK). Warp w of a role has the keys of key group w / kColumnParts, and part w %
  // kColumnParts of the columns of dK and dV and, if there are as many parts of the queries, of the queries.
  static constexpr bool kSplit = kCfg.s_dp_split;
  static constexpr int kRoleWarps = kSplit ? kCfg.warps / 2 : kCfg.warps;
  static constexpr int kColumnParts = kCfg.column_parts;
  static constexpr int kKeyGroups = kRoleWarps / kColumnParts;
  static constexpr int kM = kCfg.block_n / kKeyGroups / 16;
  // In a key group, kScoreParts warps compute scores, each kScoreM x 16 keys by kQueries queries. With the split, four
  // warps have square parts, whose edges, which determine what is read, are short. Float16 does not do so, because it
  // would spill 96 bytes at D = 192.
  static constexpr int kScoreParts = kColumnParts < kCfg.block_m / 16 ? kColumnParts : kCfg.block_m / 16;
  static constexpr int kScoreKeyParts = bwd_raises(kCfg) && kScoreParts == 4 ? 2 : 1;
  static constexpr int kQueryParts = kScoreParts / kScoreKeyParts;
  static constexpr int kScoreM = kM / kScoreKeyParts;
  static constexpr int kQueries = kCfg.block_m / kQueryParts;
  static constexpr bool kExchange = kColumnParts > 1 || kSplit;
  // Whether keys are in lane order in shared memory. Not with dBias: additions to it cover whole words of memory only
  // in the other order.
  static constexpr bool kLaneOrder = kCfg.score.lane_order(kM * 16) && !kCfg.d_bias;
  // V overlays K and dO overlays Q: each is loaded again when it is needed.
  static constexpr bool kOverlaid = kCfg.stages == 0;

  // Tiles of 8 columns for each part, an even number.
  TESSERA_HOST_DEVICE static constexpr int tiles(int columns, int parts) {
    return (columns / 16 + parts - 1) / parts * 2;
  }
  static constexpr int kDK = tiles(kCfg.head_dim, kColumnParts), kDV = tiles(kCfg.head_dim_v, kColumnParts);

  // Queries whose scores, P^T and dS^T, a warp has in registers at once, in addition to its part of dK and dV.
  TESSERA_HOST_DEVICE static constexpr int slice() {
    // Registers for addresses and fragments, of which float32 needs two each, and for options.
    constexpr int kElsewhere = kCfg.dtype == Dtype::kFloat32     ? 160
                               : kCfg.score.any() || kCfg.d_bias ? 128
                               : kM == 1                         ? 95
                                                                 : 60;
    const int most = 65536 / (kCfg.warps * 32 * kCfg.min_blocks_per_sm);
    const int accumulators = (most < 255 ? most : 255) - kElsewhere;
    int queries = kQueries;
    // With the split a warp has S^T and dV, or dP^T and dK, not all four.
    while (!kSplit && queries > 16 && kM * (4 * (kDK + kDV) + queries) > accumulators) queries /= 2;
    return queries;
  }
  static constexpr int kSlice = slice();

  // With the split: full and partial tiles have separate code, instead of one place where masked elements become 0.
  // Measured: separate code is faster with 32 scores and 32 gradients in a lane, and slower with fewer.
  static constexpr bool kMasksApart = kSplit && kColumnParts == 2 && kDK == 8;

  // dQ is divided into kQueryGroups groups of rows, and the columns among the warps of a group, so that the operands'
  // edges, which determine what is read, are short.
  TESSERA_HOST_DEVICE static constexpr int query_groups() {
    int best = 1;
    for (int groups = 2; groups <= kCfg.block_m / 16 && groups <= kCfg.warps; groups *= 2) {
      const int now = kCfg.block_m / groups + 8 * tiles(kCfg.head_dim, kCfg.warps / groups);
      const int before = kCfg.block_m / best + 8 * tiles(kCfg.head_dim, kCfg.warps / best);
      if (now <= before) best = groups;
    }
    return best;
  }
  static constexpr int kQueryGroups = query_groups();
  static constexpr int kQM = kCfg.block_m / kQueryGroups / 16;
  static constexpr int kQParts = kCfg.warps / kQueryGroups;  // parts of the columns
  static constexpr int kQN = tiles(kCfg.head_dim, kQParts);

  static_assert(kM * kKeyGroups * 16 == kCfg.block_n && kKeyGroups * kColumnParts == kRoleWarps, "warps share evenly");
  static_assert(kQueries * kQueryParts == kCfg.block_m && kQueries % 16 == 0, "queries are shared evenly");
  static_assert(kQM * kQueryGroups * 16 == kCfg.block_m, "rows of dQ are shared evenly");
  static_assert(!kOverlaid || (kExchange && kSlice == kQueries), "scores outlast the tiles that they come from");
  static_assert(!kSplit || (kCfg.head_dim == kCfg.head_dim_v && kScoreParts == kColumnParts && !kCfg.score.any() &&
                            !kCfg.score.sequence_places && !kCfg.d_bias && kColumnParts > 1 && kCfg.stages == 2 &&
                            kPartnerBarrier + kRoleWarps <= 16 && dtype_bytes(kCfg.dtype) == 2),
                "both groups do the same, and the barriers suffice");
  static_assert(!kCfg.bulk_dq || (kSplit && kQParts * kQN * 8 == kCfg.head_dim && !kCfg.deterministic &&
                                  kQM * kQN * 512 * kRoleWarps <= kCfg.block_m * kCfg.head_dim * 2),
                "what a group adds to dQ takes the place of its tile of Q or dO");
  static_assert(kM == 1 || kM % 2 == 0, "a call of Philox decides a group of 32 keys");
};

template <BwdConfig kCfg, bool kOverlaid>
struct BwdOperands {
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim, BwdWarps<kCfg>::kLaneOrder> sK;    // at the end dK
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v, BwdWarps<kCfg>::kLaneOrder> sV;  // at the end dV
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ[kCfg.stages];
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sdO[kCfg.stages];
};
template <BwdConfig kCfg>
struct BwdOperands<kCfg, true> {
  union {
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim, BwdWarps<kCfg>::kLaneOrder> sK;
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v, BwdWarps<kCfg>::kLaneOrder> sV;
  };
  union {
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ[1];
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sdO[1];
  };
};

// P^T in float16, from each thread of an S warp to the same thread of its partner warp: [a warp's tiles of 16 x
// 8][lane], pairs of both rows.
template <BwdConfig kCfg, bool kRaises = bwd_raises(kCfg)>
struct BwdWeights {
  using Warps = BwdWarps<kCfg>;
  alignas(16) uint4 weights[Warps::kRoleWarps][Warps::kScoreM * Warps::kQueries / 16][32];
};
template <BwdConfig kCfg>
struct BwdWeights<kCfg, false> {};

template <BwdConfig kCfg>
struct BwdSharedMemory : BwdOperands<kCfg, BwdWarps<kCfg>::kOverlaid>, BwdWeights<kCfg> {
  static constexpr int kStages = kCfg.stages > 1 ? kCfg.stages : 1;
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.block_m> sScores[BwdWarps<kCfg>::kExchange ? 2 : 1];  // dS^T, P^T
  alignas(16) float row_lse_log2[kStages][kCfg.block_m];
  alignas(16) float row_delta[kStages][kCfg.block_m];
  int ticket;
};

// Members follow one another without padding, so their sizes give their offsets.
template <BwdConfig kCfg>
TESSERA_DEVICE constexpr bool has_bwd_layout() {
  using Shared = BwdSharedMemory<kCfg>;
  using Operands = BwdOperands<kCfg, BwdWarps<kCfg>::kOverlaid>;
  constexpr BwdLayout kAt = bwd_layout(kCfg);
  return sizeof(Operands) == kAt.weights && (BwdWarps<kCfg>::kOverlaid || sizeof(Operands::sK) == kAt.v - kAt.k) &&
         (BwdWarps<kCfg>::kOverlaid || sizeof(Operands::sQ) == kAt.d_o - kAt.q) &&
         (!bwd_raises(kCfg) || sizeof(BwdWeights<kCfg>) == kAt.scores - kAt.weights) &&
         sizeof(Shared::sScores) == kAt.row_lse_log2 - kAt.scores &&
         sizeof(Shared::row_lse_log2) == kAt.row_delta - kAt.row_lse_log2 &&
         sizeof(Shared::row_delta) == kAt.ticket - kAt.row_delta && sizeof(Shared) == kAt.bytes;
}

}  // namespace tessera
