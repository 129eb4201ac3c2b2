#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void barrier_sync(int barrier, int threads) {
  emulated::here().named_barrier("bar.sync", barrier, threads, true);
}
inline void barrier_arrive(int barrier, int threads) {
  emulated::here().named_barrier("bar.arrive", barrier, threads, false);
}

}  // namespace tessera::ptx
