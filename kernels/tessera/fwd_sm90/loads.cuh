// The producer warpgroup of fwd_sm90: one thread is the tile scheduler, and three load Q, K and V by TMA. Each runs
// ahead of the consumers as far as its ring allows, across the borders of work tiles.
#pragma once

#include "tessera/fwd_sm90/config.hpp"
#include "tessera/fwd_sm90/shared.cuh"
#include "tessera/ptx/async_copy.cuh"

namespace tessera {

// row, head, batch: the coordinates after the column, in the map's order.
// kBlocks > 1: every block of the cluster receives the tile; this block multicasts its part of the chunks to all.
template <int kBlocks = 1, class Tile>
TESSERA_DEVICE void copy_tile(Tile& sTile, const TensorMap* map, uint32 barrier, int row, int head, int batch) {
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
    const uint32 to = shared_address(sTile.data) + chunk * Tile::kChunkBytes;
    if constexpr (kBlocks == 1) {
      ptx::cp_async_bulk_tensor_4d(to, map, barrier, chunk * kChunkCols, row, head, batch);
    } else if (chunk % kBlocks == static_cast<int>(ptx::cluster_ctarank())) {
      ptx::cp_async_bulk_tensor_4d_multicast(to, map, barrier, chunk * kChunkCols, row, head, batch,
                                             (1 << kBlocks) - 1);
    }
  }
}

// The tile scheduler: computes this block's work tiles in order. To decode one takes hundreds of instructions, with
// divisions and, in packed batches, a binary search; nothing else waits for this thread.
//
// Static: the tiles of a block are a function of its index. Dynamic (packed batches, whose lengths only the GPU knows):
// blocks claim tiles from p.tile_counter. A first pass over all indices claims the long tiles, a second one the short
// tiles, several at once, so that the grid ends with short tiles (LPT). With a block mask of dense sequences, whose
// lists are made by the GPU too, there is one pass; but if a few lists are long among short ones, each block first
// processes the long tiles among every gridDim.x-th tile. The next tile is claimed two tiles ahead: the latest point at
// which its loads are still hidden.
template <FwdSm90Config kCfg>
TESSERA_DEVICE void schedule_tiles(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared) {
  using Tile = WorkTile<kCfg>;
  constexpr int kShortTilesAClaim = 4;
  RingPosition<kWorkTilesAhead> at;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const bool claims = !kCfg.merges() && (kCfg.varlen || kCfg.block_mask) && p.tile_counter;
  // Not kept in a register.
  const auto tiles = [&] { return work_tiles(kCfg.varlen && claims ? Tile::order_of(p) : p.order); };
  const auto claim = [&] {
    auto last_but_one = at;  // the stage before the one that the tile after the next will use
    last_but_one.advance(2);
    shared.tile_ring.wait_empty(last_but_one);
    return atomicAdd(p.tile_counter, 1);
  };
  BlockTiles mine(p.order, block, blocks);
  if constexpr (!kCfg.varying_tile_cost) mine.index = block;
  // Packed batches that claim: the last index, and the end of the claimed ones of the second pass; 0: the first pass.
  if (kCfg.varlen && claims) mine.index = mine.step = 0;
  // Lists: the first pass's next index.
  [[maybe_unused]] bool long_first = false, has_part = false;
  [[maybe_unused]] int long_index = tiles();
  if constexpr (kCfg.block_mask && !kCfg.varlen) {
    const bool ordered = kCfg.orders_lists() && orders_tiles(p.lists);  // the longest are first anyway
    long_first = claims && !ordered && *p.long_lists > 0 && *p.long_lists <= p.most_long_lists;
    if (long_first) long_index = block;
  }
  // Each pass takes its index here, so that the code that decodes a tile, most of this thread's, is compiled once.
  while (true) {
    int index = mine.index;
    if constexpr (kCfg.merges()) {  // a part a block
      if (has_part) break;
      index = block, has_part = true;
    } else if (!claims) {
      if (index >= tiles()) break;
      if constexpr (kCfg.varying_tile_cost) {
        mine.advance(p.order, block, blocks);
      } else {
        mine.index += blocks;
      }
    } else if constexpr (kCfg.varlen) {
      if (++index >= mine.step) {
        index = claim(), mine.step = 0;
        if (index >= tiles()) {
          index = (index - tiles()) * kShortTilesAClaim;
          if (index >= tiles()) break;
          mine.step = min(index + kShortTilesAClaim, tiles());
        }
      }
      mine.index = index;
    } else if constexpr (kCfg.block_mask) {
      const bool of_first_pass = long_index < tiles();
      index = of_first_pass ? long_index : claim();
      if (of_first_pass) long_index += blocks;
      if (index >= tiles()) break;
      if (long_first && Tile::is_long(p, index) != of_first_pass) continue;
    }
    shared.tile_ring.wait_empty(at);
    Tile& tile = shared.work_tiles[at.stage()];  // decoded in place: the producer has few registers
    tile.decode(p, index);
    if (tile.count == 0) continue;
    if constexpr (kCfg.varlen) {
      if (claims && (tile.last - tile.first > p.short_tile_blocks) != (mine.step == 0)) continue;
    }
    tile.set_consumer_bounds(p);
    ptx::mbarrier_arrive(shared.tile_ring.full[at.stage()].address());
    at.advance();
  }
  shared.tile_ring.wait_empty(at);
  shared.work_tiles[at.stage()].count = WorkTile<kCfg>::kEnd;
  ptx::mbarrier_arrive(shared.tile_ring.full[at.stage()].address());
}

// Loads Q, one consumer's rows after another's. After the last work tile the ring's stages are completed empty, because
// the consumers wait only for Q and must then read that there is no further tile.
template <FwdSm90Config kCfg>
TESSERA_DEVICE void load_q(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared) {
  RingPosition<kCfg.q_stages> at;
  RingPosition<kWorkTilesAhead> tile_at;
  bool more = true;
  while (more) {
    shared.tile_ring.wait_full(tile_at);
    const WorkTile<kCfg>& tile = shared.work_tiles[tile_at.stage()];
    more = tile.count > 0;
    const int bytes = more && tile.first < tile.last ? shared.sQ[0].kBytes : 0;
#pragma unroll 1
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      shared.q_ring.acquire(at, bytes);
      if (bytes > 0) {
        const int query = tile.s.q_begin + query_of_row<kCfg>(p, tile.row0 + consumer * kConsumerRows);
        const uint32 full = shared.q_ring.full[at.stage()].address();
        if constexpr (kCfg.pack_gqa) {
          copy_tile(shared.sQ[at.stage()], &p.q_map, full, tile.head * p.group.value, query, tile.q_batch(p));
        } else {
          copy_tile(shared.sQ[at.stage()], &p.q_map, full, query, tile.head, tile.q_batch(p));
        }
      }
      at.advance();
    }
    shared.tile_ring.release_alone(tile_at);
    tile_at.advance();
  }
}

// With lists: the entries of a work tile's list or, if that was not made, of the blocks that are visible by position.
template <FwdSm90Config kCfg, bool kListed = kCfg.block_mask>
struct TileBlocks {
  ListHead list;
  int first_block;
  TESSERA_DEVICE TileBlocks(const FwdSm90Params& p, const WorkTile<kCfg>& tile)
      : list(list_head<kCfg.program_lists()>(p.lists, tile.list(p))), first_block(tile.first_visible_block()) {}
  TESSERA_DEVICE int entry(int n) const {
    if (kCfg.program_lists() && list.count == kListNotMade) return unlisted_entry(first_block, n);
    return list.entries[n];
  }
  TESSERA_DEVICE static int block(int entry) { return list_block<kCfg.program_lists()>(entry); }
};
// Without lists an entry is a block's number.
template <FwdSm90Config kCfg>
struct TileBlocks<kCfg, false> {
  TESSERA_DEVICE TileBlocks(const FwdSm90Params&, const WorkTile<kCfg>&) {}
  TESSERA_DEVICE static int entry(int n) { return n; }
  TESSERA_DEVICE static int block(int entry) { return entry; }
};

// Loads K, or V: all blocks that a work tile sees.
template <FwdSm90Config kCfg, bool kIsK, int kStages, class Tile>
TESSERA_DEVICE void load_kv(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared,
                            Ring<kStages, kCfg.cluster>& ring, Tile (&sTiles)[kStages], const TensorMap* map) {
  RingPosition<kStages> at;
  RingPosition<kWorkTilesAhead> tile_at;
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const WorkTile<kCfg>& tile = shared.work_tiles[tile_at.stage()];
    if (tile.count < 0) return;
    const int first = tile.first, last = tile.last, head = kCfg.pack_gqa ? tile.head : tile.head / p.group,
              begin = tile.s.k_begin;
    const int batch = tile.k_batch(p);
    if constexpr (kCfg.block_mask) {
      const TileBlocks<kCfg> blocks(p, tile);
      shared.tile_ring.release_alone(tile_at);
      tile_at.advance();
      int entry = last > 0 ? blocks.entry(0) : 0;
      for (int n = 0; n < last; ++n) {
        const int next = n + 1 < last ? blocks.entry(n + 1) : 0;  // loaded by the time the stage is free
        ring.wait_empty(at);
        // Before the arrival that makes it visible to consumers.
        if constexpr (kIsK) shared.k_entries.of[at.stage()] = entry;
        ring.expect(at, Tile::kBytes);
        const int key0 = blocks.block(entry) * kCfg.block_n;
        copy_tile(sTiles[at.stage()], map, ring.full[at.stage()].address(), kCfg.varlen ? begin + key0 : key0, head,
                  batch);
        at.advance();
        entry = next;
      }
      continue;
    }
    shared.tile_ring.release_alone(tile_at);
    tile_at.advance();
    for (int block = first; block < last; ++block) {
      ring.acquire(at, Tile::kBytes);
      copy_tile<kCfg.cluster>(sTiles[at.stage()], map, ring.full[at.stage()].address(), begin + block * kCfg.block_n,
                              head, batch);
      at.advance();
    }
  }
}

// The same by page table, by a warp. A K/V block is block_n / page_rows boxes, each of page_rows rows of one page, and
// each lane loads one box. It looks up its page of the next block before it waits for that block's stage, so that the
// two latencies overlap. The full barrier counts the bytes of all boxes, so no lane can be a round ahead of another.
//
// A box that starts at or after the sequence's end is loaded from past the end of a page, where TMA fills in zeros: the
// page table is not read for it. The box that contains the sequence's end also loads the page's rows after it; as with
// any seqused_k, which every paged call has, consumers mask them in K and clear them in V. A page index out of range is
// clamped.
template <FwdSm90Config kCfg, bool kIsK, int kStages, class Tile>
TESSERA_DEVICE void load_kv_pages(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared,
                                  Ring<kStages, kCfg.cluster>& ring, Tile (&sTiles)[kStages], const TensorMap* map) {
  constexpr int kBoxes = kCfg.block_n / kCfg.page_rows;
  static_assert(kBoxes * kCfg.page_rows == kCfg.block_n && kBoxes <= 32, "a lane for each box");
  static_assert(kCfg.page_rows % 8 == 0, "the swizzle repeats every 8 rows");
  static_assert(kCfg.cluster == 1, "pages are not multicast");
  constexpr uint32 kLanes = kBoxes == 32 ? ~0u : (1u << kBoxes) - 1;
  const int lane = static_cast<int>(threadIdx.x % 32), my_row = lane * kCfg.page_rows;
  if (lane >= kBoxes) return;
  RingPosition<kStages> at;
  RingPosition<kWorkTilesAhead> tile_at;
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const WorkTile<kCfg>& tile = shared.work_tiles[tile_at.stage()];
    if (tile.count < 0) return;
    const int first = tile.first, last = tile.last, head = kCfg.pack_gqa ? tile.head : tile.head / p.group;
    const uint32 sk = tile.s.sk;
    const int* table = pages_of(p, tile.s, tile.batch);
    const TileBlocks<kCfg> blocks(p, tile);
    __syncwarp(kLanes);  // every lane has read the work tile
    if (lane == 0) shared.tile_ring.release_alone(tile_at);
    tile_at.advance();
    int page, row;  // of this lane's box in the next block
    const auto look_up = [&](int block) {
      const uint32 key = block * kCfg.block_n + my_row;
      const int of_sequence = static_cast<int>(key) / p.page;
      page = 0, row = p.page.value;
      if (key < sk) page = table[p.keys.table_col * of_sequence], row = key - of_sequence * p.page.value;
    };
    int entry = !kCfg.block_mask || first < last ? blocks.entry(first) : 0;
    look_up(blocks.block(entry));
    for (int n = first; n < last; ++n) {
      const int next = !kCfg.block_mask || n + 1 < last ? blocks.entry(n + 1) : 0;
      ring.wait_empty(at);
      if constexpr (kCfg.block_mask && kIsK) {  // before the arrival that makes it visible to consumers
        if (lane == 0) shared.k_entries.of[at.stage()] = entry;
      }
      const uint32 full = ring.full[at.stage()].address();
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        const uint32 to = shared_address(sTiles[at.stage()].data) + chunk * Tile::kChunkBytes + my_row * kChunkRowBytes;
        ptx::cp_async_bulk_tensor_4d(to, map, full, chunk * kChunkCols, row, head, clamp(page, 0, p.keys.pages - 1));
      }
      look_up(blocks.block(next));
      entry = next;
      at.advance();
    }
  }
}

}  // namespace tessera
