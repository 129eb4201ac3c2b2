// Synchronisation of a block's warps, of a cluster's blocks and of a grid's: barriers, clusters, dependent launches,
// atomic additions.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// ---- named barriers -------------------------------------------------------------------------------------------------
//
// Barriers 1 ... 15 among some of a block's warps; barrier 0 is that of __syncthreads. Memory accesses before an
// arrival are visible after a wait for it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar

// Arrives, and waits until `threads` threads have arrived.
TESSERA_DEVICE void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives without waiting.
TESSERA_DEVICE void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Brings the lanes of a warp together. ptxas (13.0) drops a __syncwarp() where it takes the warp for converged, but
// a branch of one lane at the end of a rarely taken path may have left that lane behind. The mask of this barrier, all
// lanes, is one that it does not know.
TESSERA_DEVICE void reconverge_warp() {
  [[maybe_unused]] uint32 lanes;
  asm volatile(
      "{\n"
      ".reg .u32 others;\n"
      "mov.u32 %0, %%lanemask_le;\n"
      "mov.u32 others, %%lanemask_gt;\n"
      "or.b32 %0, %0, others;\n"
      "bar.warp.sync %0;\n"
      "}"
      : "=r"(lanes)
      :
      : "memory");
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------
//
// Barriers in shared memory that count arrivals and bytes, as used on Hopper. A wait is for the parity of a phase: a
// fresh barrier is in phase 0, so waiting for parity 1 returns at once.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier

TESSERA_DEVICE void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy and, in a cluster, to the other blocks.
TESSERA_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

TESSERA_DEVICE void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of any block of the cluster, given by its address from mapa(). It omits .release.cluster, which
// would be a fence over the whole GPU at each arrival: it orders reads before a bulk copy, not writes.
TESSERA_DEVICE void mbarrier_arrive_shared_cluster(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

TESSERA_DEVICE void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Adds bytes to those expected in the phase, before the arrival that ends it.
TESSERA_DEVICE void mbarrier_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

TESSERA_DEVICE bool mbarrier_try_wait_parity(uint32 barrier, int parity) {
  uint32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once the phase with this parity is complete.
TESSERA_DEVICE void mbarrier_wait_parity(uint32 barrier, int parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// ---- clusters -------------------------------------------------------------------------------------------------------
//
// Clusters: blocks that run at the same time and reach each other's shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster

// This block's rank in its cluster.
TESSERA_DEVICE uint32 cluster_ctarank() {
  uint32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in block `rank` of the cluster, that corresponds to `shared` in this block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
TESSERA_DEVICE uint32 mapa(uint32 shared, uint32 rank) {
  uint32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Stores to an address from mapa().
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
TESSERA_DEVICE void st_shared_cluster_s32(uint32 cluster_address, int x) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(cluster_address), "r"(x) : "memory");
}

// Loads from an address from mapa().
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
TESSERA_DEVICE float2 ld_shared_cluster_f32x2(uint32 cluster_address) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(cluster_address) : "memory");
  return x;
}
TESSERA_DEVICE float4 ld_shared_cluster_f32x4(uint32 cluster_address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(cluster_address)
               : "memory");
  return x;
}

// All threads of the cluster arrive, and wait for all. Executed by all threads of a warp together.
TESSERA_DEVICE void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }

// Makes this thread's stores to its block's shared memory, and those that it has observed, visible to blocks of the
// cluster that observe a later arrival of it. barrier_cluster_arrive() does that for global memory, too, by a fence
// over the whole GPU (MEMBAR.ALL.GPU).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
TESSERA_DEVICE void fence_release_shared_cluster() {
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
}

// Orders no memory accesses, which is sufficient after fence_mbarrier_init() and fence_release_shared_cluster().
TESSERA_DEVICE void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

TESSERA_DEVICE void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// ---- dependent launches ---------------------------------------------------------------------------------------------
//
// Programmatic dependent launch: a kernel launched with the attribute may start before the previous kernel of the
// stream has ended.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol

// GPUs before Hopper lack such launches.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Waits until the previous kernels have ended and their writes are visible. Without the attribute it returns at once.
TESSERA_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may start once every block has executed this or ended.
TESSERA_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
TESSERA_DEVICE void griddepcontrol_wait() {}
TESSERA_DEVICE void griddepcontrol_launch_dependents() {}
#endif

// ---- global memory --------------------------------------------------------------------------------------------------
//
// Additions in global memory, and the loads and stores that order them between blocks.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld

TESSERA_DEVICE void red_add_f32(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

TESSERA_DEVICE void red_add_u64(unsigned long long* global, unsigned long long x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(x) : "memory");
}

TESSERA_DEVICE void red_or_b32(uint32* global, uint32 x) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Adds four neighbouring floats; the address is a multiple of 16 bytes. Hopper and later.
TESSERA_DEVICE void red_add_v4_f32(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

// A thread that acquires the value sees everything that this thread, and the threads synchronised with it, wrote
// before.
TESSERA_DEVICE void red_release_add_s32(int* global, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

TESSERA_DEVICE int ld_acquire_s32(const int* global) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// Returns the previous value. Acquires what other threads released by it, and releases what this thread and the threads
// synchronised with it wrote.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
TESSERA_DEVICE unsigned long long atom_acq_rel_add_u64(unsigned long long* global, unsigned long long x) {
  unsigned long long old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(global), "l"(x) : "memory");
  return old;
}
TESSERA_DEVICE unsigned long long atom_acq_rel_cas_u64(unsigned long long* global, unsigned long long expected,
                                                       unsigned long long desired) {
  unsigned long long old;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(global), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

}  // namespace tessera::ptx
