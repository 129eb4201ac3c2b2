// What fwd_sm90 keeps in shared memory, and the threads that fill it: rings of tiles of Q, K and V, by TMA. Each runs ahead
// of the consumers as far as its ring goes, over the works' borders too.
#pragma once

#include "tessera/core/fwd_work.cuh"
#include "tessera/core/pipeline.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

template <FwdSm90Config kCfg>
struct FwdSm90SharedMemory {
  static constexpr int kWorks = kCfg.q_stages / kCfg.consumers + 2;  // whose Q is there, and one more
  SwizzledTile<64, kCfg.head_dim> sQ[kCfg.q_stages];                 // consumer after consumer, work after work
  SwizzledTile<kCfg.block_n, kCfg.head_dim> sK[kCfg.k_stages];
  SwizzledTile<kCfg.block_n, kCfg.head_dim_v> sV[kCfg.v_stages];
  FwdWork<kCfg> work[kWorks];
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

// visit(index) for this block's works in their order.
template <FwdSm90Config kCfg, class Visit>
TESSERA_DEVICE void for_each_work(const FwdSm90Params& p, const Visit& visit) {
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if constexpr (kCfg.causal) {
    BlockWorks at(p.order, block, blocks);
    for (; at.work < works_of(p.order); at.advance(p.order, block, blocks)) visit(at.work);
  } else {
    for (int index = block; index < works_of(p.order); index += blocks) visit(index);
  }
}

// Queries, a consumer's after the other's, and which work they belong to: written in place, as registers are few here.
template <FwdSm90Config kCfg>
TESSERA_DEVICE void produce_queries(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared) {
  RingPosition<kCfg.q_stages> at;
  RingPosition<FwdSm90SharedMemory<kCfg>::kWorks> work_at;
  const auto publish = [&](const FwdWork<kCfg>& work) {
    const int bytes = work.count > 0 && work.first < work.last ? shared.sQ[0].kBytes : 0;
#pragma unroll 1
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      shared.q.wait_empty(at);
      ptx::mbarrier_arrive_expect_tx(shared.q.full[at.stage].address(), bytes);
      if (bytes > 0) {
        copy_tile(shared.sQ[at.stage], &p.q_map, shared.q.full[at.stage].address(),
                  work.s.q_begin + work.row0 + consumer * 64, work.head, p.cu_seqlens_q ? 0 : work.batch);
      }
      at.advance();
    }
    work_at.advance();
  };
  for_each_work<kCfg>(p, [&](int index) {
    // The slot's last user is done, since the queries after his were let go.
    shared.q.wait_empty(at);
    FwdWork<kCfg>& work = shared.work[work_at.stage];
    work.open(p, index);
    if (work.count == 0) return;
    work.share_out(p);
    publish(work);
  });
  shared.q.wait_empty(at);
  FwdWork<kCfg>& end = shared.work[work_at.stage];
  end.count = FwdWork<kCfg>::kEnd;
  publish(end);
}

// Keys, or values.
template <FwdSm90Config kCfg, int kStages, class Tile>
TESSERA_DEVICE void produce_keys(const FwdSm90Params& p, Ring<kStages, kCfg.cluster>& ring, Tile (&sTiles)[kStages],
                                 const TensorMap* map) {
  RingPosition<kStages> at;
  for_each_work<kCfg>(p, [&](int index) {
    FwdWork<kCfg> work;
    work.open(p, index);
    if (work.count == 0) return;
    for (int block = work.first; block < work.last; ++block) {
      ring.acquire(at, Tile::kBytes);
      copy_tile<kCfg.cluster>(sTiles[at.stage], map, ring.full[at.stage].address(),
                              work.s.k_begin + block * kCfg.block_n, work.head / p.group,
                              p.cu_seqlens_k ? 0 : work.batch);
      at.advance();
    }
  });
}

// The same by page table, by a warp: a block of keys is so many boxes, each of some rows of one page, and each lane
// brings one. It reads the next block's entry of the table before it waits for the stage, so that the way to memory and
// the wait are one. `full` counts the bytes of all boxes, so that no lane can be a round ahead of another.
//
// A box that starts at the sequence's end or behind it is asked for behind the end of a page, where TMA finds zeros:
// what the table holds there is not read. Behind the end within a box stands what the page holds; as with any seqused_k,
// without which there are no pages, consumers mask it in K and clear it in V. A page that is not there is read as the
// nearest.
template <FwdSm90Config kCfg, int kStages, class Tile>
TESSERA_DEVICE void produce_pages(const FwdSm90Params& p, Ring<kStages, kCfg.cluster>& ring, Tile (&sTiles)[kStages],
                                  const TensorMap* map) {
  constexpr int kBoxes = kCfg.block_n / kCfg.page_rows;
  static_assert(kBoxes * kCfg.page_rows == kCfg.block_n && kBoxes <= 32, "a lane for each box");
  static_assert(kCfg.page_rows % 8 == 0, "the swizzle repeats every 8 rows");
  static_assert(kCfg.cluster == 1, "every block for itself");
  const int lane = static_cast<int>(threadIdx.x % 32), my_row = lane * kCfg.page_rows;
  if (lane >= kBoxes) return;
  RingPosition<kStages> at;
  for_each_work<kCfg>(p, [&](int index) {
    FwdWork<kCfg> work;
    work.open(p, index);
    if (work.count == 0) return;
    const int* table = p.page_table + p.page_table_batch * work.batch;
    const int head = work.head / p.group;
    int page, row;  // of my box in the next block
    const auto find = [&](int block) {
      const uint32 key = block * kCfg.block_n + my_row, size = p.page_size, sk = work.s.sk;
      page = 0, row = p.page_size;
      if (key < sk) page = table[p.page_table_col * (key / size)], row = key % size;
    };
    find(work.first);
    for (int block = work.first; block < work.last; ++block) {
      ring.wait_empty(at);
      const uint32 full = ring.full[at.stage].address();
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        const uint32 to = shared_address(sTiles[at.stage].data) + chunk * Tile::kChunkBytes + my_row * kChunkRowBytes;
        ptx::cp_async_bulk_tensor_4d(to, map, full, chunk * kChunkCols, row, head, clamp(page, 0, p.pages - 1));
      }
      find(block + 1);
      at.advance();
    }
  });
}

}  // namespace tessera
