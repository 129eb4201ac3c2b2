// The non-empty work tiles of a packed batch, whose lengths only the GPU knows. The config is fixed when the kernel is
// compiled, the params are read at run time.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/work_order.hpp"

namespace tessera {

// In the workspace. Sequence b owns the work tiles first[b] ... first[b + 1] - 1, none of them empty.
struct LiveTiles {
  int counter;      // dynamic scheduler: the number of claimed tiles
  WorkOrder order;  // of the non-empty tiles
  TESSERA_HOST_DEVICE int* first() { return reinterpret_cast<int*>(this + 1); }  // [batch + 1]
  TESSERA_HOST_DEVICE const int* first() const { return reinterpret_cast<const int*>(this + 1); }
};
TESSERA_HOST_DEVICE constexpr int64 live_tiles_bytes(int64 batch) {
  return static_cast<int64>(sizeof(LiveTiles)) + (batch + 1) * 4;
}

struct LiveTilesConfig {
  int rows;  // query rows of a work tile
};
TESSERA_CONFIG_FIELDS(LiveTilesConfig, rows)

inline constexpr int kLiveTilesThreads = 1024;  // of its one block

struct LiveTilesParams : ProblemParams {
  WorkOrder order;  // heads and sections are final; the tiles are an upper bound for all lengths
  LiveTiles* tiles;
};

}  // namespace tessera
