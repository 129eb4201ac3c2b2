// Asynchronous copies between global memory, shared memory and the shared memory of other blocks.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// ---- cp.async -------------------------------------------------------------------------------------------------------
//
// Asynchronous copies from global to shared memory, Ampere and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async

// Copies 16 bytes to shared memory, bypassing L1: the first `source_bytes` are read, the others are filled with zeros.
TESSERA_DEVICE void cp_async_cg_16(uint32 shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}

// The same, with a hint to fetch the 128 bytes around it into the L2 cache.
TESSERA_DEVICE void cp_async_cg_16_l2_128b(uint32 shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}

// The same for all 16 bytes. Without the byte count, a copy needs no address but its own.
TESSERA_DEVICE void cp_async_cg_16_l2_128b(uint32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Copies 4 bytes, through L1.
TESSERA_DEVICE void cp_async_ca_4(uint32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

TESSERA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest kPending groups of this thread are complete.
template <int kPending>
TESSERA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all copies of this thread are complete, including those that belong to no group.
TESSERA_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- bulk copies (TMA) ----------------------------------------------------------------------------------------------
//
// Bulk copies (TMA), most of them by tensor map, and the fences between them and ordinary accesses of shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor

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

// ---- to other blocks of the cluster ---------------------------------------------------------------------------------
//
// Stores to another block's shared memory that complete on a barrier there.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async

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
