// The work tiles of a packed batch that have rows, which only the GPU knows. Config: fixed when the kernel is compiled; params: read at
// run time.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/work_order.hpp"

namespace tessera {

// In the workspace. Sequence b has slots first[b] ... first[b + 1] - 1, a work tile each, none of them empty.
struct LiveTiles {
  int counter;      // dynamic scheduler: how many are taken
  WorkOrder order;  // of the slots that there are
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
  WorkOrder order;  // its heads and sections; of slots for whatever lengths
  LiveTiles* tiles;
};

}  // namespace tessera
