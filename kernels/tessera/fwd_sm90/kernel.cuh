// Forward on Hopper: O = softmax(scale Q K^T) V and LSE, as in FlashAttention-3: TMA, wgmma and specialised warpgroups.
//
// A persistent block processes work tiles, each with 64 query rows for each consumer warpgroup.
// The threads of a producer warpgroup schedule the tiles and load their Q, K and V. Two or three
// consumers overlap their own products: each issues S' = Q K'^T of the next K/V block together with O += P V of this
// one, and the exponentials of S' run during P V and during the products of the other consumers, with which it is not
// synchronised. Four consumers perform these steps in sequence: the products of the other three are enough to hide the
// softmax.
//
// The maxima of a row are computed in its first block; later blocks use this stale max (attention/softmax), raised by a
// known growth (attention/score/growth), unless a bias may raise the scores from block to block, or a program has done
// so in this work tile. If a sum exceeds a bound, the warp recomputes the block.
//
// Block: (consumers + 1) x 128 threads, one block on a multiprocessor; setmaxnreg moves registers from the producers to
// the consumers. Details and measurements: docs/reference/kernels/fwd_sm90.md.
//
//   config.hpp     FwdSm90Config, the layout of shared memory; the launch parameters are FwdSm90Params
//   shared.cuh     a work tile, and a block's shared memory
//   loads.cuh      the producers: the tile scheduler, and the loads of Q, K and V
//   cursor.cuh     a consumer's position in the stream of K/V blocks
//   scores.cuh     S -> P
//   epilogue.cuh   sums and accumulators -> LSE and O
//   merge.cuh      the merge of split keys by clusters
//   kernel.cuh     the loop of a consumer
#pragma once

#include "tessera/attention/unowned_rows.cuh"
#include "tessera/fwd_sm90/loads.cuh"
#include "tessera/fwd_sm90/merge.cuh"
#include "tessera/fwd_sm90/scores.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/ptx/wgmma.cuh"

namespace tessera {

// A consumer warpgroup, with 64 rows of each work tile.
template <FwdSm90Config kCfg>
struct Consumer {
  using Scores = ScoreStage<kCfg>;
  static constexpr int kD = Scores::kD, kSteps = Scores::kSteps;
  // Whether first blocks and later ones have the same code: in kernels that a first call compiles, options are most of
  // it.
  static constexpr bool kOneText = kCfg.block_mask || kCfg.score.program || kCfg.score.facts().reshapes;
  using Q = typename Scores::Q;
  using K = typename Scores::K;
  using V = SwizzledTile<kCfg.block_n, kCfg.head_dim_v>;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_n, false>;
  using OutputProduct = ptx::Wgmma<kCfg.dtype, kCfg.head_dim_v, true>;

  KvCursor<kCfg> at;
  Scores scores;
  float rO[1][kD][4];
  // Of the work tile's last block: the first row of V past the sequence's end that is not zero; 0 if there is none.
  int v_tail;
  Epilogue<kCfg> epilogue;

  TESSERA_DEVICE Consumer(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared, int consumer)
      : at(p, shared, consumer) {
    // No result depends on these values. But products are issued even if there is nothing to multiply yet, and if a
    // compiler (NVRTC 12.8) initialises a register between two of them, it serialises them all.
    clear(scores.rS);
    clear(rO);
    ptx::wgmma_pin(flat(scores.rS));
    ptx::wgmma_pin(flat(rO));
    if constexpr (!Scores::kInPlace) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        scores.rP[step][0] = scores.rP[step][1] = scores.rP[step][2] = scores.rP[step][3] = 0;
        ptx::wgmma_pin(scores.rP[step]);
      }
    }
  }

  TESSERA_DEVICE void attend_tiles() {
    if constexpr (Scores::kOverlaps && kOneText) {
      attend_blocks();
    } else if constexpr (Scores::kOverlaps) {
      attend_overlapping();
    } else {
      attend_in_steps();
    }
    ptx::cp_async_bulk_wait_group_read();  // TMA has read O before another block uses this shared memory
  }

  // Where clusters merge parts: writes this consumer's rows of O to the block's part, once no consumer needs Q, K or V.
  TESSERA_DEVICE void put_part() {
    ptx::barrier_sync(kMergeBarrier, kCfg.consumers * 128);
    if (epilogue.has_part) epilogue.store_parts(at.shared.work_tiles[0], rO, at);
  }

  // S, softmax and O in sequence, one work tile after another.
  TESSERA_DEVICE void attend_in_steps() {
    while (uniform(at.next_tile(false))) {
      issue_scores();
      if constexpr (Scores::kEntriesAhead) scores.load_entries(at);
      wait_scores();
      if constexpr (kOneText) {
        find_v_tail(at.bounds.last);
        scores.block(at, rO, true, true, [](bool) {});
        if (at.at_last_block()) at.release_q();
      } else {
        first_block();
        scores.pack(at);
      }
      clear(rO);
      if (at.before_last_block()) {
        do {
          issue_output();
          at.next_block();
          if constexpr (Scores::kInPlace) wait_output();
          issue_scores();
          if constexpr (Scores::kEntriesAhead) scores.load_entries(at);
          wait_scores();
          if constexpr (!Scores::kInPlace) wait_output();
          if constexpr (kOneText) {
            scores.block(at, rO, false, true, [](bool) {});
          } else {
            scores.next_block(at, rO, [] {});
          }
        } while (at.before_last_block());
        at.release_q();
      }
      if (kCfg.varlen && v_tail > 0) clear_v_tail();
      issue_output();
      epilogue.finish_sums(at.tile(), scores.softmax, at);
      wait_output();
      for (; at.bounds.end - 1 > at.bounds.last; --at.bounds.end) at.skip_k(), at.skip_v();
      epilogue.store(at.tile(), rO, at);
      at.release_tile();
    }
  }

  // The K/V blocks of all work tiles form one stream. The scores of a block are issued together with O += P V of the
  // previous block and turned into the next P meanwhile; at the end of a work tile, the first exponentials of the next
  // work tile therefore run during its last product.
  TESSERA_DEVICE void attend_overlapping() {
    // 1: P of a work tile's last block waits for its V. Read from one lane, so that it is in a uniform register.
    int pending = 0;
    while (true) {
      const auto finished_at = at.tile_at;
      if (pending) at.tile_at.advance();
      const int found = uniform(at.next_tile(pending != 0));
      if (!found && !pending) break;
      issue_scores();
      if (kCfg.varlen && pending && v_tail > 0) clear_v_tail();
      issue_output(pending);
      if (Scores::kEntriesAhead && found) scores.load_entries(at);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_pin(flat(scores.rS));
      if (pending) epilogue.finish_sums(at.shared.work_tiles[finished_at.stage()], scores.softmax, at);
      if (found) first_block();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rO));
      if (pending) {
        at.release_v();
        at.skip_unseen_v();
        epilogue.store(at.shared.work_tiles[finished_at.stage()], rO, at);
        at.shared.tile_ring.release(finished_at);
      }
      pending = found;
      if (!found) continue;
      scores.pack(at);
      clear(rO);
      if (at.at_last_block()) continue;
      do {
        at.next_block();
        attend_block();
      } while (at.before_last_block());
      at.release_q();
    }
  }
  // S' = Q K'^T of a later block, together with O += P V of the previous one.
  TESSERA_DEVICE void attend_block() {
    issue_scores();
    issue_output();
    if constexpr (Scores::kEntriesAhead) scores.load_entries(at);
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(flat(scores.rS));
    scores.next_block(at, rO, [this] { wait_output(); });
  }

  // The same where kOneText: a work tile's first block and the later ones have the same code.
  TESSERA_DEVICE void attend_blocks() {
    // 1: P of the previous block, its work tile's first, waits for its V; 2: that of a later one, whose product is
    // added to O. Setting O to zero in a branch instead would make the compiler move and spill its registers.
    int pending = 0;
    while (true) {
      const auto finished_at = at.tile_at;
      const int begins = !pending || !next_of_tile();  // the block is a work tile's first
      int found = 1;
      if (begins) {
        if (pending) {
          if constexpr (kCfg.varlen) find_v_tail(at.bounds.block);
          at.release_q();
          at.tile_at.advance();
        }
        found = uniform(at.next_tile(pending != 0));
        if (!found && !pending) break;
      }
      issue_scores();
      if (kCfg.varlen && begins && pending && v_tail > 0) clear_v_tail();
      issue_output(pending, pending > 1);
      if (Scores::kEntriesAhead && found) scores.load_entries(at);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_pin(flat(scores.rS));
      const WorkTile<kCfg>& finished = at.shared.work_tiles[finished_at.stage()];
      if (begins && pending) epilogue.finish_sums(finished, scores.softmax, at);
      scores.block(at, rO, begins, found, [&](bool again) {
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_pin(flat(rO));
        if (!pending || again) return;
        at.release_v();
        at.skip_unseen_v();
        if (begins) {
          epilogue.store(finished, rO, at);
          at.shared.tile_ring.release(finished_at);
        }
      });
      pending = begins ? found : 2;
    }
  }
  // Advances to the work tile's next block, if it has one.
  TESSERA_DEVICE int next_of_tile() {
    if constexpr (kCfg.block_mask) {
      return uniform(at.next_listed(false));
    } else {
      if (!at.before_last_block()) return 0;
      at.next_block();
      return 1;
    }
  }

  // Processes a work tile's first block.
  TESSERA_DEVICE void first_block() {
    if constexpr (!kCfg.block_mask) find_v_tail(at.bounds.last);
    scores.first_block(at);
  }
  // Determines what a work tile's last block leaves in V: rows of V past the sequence's end are multiplied by P = 0,
  // but in packed and paged tensors they may hold NaN. With lists the last block is known after the list's end.
  TESSERA_DEVICE void find_v_tail(int last_block) {
    const int sk = uniform(at.tile().s.sk);
    v_tail = 0;
    if (kCfg.varlen && (at.p.keys.begins || at.p.seqused_k) && sk < (last_block + 1) * kCfg.block_n) {
      v_tail = sk % kCfg.block_n;
    }
  }
  TESSERA_DEVICE void clear_v_tail() {
    at.wait_v();
    at.template clear_from<V>(shared_address(at.shared.sV[at.v.stage()].data), v_tail);
  }

  // ---- products. They are issued without a branch: if there is nothing to multiply, they read what is in shared
  // memory and their results are unused, because one wgmma inside a branch would make the compiler serialise all ----

  template <class Tile, int kStages>
  TESSERA_DEVICE TileDescriptor descriptor(const Tile* tiles, const RingPosition<kStages>& at, uint32 high) const {
    const auto first = reinterpret_cast<const char*>(tiles) - reinterpret_cast<const char*>(&this->at.shared);
    constexpr int kStep = static_cast<int>(sizeof(Tile) / 16) / RingPosition<kStages>::kStep;
    return {this->at.shared_descriptor + static_cast<int>(first) / 16 + at.offset * kStep, high};
  }

  // S = Q K^T
  TESSERA_DEVICE void issue_scores() {
    const TileDescriptor q = descriptor(at.shared.sQ, at.q, at.p.q_descriptor_high);
    const TileDescriptor k = descriptor(at.shared.sK, at.k, at.p.kv_descriptor_high);
    if constexpr (Scores::kInPlace) ptx::wgmma_forget(flat(scores.rS));
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim; d += 16) {
      ScoreProduct::ss(flat(scores.rS), inner_major<Q>(q, 0, d), inner_major<K>(k, 0, d), d > 0);
    }
    ptx::wgmma_commit_group();
  }
  // O += P V; adds == 0: O = P V
  TESSERA_DEVICE void issue_output(bool pending = true, int adds = 1) {
    const TileDescriptor v = descriptor(at.shared.sV, at.v, at.p.kv_descriptor_high);
    if (pending) at.wait_v();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      OutputProduct::rs(flat(rO), scores.rP[step], outer_major<V>(v, step * 16), step > 0 ? 1 : adds);
    }
    ptx::wgmma_commit_group();
  }
  // Both wait for every product that was issued.
  TESSERA_DEVICE void wait_scores() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(scores.rS));
  }
  TESSERA_DEVICE void wait_output() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rO));
    at.release_v();
  }
};

template <FwdSm90Config kCfg>
TESSERA_DEVICE void check_fwd_sm90_config() {
  static_assert(has_fwd_sm90_layout<kCfg>(), "shared memory lies where the host and the search of tiles have it");
  static_assert(sizeof(WorkTile<kCfg>) == kWorkTileBytes);
  static_assert(whole_q_stages(kCfg.consumers, kCfg.q_stages), "a stage is one consumer's");
  static_assert(kv_rings_cannot_deadlock(kCfg.consumers, kCfg.block_n, kCfg.k_stages, kCfg.v_stages));
  static_assert(kCfg.dtype != Dtype::kFloat32, "wgmma of 16-bit types");
  static_assert(kCfg.consumers >= 2 && kCfg.consumers <= 4, "setmaxnreg has numbers for these");
  static_assert(kCfg.cluster == 1 || !kCfg.varying_tile_cost, "a cluster's blocks see the same keys");
  static_assert(!kCfg.score.facts().blocks, "a mask has an entry for every key");
  static_assert(!kCfg.block_mask || (kCfg.cluster == 1 && kCfg.consumers == kListHalves), "a list a tile");
  static_assert(!(kCfg.block_mask && kCfg.varlen) || kCfg.program_lists(), "a block mask is of dense sequences");
  static_assert(!kCfg.block_mask || Consumer<kCfg>::Scores::kOverlaps, "lists are walked by overlapping consumers");
  static_assert(!kCfg.pack_gqa || !kCfg.score.any(), "options take one head a tile");
  static_assert(!kCfg.split || (kCfg.cluster == 1 && !kCfg.block_mask && !kCfg.live_tiles), "a part a tile");
  static_assert(!kCfg.merges() || kCfg.split, "parts are merged");
  static_assert(!kCfg.live_tiles || (kCfg.varlen && kCfg.cluster == 1), "the live tiles of packed sequences");
  static_assert(!kCfg.score.dropout || kCfg.block_n % 32 == 0, "one Philox call decides 32 keys");
  static_assert(kCfg.varlen || kCfg.page_rows == 0, "a paged sequence's length is seqused_k");
}

template <FwdSm90Config kCfg>
TESSERA_DEVICE void fwd_sm90(const FwdSm90Params& p) {
  check_fwd_sm90_config<kCfg>();
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdSm90SharedMemory<kCfg>*>(shared_memory);

  // 1. Barriers. The tile ring is released by the three loaders and by every consumer warp. The previous kernel in the
  // stream may run until griddepcontrol_wait. The next kernel is allowed to begin only after it, because a decode_sm90
  // launch of the same call does not wait for the kernels before it.
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    ptx::prefetch_tensormap(&p.o_map);
    shared.tile_ring.init(3 + kCfg.consumers * 4);
    shared.q_ring.init(4);
    shared.k_ring.init(kCfg.consumers * 4);
    shared.v_ring.init(kCfg.consumers * 4);
    ptx::fence_mbarrier_init();
  }
  if constexpr (kCfg.cluster > 1) {
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // 2. Roles. 65536 registers are 168 a thread of three warpgroups, 128 of four, 96 of five.
  constexpr int kProducerRegisters = kCfg.consumers == 2 ? 40 : 32, kConsumerRegisters = kCfg.consumers == 2   ? 232
                                                                                         : kCfg.consumers == 3 ? 160
                                                                                                               : 112;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) load_q<kCfg>(p, shared);
    if (threadIdx.x == 96) schedule_tiles<kCfg>(p, shared);
    if constexpr (kCfg.page_rows > 0) {
      if (threadIdx.x / 32 == 1) load_kv_pages<kCfg, true>(p, shared, shared.k_ring, shared.sK, &p.k_map);
      if (threadIdx.x / 32 == 2) load_kv_pages<kCfg, false>(p, shared, shared.v_ring, shared.sV, &p.v_map);
    } else {
      if (threadIdx.x == 32) load_kv<kCfg, true>(p, shared, shared.k_ring, shared.sK, &p.k_map);
      if (threadIdx.x == 64) load_kv<kCfg, false>(p, shared, shared.v_ring, shared.sV, &p.v_map);
    }
    if constexpr (kCfg.merges()) pass_merge_barriers();
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    if (kCfg.varlen && p.cu_seqlens_q) {  // clear rows of no sequence while the first tiles are loaded
      constexpr int kWarps = kCfg.consumers * 4;
      const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32 - 4;
      clear_unowned_outputs<kCfg.dtype>(p, warp, static_cast<int64>(gridDim.x) * kWarps);
    }
    Consumer<kCfg> consumer(p, shared, uniform(static_cast<int>(threadIdx.x) / 128 - 1));
    consumer.attend_tiles();
    if constexpr (kCfg.merges()) {
      consumer.put_part();
      merge_parts<kCfg>(p, shared);
    }
  }
  if constexpr (kCfg.cluster > 1) {  // the other block may still arrive at this one's barriers
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace tessera
