// Q, K and V: global -> shared memory by bulk copies (TMA), one for each tile, on Hopper and later. cp.async uses the
// same path to shared memory as ldmatrix; a bulk copy does not.
#pragma once

#include "tessera/fwd_sm80/block.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/pipeline.cuh"

namespace tessera {

// Called by one thread: copies rows of Q, K or V, of one head, from column col on, into a tile; the bytes count at
// barrier `full`. A box's rows are as long as the tile's rows with their padding. The padding is outside the tensor and
// becomes zero, and so do rows past the tensor's last; rows past the sequence's last hold whatever memory holds.
template <class Tile>
TESSERA_DEVICE void copy_rows(Tile& sTile, const Barrier& full, const TensorMap& map, int col, int row, int head,
                              int batch) {
  ptx::cp_async_bulk_tensor_4d(shared_address(sTile.data), &map, full.address(), col / 2, row, head, batch);
}

// Called by one thread: copies keys of K or V, from key `first` and column `col` on, into a tile, and arrives at its
// barrier.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void copy_keys(Tile& sTile, const Barrier& full, const FwdSm80BulkParams& p, const TensorMap& map,
                              const FwdBlock<kCfg>& b, int first, int col) {
  ptx::mbarrier_arrive_expect_tx(full.address(), sizeof(Tile));
  copy_rows(sTile, full, map, col, b.s.k_begin + first, b.head_kv, p.cu_seqlens_k ? 0 : b.work.batch);
}

// Called by one thread: copies the block's queries, if their order in memory is the tile's. Their bytes count at a
// barrier at which copy_keys is still to arrive.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void copy_queries(Tile& sQ, const Barrier& full, const FwdSm80BulkParams& p, const FwdBlock<kCfg>& b) {
  ptx::mbarrier_expect_tx(full.address(), sizeof(Tile));
  copy_rows(sQ, full, p.q_map, 0, b.s.q_begin + b.row0, b.work.head, p.cu_seqlens_q ? 0 : b.work.batch);
}

}  // namespace tessera
