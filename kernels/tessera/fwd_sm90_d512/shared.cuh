// The shared memory of fwd_sm90_d512: the cluster's work tile, and the offsets of tiles and barriers in this block and
// in the other.
#pragma once

#include "tessera/attention/score/options.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/fwd_sm90_d512/config.hpp"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// Query rows row0 ... row0 + count - 1 of one head, and the K/V blocks that they see.
struct FwdD512Tile {
  int batch, head, row0, count;  // count 0: none
  Sequence s;
  int first, last;  // K/V blocks first ... last - 1 that any of the rows sees
  // Of each consumer's rows: the blocks that some row sees, first_of ... last_of - 1, and those that every row sees in
  // full.
  int first_of[kFwdD512Consumers], last_of[kFwdD512Consumers];
  int full_first_of[kFwdD512Consumers], full_last_of[kFwdD512Consumers];

  template <FwdSm90D512Config kCfg>
  TESSERA_DEVICE static FwdD512Tile at(const FwdSm90Params& p, int index) {
    constexpr int kRows = FwdSm90D512Config::kBlockM;
    FwdD512Tile t;
    const TileCoord place = tile_coord(p.order, index);
    const SequenceHead of = sequence_head<kCfg.score>(p, place.head, p.heads_q);
    t.head = of.head, t.batch = of.batch;
    int tile = place.slot;
    if (kCfg.varlen && p.cu_seqlens_q) {
      t.batch = find_sequence<kRows>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, place.slot);
      tile -= slot_begin<kRows>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, t.batch);
    }
    t.s = load_sequence<kCfg.varlen, false, kCfg.score>(p, t.batch);
    // The last queries, which see the most keys, come first.
    t.row0 = ((t.s.sq + kRows - 1) / kRows - 1 - tile) * kRows;
    t.count = t.row0 < 0 ? 0 : clamp(t.s.sq - t.row0, 0, kRows);
    const auto range = [&](int row, int rows, int& first, int& last) {
      const TileRange seen = ScoreOptions<kCfg.score>::range(p, t.s, row, row + rows - 1);
      first = max(seen.some.low, 0) / kCfg.block_n;
      last = rows > 0 && seen.some.high >= seen.some.low ? seen.some.high / kCfg.block_n + 1 : first;
      return seen.all;
    };
    range(t.row0, t.count, t.first, t.last);
    for (int i = 0; i < kFwdD512Consumers; ++i) {
      const int rows = clamp(t.count - i * kConsumerRows, 0, kConsumerRows);
      const KeyRange all = range(t.row0 + i * kConsumerRows, rows, t.first_of[i], t.last_of[i]);
      if (t.first_of[i] >= t.last_of[i]) t.first_of[i] = t.last_of[i] = t.first;
      t.full_first_of[i] = (max(all.low, 0) + kCfg.block_n - 1) / kCfg.block_n;
      t.full_last_of[i] = (all.high + 1) / kCfg.block_n - 1;
    }
    return t;
  }

  // The batch index in the tensor maps: a packed tensor is one sequence to them.
  template <FwdSm90D512Config kCfg>
  TESSERA_DEVICE int q_batch(const FwdSm90Params& p) const {
    return kCfg.varlen && p.cu_seqlens_q ? 0 : batch;
  }
  template <FwdSm90D512Config kCfg>
  TESSERA_DEVICE int k_batch(const FwdSm90Params& p) const {
    return kCfg.varlen && p.keys.begins ? 0 : batch;
  }
};
static_assert(sizeof(FwdD512Tile) <= kFwdD512TileBytes);

template <FwdSm90D512Config kCfg>
struct FwdD512Shared {
  static constexpr FwdSm90D512Layout kAt = fwd_sm90_d512_layout(kCfg);
  using Rows = SwizzledTile<kConsumerRows, kCfg.half_dim>;  // of Q, and of O
  using Keys = SwizzledTile<kCfg.block_n, kCfg.half_dim>;   // of K, and of V
  using KAt = RingPosition<kCfg.k_stages>;
  using VAt = RingPosition<kCfg.v_stages>;
  static constexpr int kWarps = 4 * kFwdD512Consumers, kPartialWarpBytes = 16 * kCfg.block_n * 4;

  uint32 base;
  uint32 descriptor;  // `base` in matrix descriptor format: a tile's descriptor needs one addition

  TESSERA_DEVICE explicit FwdD512Shared(const void* memory)
      : base(shared_address(memory)), descriptor(descriptor_address(base)) {}

  // ---- tiles ----
  TESSERA_DEVICE uint32 q(int consumer) const { return base + kAt.q + consumer * Rows::kBytes; }
  TESSERA_DEVICE uint32 k(const KAt& at) const { return base + kAt.k + at.stage() * Keys::kBytes; }
  TESSERA_DEVICE uint32 v(const VAt& at) const { return base + kAt.v + at.stage() * Keys::kBytes; }
  TESSERA_DEVICE TileDescriptor tile_descriptor(int offset) const { return {descriptor + offset, kDescriptorHigh}; }
  TESSERA_DEVICE TileDescriptor q_descriptor(int consumer) const {
    return tile_descriptor(kAt.q / 16 + consumer * (Rows::kBytes / 16));
  }
  TESSERA_DEVICE TileDescriptor k_descriptor(const KAt& at) const {
    return tile_descriptor(kAt.k / 16 + at.offset * (Keys::kBytes / 16 / KAt::kStep));
  }
  TESSERA_DEVICE TileDescriptor v_descriptor(const VAt& at) const {
    return tile_descriptor(kAt.v / 16 + at.offset * (Keys::kBytes / 16 / VAt::kStep));
  }
  // Of a consumer's thread, its scores of keys 0 ... 7 of a block; the next eight are 128 * 16 bytes further.
  TESSERA_DEVICE uint32 partial(int consumer, int thread) const {
    return base + kAt.partial + consumer * (kConsumerRows * kCfg.block_n * 4) + thread * 16;
  }

  // ---- barriers ----
  static constexpr int kQFull = 0;  // [consumer]
  static constexpr int kKFull = kQFull + kFwdD512Consumers, kKEmpty = kKFull + kCfg.k_stages;
  static constexpr int kVFull = kKEmpty + kCfg.k_stages, kVEmpty = kVFull + kCfg.v_stages;
  static constexpr int kPartialFull = kVEmpty + kCfg.v_stages;  // [consumer warp]: the other block's part has arrived
  // [consumer warp]: the other block has read this block's part.
  static constexpr int kPartialFree = kPartialFull + kWarps;
  static_assert(kPartialFree + kWarps == fwd_sm90_d512_barriers(kCfg));

  TESSERA_DEVICE uint32 barrier(int index) const { return base + kAt.barriers + index * 8; }

  // A warp arrives at a barrier: it has finished reading what the barrier guards.
  TESSERA_DEVICE static void arrive_warp(uint32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  // By one thread, before the barriers are used. The bytes that the other block sends are announced here for the first
  // block of keys, and from then on by the waiter of each for the next.
  TESSERA_DEVICE void init() const {
    for (int i = 0; i < kFwdD512Consumers; ++i) ptx::mbarrier_init(barrier(kQFull + i), 1);
    for (int i = 0; i < kCfg.k_stages; ++i) {
      ptx::mbarrier_init(barrier(kKFull + i), 1);
      ptx::mbarrier_init(barrier(kKEmpty + i), kWarps);
    }
    for (int i = 0; i < kCfg.v_stages; ++i) {
      ptx::mbarrier_init(barrier(kVFull + i), 1);
      ptx::mbarrier_init(barrier(kVEmpty + i), kWarps);
    }
    for (int i = 0; i < kWarps; ++i) {
      ptx::mbarrier_init(barrier(kPartialFull + i), 1);
      ptx::mbarrier_init(barrier(kPartialFree + i), 1);
    }
    ptx::fence_mbarrier_init();
    for (int i = 0; i < kWarps; ++i) ptx::mbarrier_arrive_expect_tx(barrier(kPartialFull + i), kPartialWarpBytes);
  }
};

}  // namespace tessera
