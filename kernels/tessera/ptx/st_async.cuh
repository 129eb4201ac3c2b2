// Stores to another block's shared memory that complete on a barrier there.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// Stores 16 bytes, which count towards `barrier`. Both addresses are from mapa() for the same block of the cluster.
TESSERA_DEVICE void st_async_v4_b32(uint32 shared, const uint32 (&x)[4], uint32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(shared),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
      : "memory");
}

// Copies `bytes` of this block's shared memory to another block's, where they count towards `barrier`.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
TESSERA_DEVICE void cp_async_bulk_shared_cluster(uint32 to, uint32 from, int bytes, uint32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace tessera::ptx
