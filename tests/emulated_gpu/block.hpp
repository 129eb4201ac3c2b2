// A thread block. Its threads are fibers, and a thread that waits lets the others run. All cooperation of threads goes
// through this class.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "async_copy.hpp"
#include "grid_state.hpp"
#include "product.hpp"
#include "running.hpp"
#include "shared_window.hpp"
#include "wait.hpp"

namespace tessera::emulated {

inline constexpr int kWarpThreads = 32;
inline constexpr uint32_t kAllLanes = 0xffffffff;

// An address in shared memory: 24 bits of offset, and above them 0 for the thread's own block, or 1 + the rank of a
// block of the cluster.
inline constexpr uint32_t kRankShift = 24, kWhereMask = (1u << kRankShift) - 1;

class Fibers;
class WarpgroupProducts;

class Block {
 public:
  struct Thread {
    Wait wait{};
    bool ended = false;
    uint64_t cluster_phase = 0;  // at its arrival
    const int* acquired = nullptr;
    int acquired_value = 0;
    const Mbarrier* tried = nullptr;  // the barrier of its last unsuccessful try_wait
    ProductPosition products{};
    struct ElementCopy {
      uint32_t to;
      const void* from;
      int bytes, size;  // what is read, and what is written
      unsigned group;
    };
    std::vector<ElementCopy> element_copies{};  // cp.async copies that are not complete
    unsigned element_groups = 0;
    struct Store {
      AsyncCopy copy{};
      std::vector<char> read{};  // previous content of shared memory
      bool has_read = false, written = false, committed = false;
    };
    std::vector<Store> stores{};  // incomplete bulk copies from shared memory
  };

  Block(GridState& grid, Cluster& cluster, int rank);
  ~Block();

  // ---- for the grid ------------------------------------------------------------------------------------------------

  // Starts it as another block of the grid, on its own thread of the host.
  void await();
  void begin(EmulatedDim index);
  bool active() const { return left_ > 0; }
  int rank() const { return rank_; }

  // Runs until all of its threads have ended or wait for other blocks. Returns true if any thread ran.
  bool run();

  // What its threads wait for: one line for all threads of a warp with the same wait.
  std::string waits() const;

  // ---- for threads -------------------------------------------------------------------------------------------------

  // Ends the grid.
  [[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const char* format, ...);
  void check(const char* wrong) {
    if (*wrong) fail("%s", wrong);
  }

  Random& random() { return grid_.random; }
  Thread& thread() { return threads_[static_cast<size_t>(running.thread)]; }
  static int lane() { return running.thread % kWarpThreads; }
  Cluster& cluster() { return cluster_; }

  // Randomly lets the other threads of the block, or other blocks, run first.
  void may_yield();
  void may_yield_block();

  void wait(const Wait& wait);

  // All lanes of a warp pass a value, one lane computes the results for all, and each lane gets its own. `what` names
  // the instruction, which is the same for all lanes.
  template <class In, class Out, class Compute>
  Out meet(const char* what, const In& mine, const Compute& compute) {
    static_assert(sizeof(In) <= kSlotBytes && sizeof(Out) <= kSlotBytes);
    Warp& warp = this->warp();
    const unsigned turn = warp.turn;
    // The buffers alternate, since no lane can be two meetings ahead.
    In* const in = reinterpret_cast<In*>(warp.in[turn % 2]);
    Out* const out = reinterpret_cast<Out*>(warp.out[turn % 2]);
    const int lane = this->lane();
    std::memcpy(static_cast<void*>(in + lane), &mine, sizeof mine);
    if (!arrive(warp, what)) {
      wait({.kind = Wait::Kind::kWarp, .what = what});
    } else {
      compute(static_cast<const In*>(in), out);
      warp.ready = kAllLanes;
    }
    return out[lane];
  }
  void sync_warp(const char* what);
  // Synchronises only the lanes of `mask`.
  void sync_lanes(uint32_t mask);
  void sync_threads();
  bool sync_threads_or(bool x);

  // bar.sync and bar.arrive, executed by a warp together.
  void named_barrier(const char* what, int number, int threads, bool waits);

  // ---- shared memory -----------------------------------------------------------------------------------------------

  // An address in the thread's own block, not from mapa().
  char* own_shared(uint32_t address, size_t bytes, size_t alignment);
  // An address in any block of the cluster.
  char* cluster_shared(uint32_t address, size_t bytes, size_t alignment);
  Mbarrier& own_mbarrier(uint32_t address);
  Mbarrier& cluster_mbarrier(uint32_t address);
  uint32_t address_of(const void* pointer);

  // ---- wgmma -------------------------------------------------------------------------------------------------------

  void issue_product(const Product& product, float* d, const uint32_t* a);
  void commit_products();
  void wait_products(unsigned pending);

  // ---- copies ------------------------------------------------------------------------------------------------------

  // cp.async: completes at once, or at the latest when its thread waits for it; until then the destination holds NaN.
  void copy_elements(uint32_t to, const void* from, int bytes, int size);
  void commit_elements() { ++thread().element_groups; }
  void wait_elements(unsigned pending);
  void wait_all_elements() { land_groups(thread().element_groups + 1); }

  // Bulk copies to shared memory: executed now or later.
  void start_load(const AsyncCopy& copy);
  // Bulk copies from shared memory: executed now, or at the latest when its thread waits for them.
  void start_store(const AsyncCopy& copy);
  void commit_stores();
  void wait_stores(bool read_alone);

 private:
  static constexpr size_t kSlotBytes = 64;
  struct Part {
    uint32_t mask = 0;
    int arrived = 0;
  };
  struct Warp {
    uint32_t ready = kAllLanes, polled = 0;
    int arrived = 0;
    unsigned turn = 0;
    const char* what = "";
    Part parts[2];
    alignas(16) std::byte in[2][kWarpThreads * kSlotBytes], out[2][kWarpThreads * kSlotBytes];
  };
  struct Named {
    int arrived = 0, expected = 0;
    unsigned phase = 0;
  };

  Warp& warp() { return warps_[static_cast<size_t>(running.thread / kWarpThreads)]; }
  // Returns true for the last of the lanes.
  bool arrive(Warp& warp, const char* what);
  WarpgroupProducts& warpgroup_products();
  void execute(WarpgroupProducts& products, uint64_t end);
  Block& block_of(uint32_t address);
  char* within(Block& block, uint32_t where, size_t bytes, size_t alignment);
  Mbarrier& checked(char* at);
  void poison();
  void release(Wait::Kind kind, uint32_t number);
  void land_groups(unsigned end);
  void finish(Thread::Store& store);

  static void enter();
  void end_thread();
  int pick();
  bool poll();
  bool run_a_copy();
  void switch_to(int next);
  void switch_away();

  GridState& grid_;
  Cluster& cluster_;
  const int rank_, count_;
  EmulatedDim index_;
  SharedWindow shared_;
  std::unique_ptr<Fibers> fibers_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<WarpgroupProducts> products_;
  Named named_[16];
  std::deque<AsyncCopy> copies_;
  int left_ = 0, warp_ = 0;
  bool backwards_ = false, element_copies_late_ = false, votes_ = false;
};

// The block of the running thread.
inline Block& here() { return *running.block; }

// The same offset in another block of the cluster.
inline uint32_t in_block(uint32_t address, int rank) {
  return (address & kWhereMask) | static_cast<uint32_t>(rank + 1) << kRankShift;
}

}  // namespace tessera::emulated
