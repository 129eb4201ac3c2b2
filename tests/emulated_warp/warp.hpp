// A warp on the host: 32 threads that synchronise where its lanes do, at shuffles and votes. The headers in tessera/
// beside this file are found before those of kernels/; with them, device code that needs nothing else runs without a
// GPU, also under sanitizers.
#pragma once

#include <array>
#include <barrier>
#include <functional>
#include <thread>
#include <vector>

namespace tessera::emulated {

inline constexpr int kLanes = 32;

class Warp {
 public:
  // Calls `body` once per lane.
  static void run(const std::function<void(int lane)>& body) {
    std::vector<std::jthread> lanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes.emplace_back([lane, &body] {
        mine() = lane;
        body(lane);
      });
    }
  }

  // Returns every lane's value to all lanes. Must be called by all lanes.
  static std::array<float, kLanes> gather(float x) {
    static std::barrier<> met(kLanes);
    static std::array<float, kLanes> brought[2];  // alternating: no lane can be two calls ahead
    static thread_local bool turn = false;
    turn = !turn;
    brought[turn][mine()] = x;
    met.arrive_and_wait();
    return brought[turn];
  }
  static int& mine() {
    static thread_local int lane = 0;
    return lane;
  }
};

}  // namespace tessera::emulated

inline float __shfl_xor_sync(unsigned, float x, int lane_mask) {
  using tessera::emulated::Warp;
  return Warp::gather(x)[Warp::mine() ^ lane_mask];
}
inline int __shfl_xor_sync(unsigned mask, int x, int lane_mask) {
  return static_cast<int>(__shfl_xor_sync(mask, static_cast<float>(x), lane_mask));  // exact: numbers are small
}
inline float __shfl_sync(unsigned, float x, int from) { return tessera::emulated::Warp::gather(x)[from]; }
inline int __shfl_up_sync(unsigned, int x, int lanes) {
  using tessera::emulated::Warp;
  const auto brought = Warp::gather(static_cast<float>(x));  // exact, since tests use small numbers
  return static_cast<int>(brought[Warp::mine() < lanes ? Warp::mine() : Warp::mine() - lanes]);
}
// For a block of one warp.
inline void __syncthreads() { tessera::emulated::Warp::gather(0.0f); }
inline bool __any_sync(unsigned, bool x) {
  for (const float one : tessera::emulated::Warp::gather(x)) {
    if (one != 0.0f) return true;
  }
  return false;
}
inline bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0, bit = 1;
  for (const float one : tessera::emulated::Warp::gather(x)) bits |= one != 0.0f ? bit : 0u, bit <<= 1;
  return bits;
}
