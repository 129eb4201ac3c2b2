// Q, K and V: global -> shared memory by cp.async, from tensors or by page table. fwd_sm80/bulk_copies.cuh does so by
// TMA.
#pragma once

#include "tessera/fwd_sm80/block.cuh"
#include "tessera/tile/copy_tile.cuh"

namespace tessera {

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
template <FwdSm80Config kCfg>
TESSERA_DEVICE const char* key_rows(const FwdSm80Params& p, const RowTensor& tensor, const FwdBlock<kCfg>& b, int first,
                                    int col) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const char* base = static_cast<const char*>(tensor.data) + (tensor.head * b.head_kv + col) * kBytes;
  return base + (tensor.batch * b.work.batch + tensor.row * (static_cast<int64>(b.s.k_begin) + first)) * kBytes;
}

// Loads keys of K or V, from key `first` and column `col` on, into a tile.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void load_keys(Tile& sTile, const FwdSm80Params& p, const RowTensor& tensor, const FwdBlock<kCfg>& b,
                              int first, int col, int columns) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const int count = min(b.s.sk - first, kCfg.block_n);
  if constexpr (kCfg.paged) {
    const char* base = static_cast<const char*>(tensor.data) + (tensor.head * b.head_kv + col) * kBytes;
    const int* const pages = pages_of(p, b.s, b.work.batch);
    load_tile_scattered<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes, base, [&](int row) {
      const int key = min(first + row, b.s.sk - 1);
      const int page = pages[p.page_table_col * (key / p.page_size)];
      return (tensor.batch * clamp(page, 0, p.pages - 1) + tensor.row * (key % p.page_size)) * kBytes;
    });
  } else {
    load_tile_strided<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes, key_rows(p, tensor, b, first, col),
                                                     tensor.row * kBytes);
  }
}

}  // namespace tessera
