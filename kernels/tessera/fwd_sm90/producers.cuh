// What fwd_sm90 keeps in shared memory, and the threads that fill it: one says what the works are, three bring tiles of Q, K
// and V, by TMA. Each runs ahead of the consumers as far as its ring goes, over the works' borders too.
#pragma once

#include "tessera/fwd_sm90/config.hpp"
#include "tessera/fwd_sm90/work_tile.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

template <FwdSm90Config kCfg>
struct FwdSm90SharedMemory {
  static constexpr int kWorks = 4;  // known ahead
  using Output = SwizzledTile<16, kCfg.o_chunks * kChunkCols>;
  SwizzledTile<64, kCfg.head_dim> sQ[kCfg.q_stages];  // consumer after consumer, work after work
  SwizzledTile<kCfg.block_n, kCfg.head_dim> sK[kCfg.k_stages];
  SwizzledTile<kCfg.block_n, kCfg.head_dim_v> sV[kCfg.v_stages];
  Output sO[kCfg.consumers * 4];  // of each warp: columns on their way out
  WorkTile<kCfg> work[kWorks];
  Ring<kWorks> works;
  Ring<kCfg.q_stages> q;
  Ring<kCfg.k_stages, kCfg.cluster> k;
  Ring<kCfg.v_stages, kCfg.cluster> v;
};

// kBlocks > 1: every block of the cluster gets the tile, and this one brings its share of the chunks to all.
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

// This block's works in their order. Opening one takes some hundreds of instructions with divisions and, in packed batches, a
// search: no other thread waits for that.
template <FwdSm90Config kCfg>
TESSERA_DEVICE void produce_works(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared) {
  RingPosition<FwdSm90SharedMemory<kCfg>::kWorks> at;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const auto open_if = [&](int index, auto&& wanted) {
    shared.works.wait_empty(at);
    WorkTile<kCfg>& work = shared.work[at.stage()];  // in place: registers are few here
    work.open(p, index);
    if (work.count == 0 || !wanted(work)) return;
    work.set_consumer_bounds(p);
    ptx::mbarrier_arrive(shared.works.full[at.stage()].address());
    at.advance();
  };
  const auto open = [&](int index) { open_if(index, [](const WorkTile<kCfg>&) { return true; }); };
  if (kCfg.uneven && p.next_work) {
    // First those that see many keys, so that the last are short; then the others, which are looked for some at a time. One
    // is taken when the last but one is done: as late as still hides the way to its tiles.
    constexpr int kAtATime = 4;
    const int works = works_of(p.order);
    const auto is_long = [&](const WorkTile<kCfg>& work) { return work.last - work.first > p.short_work; };
    while (true) {
      auto last_but_one = at;  // in whose place the next but one comes
      last_but_one.advance(2);
      shared.works.wait_empty(last_but_one);
      const int taken = atomicAdd(p.next_work, 1);
      if (taken < works) {
        open_if(taken, is_long);
        continue;
      }
      const int first = (taken - works) * kAtATime;
      if (first >= works) break;
      for (int index = first; index < min(first + kAtATime, works); ++index) {
        open_if(index, [&](const WorkTile<kCfg>& work) { return !is_long(work); });
      }
    }
  } else if constexpr (kCfg.causal) {
    BlockWorks mine(p.order, block, blocks);
    for (; mine.work < works_of(p.order); mine.advance(p.order, block, blocks)) open(mine.work);
  } else {
    for (int index = block; index < works_of(p.order); index += blocks) open(index);
  }
  shared.works.wait_empty(at);
  shared.work[at.stage()].count = WorkTile<kCfg>::kEnd;
  ptx::mbarrier_arrive(shared.works.full[at.stage()].address());
}

// Queries, a consumer's after the other's; behind the last work's, their end alone.
template <FwdSm90Config kCfg>
TESSERA_DEVICE void produce_queries(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared) {
  RingPosition<kCfg.q_stages> at;
  RingPosition<FwdSm90SharedMemory<kCfg>::kWorks> work_at;
  bool more = true;
  while (more) {
    shared.works.wait_full(work_at);
    const WorkTile<kCfg>& work = shared.work[work_at.stage()];
    more = work.count > 0;
    const int bytes = more && work.first < work.last ? shared.sQ[0].kBytes : 0;
#pragma unroll 1
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      shared.q.acquire(at, bytes);
      if (bytes > 0) {
        copy_tile(shared.sQ[at.stage()], &p.q_map, shared.q.full[at.stage()].address(),
                  work.s.q_begin + work.row0 + consumer * 64, work.head, work.q_batch(p));
      }
      at.advance();
    }
    shared.works.release_alone(work_at);
    work_at.advance();
  }
}

// Keys, or values.
template <FwdSm90Config kCfg, int kStages, class Tile>
TESSERA_DEVICE void produce_keys(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared,
                                 Ring<kStages, kCfg.cluster>& ring, Tile (&sTiles)[kStages], const TensorMap* map) {
  RingPosition<kStages> at;
  RingPosition<FwdSm90SharedMemory<kCfg>::kWorks> work_at;
  while (true) {
    shared.works.wait_full(work_at);
    const WorkTile<kCfg>& work = shared.work[work_at.stage()];
    if (work.count < 0) return;
    const int first = work.first, last = work.last, head = work.head / p.group, begin = work.s.k_begin;
    const int batch = work.k_batch(p);
    shared.works.release_alone(work_at);
    work_at.advance();
    for (int block = first; block < last; ++block) {
      ring.acquire(at, Tile::kBytes);
      copy_tile<kCfg.cluster>(sTiles[at.stage()], map, ring.full[at.stage()].address(), begin + block * kCfg.block_n,
                              head, batch);
      at.advance();
    }
  }
}

// The same by page table, by a warp: a block of keys is so many boxes, each of some rows of one page, and each lane
// brings one. It reads the next block's entry of the table before it waits for the stage, so that the way to memory and
// the wait are one. `full` counts the bytes of all boxes, so that no lane can be a round ahead of another.
//
// A box that starts at the sequence's end or behind it is fetched from past the end of a page, where TMA finds zeros:
// what the table holds there is not read. Behind the end within a box stands what the page holds; as with any seqused_k,
// without which there are no pages, consumers mask it in K and clear it in V. A page that is not there is read as the
// nearest.
template <FwdSm90Config kCfg, int kStages, class Tile>
TESSERA_DEVICE void produce_pages(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared,
                                  Ring<kStages, kCfg.cluster>& ring, Tile (&sTiles)[kStages], const TensorMap* map) {
  constexpr int kBoxes = kCfg.block_n / kCfg.page_rows;
  static_assert(kBoxes * kCfg.page_rows == kCfg.block_n && kBoxes <= 32, "a lane for each box");
  static_assert(kCfg.page_rows % 8 == 0, "the swizzle repeats every 8 rows");
  static_assert(kCfg.cluster == 1, "every block for itself");
  constexpr uint32 kLanes = kBoxes == 32 ? ~0u : (1u << kBoxes) - 1;
  const int lane = static_cast<int>(threadIdx.x % 32), my_row = lane * kCfg.page_rows;
  if (lane >= kBoxes) return;
  RingPosition<kStages> at;
  RingPosition<FwdSm90SharedMemory<kCfg>::kWorks> work_at;
  while (true) {
    shared.works.wait_full(work_at);
    const WorkTile<kCfg>& work = shared.work[work_at.stage()];
    if (work.count < 0) return;
    const int first = work.first, last = work.last, head = work.head / p.group;
    const uint32 sk = work.s.sk;
    const int* table = p.page_table + p.page_table_batch * work.batch;
    __syncwarp(kLanes);  // all have read
    if (lane == 0) shared.works.release_alone(work_at);
    work_at.advance();
    int page, row;  // of my box in the next block
    const auto find = [&](int block) {
      const uint32 key = block * kCfg.block_n + my_row, size = p.page_size;
      page = 0, row = p.page_size;
      if (key < sk) page = table[p.page_table_col * (key / size)], row = key % size;
    };
    find(first);
    for (int block = first; block < last; ++block) {
      ring.wait_empty(at);
      const uint32 full = ring.full[at.stage()].address();
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        const uint32 to = shared_address(sTiles[at.stage()].data) + chunk * Tile::kChunkBytes + my_row * kChunkRowBytes;
        ptx::cp_async_bulk_tensor_4d(to, map, full, chunk * kChunkCols, row, head, clamp(page, 0, p.pages - 1));
      }
      find(block + 1);
      at.advance();
    }
  }
}

}  // namespace tessera
