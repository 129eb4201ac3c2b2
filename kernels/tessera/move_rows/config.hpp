// move_rows/kernel.cuh: copies or adds rows of a tensor. The config is fixed when the kernel is compiled, the params
// are read at run time; the host fills in both.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// See move_rows/kernel.cuh.
struct MoveRowsConfig {
  Dtype from, to;
  bool add;      // to += from, `to` is float32; otherwise to = from
  bool aligned;  // kMoveRowsWidth neighbouring columns of both begin at multiples of their size
};
TESSERA_CONFIG_FIELDS(MoveRowsConfig, from, to, add, aligned)

inline constexpr int kMoveRowsThreads = 256;
inline constexpr int kMoveRowsWidth = 8;
TESSERA_HOST_DEVICE constexpr int move_rows_width(const MoveRowsConfig& c) { return c.aligned ? kMoveRowsWidth : 1; }

struct MoveRowsParams {
  RowTensor from, to;
  Divisor vectors, heads, rows;  // vectors: move_rows_width() columns, of a head
  int units;                     // vectors of all heads, rows and batches
};

}  // namespace tessera
