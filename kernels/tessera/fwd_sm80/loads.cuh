// Q, K and V: global -> shared memory, by cp.async, from tensors or by page table, or by bulk copies (TMA).
#pragma once

#include "tessera/fwd_sm80/shared.cuh"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// ---- cp.async -------------------------------------------------------------------------------------------------------

template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void load_queries(Tile& sQ, const FwdSm80Params& p, const FwdBlock<kCfg>& b) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const char* base = static_cast<const char*>(p.q.data) + p.q.batch * b.work.batch * kBytes;
  if constexpr (!kCfg.pack_gqa) {
    base += (p.q.row * (static_cast<int64>(b.s.q_begin) + b.row0) + p.q.head * b.work.head) * kBytes;
    load_tile_strided<kCfg.aligned, kCfg.warps * 32>(sQ, b.count, p.head_dim * kBytes, base, p.q.row * kBytes);
    return;
  }
  load_tile<kCfg.aligned, kCfg.warps * 32>(sQ, b.count, p.head_dim * kBytes, [&](int row) {
    const int64 query = b.s.q_begin + b.map.query(b.row0 + row);
    return base + (p.q.row * query + p.q.head * b.map.head(b.row0 + row)) * kBytes;
  });
}

// The address of keys of K or V from key `first` and column `col` on; not for pages.
template <int kBytes, FwdSm80Config kCfg>
TESSERA_DEVICE const char* key_rows(const FwdSm80Params& p, const RowTensor& tensor, const FwdBlock<kCfg>& b, int first,
                                    int col) {
  const char* base = static_cast<const char*>(tensor.data) + (tensor.head * b.head_kv + col) * kBytes;
  return base + (tensor.batch * b.work.batch + tensor.row * (static_cast<int64>(b.s.k_begin) + first)) * kBytes;
}

// Loads keys of K or V, from key `first` and column `col` on, into a tile.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void load_keys(Tile& sTile, const FwdSm80Params& p, const RowTensor& tensor, const FwdBlock<kCfg>& b,
                              int first, int col, int columns) {
  constexpr int kBytes = Tile::kElemBytes;
  const int count = min(b.s.sk - first, kCfg.block_n);
  if constexpr (kCfg.paged) {
    const char* base = static_cast<const char*>(tensor.data) + (tensor.head * b.head_kv + col) * kBytes;
    const int* const pages = pages_of(p, b.s, b.work.batch);
    load_tile_scattered<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes, base, [&](int row) {
      const int key = min(first + row, b.s.sk - 1);
      const int page = pages[p.keys.table_col * (key / p.keys.page_size)];
      return (tensor.batch * clamp(page, 0, p.keys.pages - 1) + tensor.row * (key % p.keys.page_size)) * kBytes;
    });
  } else {
    load_tile_strided<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes,
                                                     key_rows<kBytes>(p, tensor, b, first, col), tensor.row * kBytes);
  }
}

// ---- bulk copies ----------------------------------------------------------------------------------------------------
//
// One bulk copy for each tile, on Hopper and later. cp.async uses the
// same path to shared memory as ldmatrix; a bulk copy does not.

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
  copy_rows(sTile, full, map, col, b.s.k_begin + first, b.head_kv, p.keys.begins ? 0 : b.work.batch);
}

// Called by one thread: copies the block's queries, if their order in memory is the tile's. Their bytes count at a
// barrier at which copy_keys is still to arrive.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void copy_queries(Tile& sQ, const Barrier& full, const FwdSm80BulkParams& p, const FwdBlock<kCfg>& b) {
  ptx::mbarrier_expect_tx(full.address(), sizeof(Tile));
  copy_rows(sQ, full, p.q_map, 0, b.s.q_begin + b.row0, b.work.head, p.cu_seqlens_q ? 0 : b.work.batch);
}

}  // namespace tessera
