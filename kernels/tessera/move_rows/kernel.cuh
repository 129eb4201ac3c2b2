// Moves rows of some heads from one tensor [batch, row, head, column] to another: to = from, rounded where `to` is
// shorter, or to += from. The ranks of a batch pack messages with it, and add what they receive.
//
// Grid: one thread for a vector of columns, neighbouring threads for neighbouring columns. Shared memory: none. The
// kernel is bound by memory bandwidth: an access is 16 bytes of a 16-bit type, twice that of float32.
#pragma once

#include "tessera/move_rows/config.hpp"
#include "tessera/tile/columns.cuh"

namespace tessera {

template <MoveRowsConfig kCfg>
TESSERA_DEVICE void move_rows(const MoveRowsParams& p) {
  static_assert(!kCfg.add || kCfg.to == Dtype::kFloat32, "sums are float32");
  constexpr int kWidth = move_rows_width(kCfg);
  const int unit = static_cast<int>(blockIdx.x) * kMoveRowsThreads + static_cast<int>(threadIdx.x);
  if (unit >= p.units) return;
  // 1. Which columns.
  const int of_heads = unit / p.vectors, vector = unit - of_heads * p.vectors.value;
  const int of_rows = of_heads / p.heads, head = of_heads - of_rows * p.heads.value;
  const int batch = of_rows / p.rows, row = of_rows - batch * p.rows.value;
  const auto index = [&](const RowTensor& t) {
    return t.batch * batch + t.row * row + t.head * head + static_cast<int64>(vector) * kWidth;
  };
  // 2. Move them.
  float x[kWidth];
  unpack_columns(load_columns<kCfg.from, kWidth>(p.from.data, index(p.from)), x);
  if constexpr (kCfg.add) {
    float sum[kWidth];
    unpack_columns(load_columns<kCfg.to, kWidth>(p.to.data, index(p.to)), sum);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) x[n] += sum[n];
  }
  RawColumns<kCfg.to, kWidth> raw;
  pack_columns(x, raw);
  store_columns<kCfg.to, kWidth>(p.to.data, index(p.to), raw);
}

}  // namespace tessera
