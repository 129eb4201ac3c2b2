// Bulk copies (TMA), most of them by tensor map, and the fences between them and ordinary accesses of shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// Copies a box of a four-dimensional tensor to shared memory; its bytes count towards `barrier`. Elements outside the
// tensor are zero.
TESSERA_DEVICE void cp_async_bulk_tensor_4d(uint32 shared, const TensorMap* map, uint32 barrier, int c0, int c1, int c2,
                                            int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same to each block of the cluster whose bit is set in `blocks`: to the same offset of its shared memory, counted
// by its barrier at the same offset.
TESSERA_DEVICE void cp_async_bulk_tensor_4d_multicast(uint32 shared, const TensorMap* map, uint32 barrier, int c0,
                                                      int c1, int c2, int c3, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}

// Copies a box from shared memory to a four-dimensional tensor. Elements outside the tensor are not written.
TESSERA_DEVICE void cp_async_bulk_tensor_store_4d(const TensorMap* map, uint32 shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Copies `bytes` from global to shared memory; both addresses and `bytes` are multiples of 16. The bytes count towards
// `barrier`.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
TESSERA_DEVICE void cp_async_bulk_load(uint32 shared, const void* global, int bytes, uint32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Copies `bytes` from shared to global memory; both addresses and `bytes` are multiples of 16.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
TESSERA_DEVICE void cp_async_bulk_store(float* global, uint32 shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// Adds `bytes` of float32 from shared memory to global memory; both addresses and `bytes` are multiples of 16.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-reduce-async-bulk
TESSERA_DEVICE void cp_reduce_async_bulk_add_f32(float* global, uint32 shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

TESSERA_DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's stores have read shared memory, which may then be overwritten.
TESSERA_DEVICE void cp_async_bulk_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until the writes of this thread's stores are visible to it.
TESSERA_DEVICE void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

TESSERA_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to wgmma and to bulk copies.
TESSERA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders this thread's accesses of global memory, and those of other threads that it has observed, with bulk copies
// before and after.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
TESSERA_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace tessera::ptx
