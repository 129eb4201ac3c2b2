// What a persistent block of fwd_sm80 and fwd_sm80_pairs works on.
#pragma once

#include "tessera/core/fwd_block.cuh"
#include "tessera/core/work_order.hpp"

namespace tessera {

// The works of a persistent block, by their index in query_tile's order.
template <FwdConfig kCfg>
struct FwdWorks {
  BlockWorks works;
  int index;  // -1: no more

  TESSERA_DEVICE explicit FwdWorks(const FwdParams& p)
      : works(p.order, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)) {
    find(p);
  }
  TESSERA_DEVICE void advance(const FwdParams& p) {
    works.advance(p.order, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    find(p);
  }

 private:
  // From here on the first that is one: a packed batch has slots without rows.
  TESSERA_DEVICE void find(const FwdParams& p) {
    for (; works.work < works_of(p.order); works.advance(p.order, static_cast<int>(blockIdx.x), gridDim.x)) {
      const WorkPlace place = work_place(p.order, works.work);
      index = place.head * p.order.tiles + place.slot;
      if (!p.cu_seqlens_q || FwdBlock<kCfg>(p, index).work.tile >= 0) return;
    }
    index = -1;
  }
};

}  // namespace tessera
