// The producers of fwd_sm90_d512: one thread loads Q and K, and another V, each the columns of its block.
#pragma once

#include "tessera/fwd_sm90_d512/shared.cuh"

namespace tessera {

template <class Tile>
TESSERA_DEVICE void load_columns(uint32 to, const TensorMap* map, uint32 full, int col, int row, int head, int batch) {
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
    ptx::cp_async_bulk_tensor_4d(to + chunk * Tile::kChunkBytes, map, full, col + chunk * kChunkCols, row, head, batch);
  }
}

template <FwdSm90D512Config kCfg>
TESSERA_DEVICE void load_q_and_k(const FwdSm90Params& p, const FwdD512Shared<kCfg>& shared, const FwdD512Tile& tile) {
  using Shared = FwdD512Shared<kCfg>;
  const int col = static_cast<int>(ptx::cluster_ctarank()) * kCfg.half_dim;
  for (int consumer = 0; consumer < kFwdD512Consumers; ++consumer) {
    const uint32 full = shared.barrier(Shared::kQFull + consumer);
    ptx::mbarrier_arrive_expect_tx(full, Shared::Rows::kBytes);
    load_columns<typename Shared::Rows>(shared.q(consumer), &p.q_map, full, col,
                                        tile.s.q_begin + tile.row0 + consumer * kConsumerRows, tile.head,
                                        tile.q_batch<kCfg>(p));
  }
  const int head = tile.head / p.group;
  typename Shared::KAt at;
  for (int block = tile.first; block < tile.last; ++block) {
    ptx::mbarrier_wait_parity(shared.barrier(Shared::kKEmpty) + at.offset, at.parity ^ 1);
    const uint32 full = shared.barrier(Shared::kKFull) + at.offset;
    ptx::mbarrier_arrive_expect_tx(full, Shared::Keys::kBytes);
    load_columns<typename Shared::Keys>(shared.k(at), &p.k_map, full, col, tile.s.k_begin + block * kCfg.block_n, head,
                                        tile.k_batch<kCfg>(p));
    at.advance();
  }
}

template <FwdSm90D512Config kCfg>
TESSERA_DEVICE void load_v(const FwdSm90Params& p, const FwdD512Shared<kCfg>& shared, const FwdD512Tile& tile) {
  using Shared = FwdD512Shared<kCfg>;
  const int col = static_cast<int>(ptx::cluster_ctarank()) * kCfg.half_dim, head = tile.head / p.group;
  typename Shared::VAt at;
  for (int block = tile.first; block < tile.last; ++block) {
    ptx::mbarrier_wait_parity(shared.barrier(Shared::kVEmpty) + at.offset, at.parity ^ 1);
    const uint32 full = shared.barrier(Shared::kVFull) + at.offset;
    ptx::mbarrier_arrive_expect_tx(full, Shared::Keys::kBytes);
    load_columns<typename Shared::Keys>(shared.v(at), &p.v_map, full, col, tile.s.k_begin + block * kCfg.block_n, head,
                                        tile.k_batch<kCfg>(p));
    at.advance();
  }
}

}  // namespace tessera
