// The order in which fwd_sm90's blocks take works under a staircase: the numbers that core/work_order.hpp reads.
#pragma once

#include <cstdint>

#include "tessera/params.hpp"

namespace tessera::cuda {

struct Works {
  int64_t tiles, heads;  // as WorkOrder has them
  bool equal;            // in size
  bool packed;           // tiles are slots, and which are large is not known
  int64_t group;         // heads that share keys and values
  int64_t head_bytes;    // of these
  int64_t tile_keys;     // that a tile sees and the next smaller one does not
  int64_t fixed_keys;    // what every tile costs beside
  int64_t blocks;        // of the grid

  bool operator==(const Works&) const = default;
};

WorkOrder order_of(const Works& works);

}  // namespace tessera::cuda
