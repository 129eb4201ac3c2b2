// The position of a consumer warpgroup of fwd_sm90 in the stream of K/V blocks.
#pragma once

#include "tessera/fwd_sm90/epilogue.cuh"
#include "tessera/fwd_sm90/shared.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

// Its work tile, the K/V block of that tile, and its stages of the rings.

// Named barriers of each consumer: kClearedBarrier + consumer, kTurnBarrier + consumer.
inline constexpr int kClearedBarrier = 1, kTurnBarrier = 8;

// The K/V blocks of a work tile that the rows of one consumer see: block ... last.
template <FwdSm90Config kCfg>
struct TileBounds {
  int block = 0;              // the block whose scores are next
  int last = 0;               // the last block that some row sees
  int end = 1;                // after the last block that any consumer's rows see
  int full_first, full_last;  // full blocks: every row sees all of their keys; the others are partial
  int unseen_v = 0;  // V blocks, after the ring's next one, whose K was released unread: V will be released unread too

  // Whether some of the block's keys are masked before those that a row sees, or after them. A causal mask has none
  // before.
  TESSERA_DEVICE bool cuts_low() const { return !kCfg.varying_tile_cost && block < full_first; }
  TESSERA_DEVICE bool cuts_high() const { return block > full_last; }
};

// A consumer's position in the stream of K/V blocks. V is one block after K if the softmax of a block overlaps with
// products.
template <FwdSm90Config kCfg>
struct KvCursor : ConsumerGroup<kCfg> {
  using ConsumerGroup<kCfg>::p, ConsumerGroup<kCfg>::shared, ConsumerGroup<kCfg>::consumer;
  using Q = SwizzledTile<kConsumerRows, kCfg.head_dim>;
  RingPosition<kCfg.q_stages> q;
  RingPosition<kWorkTilesAhead> tile_at;
  RingPosition<kCfg.k_stages> k;  // of the next S = Q K^T
  RingPosition<kCfg.v_stages> v;  // of the next O += P V
  TileBounds<kCfg> bounds;

  TESSERA_DEVICE KvCursor(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared, int consumer)
      : ConsumerGroup<kCfg>(p, shared, consumer) {
    q.advance(consumer);
  }

  TESSERA_DEVICE bool at_last_block() const { return bounds.block == bounds.last; }
  TESSERA_DEVICE bool before_last_block() const { return bounds.block < bounds.last; }
  // Advances to the next block and waits for its K.
  TESSERA_DEVICE void next_block() {
    ++bounds.block;
    wait_k();
  }

  // ---- with a block mask: the entries of the work tile's list, instead of first ... last ----

  int listed;  // remaining entries, from the ring's next K on
  // Advances to the next block that this consumer's rows see and waits for its K; false: the list has none. Blocks
  // before it, which only other consumers see, are skipped: K at once, V after the P V that waits for an earlier stage.
  // After kMostUnseenV skipped blocks the next one is multiplied although it is masked completely. So is the last block
  // of a list if these rows see none of them, because each work tile needs a first block.
  static constexpr int kMostUnseenV = most_unseen_v(kCfg.consumers, kCfg.k_stages, kCfg.v_stages, kCfg.q_stages);
  TESSERA_DEVICE bool next_listed(bool first) {
    for (; listed > 0; --listed) {
      wait_k();
      const int entry = this->entry();
      if (!list_hides(entry, consumer) || bounds.unseen_v == kMostUnseenV || (first && listed == 1)) {
        --listed;
        bounds.block = list_block<kCfg.program_lists()>(entry);
        return true;
      }
      release_k();
      ++bounds.unseen_v;
    }
    return false;
  }
  TESSERA_DEVICE int entry() const { return uniform(shared.k_entries.of[k.stage()]); }
  // Whether the mask hides the block, whose K is not released yet, from this consumer's rows. It shows the block to
  // other consumers.
  TESSERA_DEVICE bool hides_block() const {
    if constexpr (kCfg.block_mask) return list_hides(entry(), consumer);
    return false;
  }

  // With lists of a program: whether its mask shows these rows all of the block, whose K is not released yet.
  TESSERA_DEVICE bool shows_block() const { return list_is_full(entry(), consumer); }

  TESSERA_DEVICE const WorkTile<kCfg>& tile() const { return shared.work_tiles[tile_at.stage()]; }
  // The query of one of a lane's two rows: row lane / 4 of the warp's 16 rows, or lane / 4 + 8.
  TESSERA_DEVICE int query(const WorkTile<kCfg>& tile, int lane, int half) const {
    return query_of_row<kCfg>(p, tile.row0 + consumer * kConsumerRows + warp_row() + half * 8 + lane / 4);
  }

  // Advances to the next work tile in which this consumer's rows see keys, and to their first block, and waits for its
  // K. Tiles in which they see none are finished on the way. Returns false if there is no further tile or, with
  // `pending`, if the next tile is one to be skipped: its V cannot be released while a P V of the previous tile waits
  // for an earlier stage.
  TESSERA_DEVICE bool next_tile(bool pending) {
    // Skips the blocks after this consumer's last one. kv_rings_cannot_deadlock allows for K being released here and V
    // only later. With a block mask next_listed has skipped them.
    if constexpr (!kCfg.block_mask) {
      for (bounds.unseen_v = bounds.end - 1 - bounds.last; bounds.end - 1 > bounds.last; --bounds.end) skip_k();
    }
    while (true) {
      shared.q_ring.wait_full(q);
      const WorkTile<kCfg>& next = tile();
      const int count = uniform(next.count), end = uniform(next.last);
      if (count < 0) return false;
      int first = uniform(next.first);
      if (count > consumer * kConsumerRows && first < end) {
        if constexpr (!kCfg.varying_tile_cost) {
          for (const int mine = uniform(next.first_of[consumer]); first < mine; ++first) {
            skip_k();
            if (pending) {
              ++bounds.unseen_v;
            } else {
              skip_v();
            }
          }
          bounds.full_first = uniform(next.full_first_of[consumer]);
        }
        bounds.block = first, bounds.last = uniform(next.last_of[consumer]), bounds.end = end;
        bounds.full_last = uniform(next.full_last_of[consumer]);
        if (kCfg.varlen && p.cu_seqlens_q && count < (consumer + 1) * kConsumerRows) {
          clear_q(count - consumer * kConsumerRows);
        }
        if constexpr (kCfg.block_mask) {
          listed = end;
          next_listed(true);
          if (!pending) skip_unseen_v();
        } else {
          wait_k();
        }
        return true;
      }
      if (pending) return false;
      for (; first < end; ++first) skip_k(), skip_v();
      if (count > consumer * kConsumerRows) store_unseen_rows(*this, next, consumer * kConsumerRows + warp_row());
      release_q();
      release_tile();
    }
  }

  // The consumers of 8-bit elements pass the blocks of K in turn, so that the softmax of one overlaps with the products
  // of another: one turn a block each, skipped blocks included. The last consumer opens the first one's first turn.
  static constexpr bool kTurns = kCfg.dtype == Dtype::kFloat8E4M3;
  TESSERA_DEVICE void open_turns() {
    if (consumer == kCfg.consumers - 1) end_turn();
  }
  TESSERA_DEVICE void begin_turn() {
    if constexpr (kTurns) ptx::barrier_sync(kTurnBarrier + consumer, 2 * 128);
  }
  TESSERA_DEVICE void end_turn() {
    if constexpr (kTurns) {
      const int next = consumer == kCfg.consumers - 1 ? 0 : consumer + 1;
      ptx::barrier_arrive(kTurnBarrier + next, 2 * 128);
    }
  }

  TESSERA_DEVICE void wait_k() { shared.k_ring.wait_full(k); }
  TESSERA_DEVICE void wait_v() { shared.v_ring.wait_full(v); }
  TESSERA_DEVICE void release_k() {
    shared.k_ring.release(k);
    k.advance();
  }
  TESSERA_DEVICE void release_v() {
    shared.v_ring.release(v);
    v.advance();
  }
  TESSERA_DEVICE void skip_k() {
    begin_turn();
    wait_k();
    release_k();
    end_turn();
  }
  TESSERA_DEVICE void skip_v() {
    wait_v();
    release_v();
  }
  TESSERA_DEVICE void skip_unseen_v() {
    for (; bounds.unseen_v > 0; --bounds.unseen_v) skip_v();
  }
  TESSERA_DEVICE void release_q() {
    shared.q_ring.release(q);
    q.advance(kCfg.consumers);
  }
  TESSERA_DEVICE void release_tile() {
    shared.tile_ring.release(tile_at);
    tile_at.advance();
  }

  // Clears rows from `first` on of a tile in shared memory, before this consumer's products read them. Other consumers
  // that use the tile write the same zeros.
  template <class Tile>
  TESSERA_DEVICE void clear_from(uint32 base, int first) {
    constexpr int kRowWords = Tile::kChunks * 8;  // of 16 bytes
    for (int word = first * kRowWords + static_cast<int>(not_hoisted(threadIdx.x % 128));
         word < Tile::kRows * kRowWords; word += 128) {
      ptx::st_shared_zero_16(Tile::at(base, word / kRowWords, word % kRowWords * 8));
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kClearedBarrier + consumer, 128);
  }

 private:
  // In a packed tensor the rows after a sequence's last are the next sequence's.
  TESSERA_DEVICE void clear_q(int count) { clear_from<Q>(shared_address(shared.sQ[q.stage()].data), count); }
};

}  // namespace tessera
