// A thread block: its threads are fibers, and who waits lets the others run. Everything that threads do together goes through here.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstring>
#include <deque>
#include <type_traits>

#include "async_copy.hpp"
#include "fibers.hpp"
#include "grid_state.hpp"
#include "products.hpp"
#include "running.hpp"
#include "shared_window.hpp"
#include "wait.hpp"

namespace tessera::emulated {

inline constexpr int kWarpThreads = 32;
inline constexpr uint32_t kAllLanes = 0xffffffff;

// An address in shared memory: 24 bits of where, and above them 0 for the own block, or 1 + the rank of a block of the cluster.
inline constexpr uint32_t kRankShift = 24, kWhereMask = (1u << kRankShift) - 1;

// copies.hpp. Loads: all at once, or poison until then. Stores: first shared memory is read, then global memory is written.
inline void run_load(Block& block, const AsyncCopy& copy);
inline void poison_target(Block& block, const AsyncCopy& copy);
inline void read_source(Block& block, const AsyncCopy& copy, std::vector<char>& bytes);
inline void write_target(Block& block, const AsyncCopy& copy, const std::vector<char>& bytes);

class Block {
 public:
  struct Thread {
    Wait wait;
    bool ended = false;
    uint64_t cluster_phase = 0;  // when it arrived
    const int* acquired = nullptr;
    int acquired_value = 0;
    const Mbarrier* tried = nullptr;  // in vain
    WarpgroupProducts::Position products;
    struct ElementCopy {
      uint32_t to;
      const void* from;
      int bytes;
      unsigned group;
    };
    std::vector<ElementCopy> element_copies;  // cp.async that have not landed
    unsigned element_groups = 0;
    struct Store {
      AsyncCopy copy;
      std::vector<char> read;  // what shared memory had
      bool has_read = false, written = false, committed = false;
    };
    std::vector<Store> stores;  // bulk copies from shared memory that are not done
  };

  Block(GridState& grid, Cluster& cluster, int rank)
      : grid_(grid),
        cluster_(cluster),
        rank_(rank),
        count_(grid.threads()),
        fibers_(count_, enter),
        threads_(static_cast<size_t>(count_)),
        warps_(static_cast<size_t>(count_ / kWarpThreads)),
        products_(static_cast<size_t>(count_ + kWarpgroupThreads - 1) / kWarpgroupThreads) {}

  // ---- for the grid ------------------------------------------------------------------------------------------------

  // It is to become another block of the grid, on its own thread of the host.
  void await() {
    left_ = count_;
    shared_ = {};
  }
  void begin(EmulatedDim index) {
    index_ = index;
    shared_ = SharedWindow(grid_.launch.smem_bytes);
    left_ = count_;
    votes_ = false;
    warp_ = 0;
    named_ = {};
    copies_.clear();
    for (Thread& thread : threads_) {
      thread.wait = {}, thread.ended = false, thread.acquired = nullptr, thread.tried = nullptr;
      thread.products = {};
      thread.element_copies.clear(), thread.stores.clear();
      thread.element_groups = 0;
    }
    for (Warp& warp : warps_) {
      warp.arrived = 0, warp.ready = kAllLanes, warp.polled = 0;
      for (Part& part : warp.parts) part = {};
    }
    for (WarpgroupProducts& products : products_) products.reset();
    element_copies_late_ = !random().ordered() && random().below(2) == 0;
    poison();
  }
  bool active() const { return left_ > 0; }
  int rank() const { return rank_; }
  EmulatedDim index() const { return index_; }

  // Runs until all of its threads have ended, or wait for other blocks. Whether any did run.
  bool run() {
    poll();
    const int next = pick();
    if (next < 0) return false;
    running.block_index = index_;
    running.thread = next;
    running.block = this;
    fibers_.enter(next);
    running.block = nullptr;
    return true;
  }

  // What its threads wait for, a line for those of a warp that wait for the same.
  std::string waits() const {
    char head[96];
    std::snprintf(head, sizeof head, "block (%u, %u, %u)\n", index_.x, index_.y, index_.z);
    std::string text = head;
    for (int w = 0; w < count_ / kWarpThreads; ++w) {
      uint32_t told = 0;
      for (int lane = 0; lane < kWarpThreads; ++lane) {
        const Thread& first = threads_[static_cast<size_t>(w * kWarpThreads + lane)];
        if (told >> lane & 1 || first.ended) continue;
        uint32_t same = 0;
        for (int other = lane; other < kWarpThreads; ++other) {
          const Thread& thread = threads_[static_cast<size_t>(w * kWarpThreads + other)];
          if (!thread.ended && thread.wait == first.wait) same |= 1u << other;
        }
        told |= same;
        std::snprintf(head, sizeof head, "  warp %d, lanes %08x: ", w, same);
        text += head + first.wait.text() + "\n";
      }
    }
    return text;
  }

  // ---- for threads -------------------------------------------------------------------------------------------------

  [[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const char* format, ...) {
    char what[400], text[600];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    std::snprintf(text, sizeof text, "block (%u, %u, %u), thread %d: %s", index_.x, index_.y, index_.z, running.thread,
                  what);
    grid_.fail(text);
    running.block = nullptr;
    fibers_.abandon();
  }
  void check(const char* wrong) {
    if (*wrong) fail("%s", wrong);
  }

  Random& random() { return grid_.random; }
  Thread& thread() { return threads_[static_cast<size_t>(running.thread)]; }
  static int lane() { return running.thread % kWarpThreads; }
  Cluster& cluster() { return cluster_; }

  // Now and then the others of the block run first.
  void may_yield() {
    if (random().one_in(8)) switch_to(pick());
  }
  // Now and then other blocks run first.
  void may_yield_block() {
    if (random().one_in(2)) fibers_.leave(running.thread);
  }

  void wait(const Wait& wait) {
    if (wait.polled() && wait.over()) return;
    const int me = running.thread;
    threads_[static_cast<size_t>(me)].wait = wait;
    Warp& warp = warps_[static_cast<size_t>(me / kWarpThreads)];
    warp.ready &= ~(1u << me % kWarpThreads);
    if (wait.polled()) warp.polled |= 1u << me % kWarpThreads;
    switch_away();
    threads_[static_cast<size_t>(me)].wait = {};
  }

  // All lanes of a warp give a value, one of them computes for all from all, and each gets its own. `what` says at which
  // instruction: it is the same for all.
  template <class In, class Out, class Compute>
  Out meet(const char* what, const In& mine, const Compute& compute) {
    static_assert(sizeof(In) <= kSlotBytes && sizeof(Out) <= kSlotBytes);
    Warp& warp = this->warp();
    const unsigned turn = warp.turn;
    // The slots are by turns: no lane is two meetings ahead.
    In* const in = reinterpret_cast<In*>(warp.in[turn % 2]);
    Out* const out = reinterpret_cast<Out*>(warp.out[turn % 2]);
    const int lane = this->lane();
    std::memcpy(static_cast<void*>(in + lane), &mine, sizeof mine);
    if (warp.arrived == 0) {
      warp.what = what;
    } else if (warp.what != what && std::strcmp(warp.what, what) != 0) {
      fail("lanes of one warp at %s and at %s", what, warp.what);
    }
    if (++warp.arrived < kWarpThreads) {
      wait({.kind = Wait::Kind::kWarp, .what = what});
    } else {
      warp.arrived = 0;
      ++warp.turn;
      compute(static_cast<const In*>(in), out);
      warp.ready = kAllLanes;
    }
    return out[lane];
  }
  void sync_warp(const char* what) {
    meet<char, char>(what, 0, [](const char*, char*) {});
  }

  // Some lanes alone.
  void sync_lanes(uint32_t mask) {
    if (mask == kAllLanes) return sync_warp("__syncwarp");
    if (!(mask >> lane() & 1)) fail("__syncwarp(%08x) of a lane that is not among them", mask);
    Warp& warp = this->warp();
    const auto part = std::find_if(std::begin(warp.parts), std::end(warp.parts),
                                   [mask](const Part& part) { return part.arrived == 0 || part.mask == mask; });
    if (part == std::end(warp.parts)) fail("__syncwarp of more than two parts of a warp at once, not emulated");
    part->mask = mask;
    if (++part->arrived < std::popcount(mask)) {
      wait({.kind = Wait::Kind::kWarp, .what = "__syncwarp of some lanes", .number = mask});
    } else {
      part->arrived = 0;
      warp.ready |= mask;
    }
  }

  void sync_threads() {
    Named& barrier = named_.of[0];
    if (++barrier.arrived == count_) {
      barrier.arrived = 0;
      release(Wait::Kind::kBlock, 0);
    } else {
      wait({.kind = Wait::Kind::kBlock});
    }
  }

  bool sync_threads_or(bool x) {
    votes_ |= x;
    sync_threads();
    const bool any = votes_;
    sync_threads();
    votes_ = false;
    sync_threads();
    return any;
  }

  // bar.sync and bar.arrive: of a warp together.
  void named_barrier(const char* what, int number, int threads, bool waits) {
    if (number < 1 || number > 15) fail("%s %d: 1 ... 15 are accepted", what, number);
    if (threads % kWarpThreads != 0 || threads <= 0 || threads > count_) fail("%s of %d threads", what, threads);
    const auto id = static_cast<uint32_t>(number);
    Named& barrier = named_.of[id];
    const unsigned phase = meet<char, unsigned>(what, 0, [&](const char*, unsigned* phases) {
      std::fill(phases, phases + kWarpThreads, barrier.phase);
      if (barrier.arrived == 0) barrier.expected = threads;
      if (barrier.expected != threads) {
        fail("%s %d of %d threads, but others said %d", what, number, threads, barrier.expected);
      }
      if ((barrier.arrived += kWarpThreads) < threads) return;
      barrier.arrived = 0;
      ++barrier.phase;
      release(Wait::Kind::kNamed, id);
    });
    if (waits && barrier.phase == phase) wait({.kind = Wait::Kind::kNamed, .number = id});
  }

  // ---- shared memory -----------------------------------------------------------------------------------------------

  // Of the own block, by an address that is not mapa()'s.
  char* own_shared(uint32_t address, size_t bytes, size_t alignment) {
    if (address >> kRankShift != 0) fail("shared address 0x%x of the cluster where the block's own is wanted", address);
    return within(*this, address, bytes, alignment);
  }
  // Of any block of the cluster.
  char* cluster_shared(uint32_t address, size_t bytes, size_t alignment) {
    return within(block_of(address), address & kWhereMask, bytes, alignment);
  }
  Block& block_of(uint32_t address) {
    const uint32_t rank = address >> kRankShift;
    if (rank == 0) return *this;
    if (rank > cluster_.blocks.size()) fail("shared address 0x%x of no block of the cluster", address);
    Block& block = *cluster_.blocks[rank - 1];
    if (!block.active()) fail("shared memory of block %u of the cluster, which has ended", rank - 1);
    if (!block.shared_.memory()) fail("shared memory of block %u of the cluster, which has not begun", rank - 1);
    return block;
  }
  Mbarrier& own_mbarrier(uint32_t address) { return checked(own_shared(address, sizeof(Mbarrier), sizeof(Mbarrier))); }
  Mbarrier& cluster_mbarrier(uint32_t address) {
    return checked(cluster_shared(address, sizeof(Mbarrier), sizeof(Mbarrier)));
  }
  uint32_t address_of(const void* pointer) {
    const uint32_t address = shared_.address_of(static_cast<const char*>(pointer));
    if (address == 0) fail("%p is not in shared memory", pointer);
    return address;
  }

  // ---- wgmma -------------------------------------------------------------------------------------------------------

  void issue_product(const Product& product, float* d, const uint32_t* a) {
    WarpgroupProducts& products = warpgroup_products();
    WarpgroupProducts::Position& at = thread().products;
    if (!products.may_issue(at)) {
      wait({.kind = Wait::Kind::kProducts,
            .value = static_cast<int64_t>(at.issued + 1 - WarpgroupProducts::kInFlight),
            .counter = products.complete()});
      execute(products, at.issued + 1 - WarpgroupProducts::kInFlight);
    }
    check(products.issue(at, running.thread % kWarpgroupThreads, product, d, a));
    if (*products.complete() == at.issued && (random().ordered() || random().one_in(2))) execute(products, at.issued);
  }
  void commit_products() { warpgroup_products().commit(thread().products); }
  void wait_products(unsigned pending) {
    WarpgroupProducts& products = warpgroup_products();
    const uint64_t due = WarpgroupProducts::due(thread().products, pending);
    wait({.kind = Wait::Kind::kProducts, .value = static_cast<int64_t>(due), .counter = products.complete()});
    if (*products.executed() < due) execute(products, due);
    products.write_registers();
  }

  // ---- copies ------------------------------------------------------------------------------------------------------

  // To shared memory: now or later.
  void start_load(const AsyncCopy& copy) {
    if (random().ordered() || random().below(2) == 0) return run_load(*this, copy);
    poison_target(*this, copy);
    copies_.push_back(copy);
  }

  // From shared memory: now, or as late as its thread waits for it.
  void start_store(const AsyncCopy& copy) {
    thread().stores.emplace_back().copy = copy;
    if (random().ordered() || random().below(2) == 0) finish(thread().stores.back());
  }
  void commit_stores() {
    for (Thread::Store& store : thread().stores) store.committed = true;
  }
  void wait_stores(bool read_alone) {
    std::vector<Thread::Store>& stores = thread().stores;
    for (Thread::Store& store : stores) {
      if (!store.committed) continue;
      if (!store.has_read) read_source(*this, store.copy, store.read), store.has_read = true;
      if (!read_alone) finish(store);
    }
    std::erase_if(stores, [](const Thread::Store& store) { return store.written && store.committed; });
  }

  bool element_copies_late() const { return element_copies_late_; }

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
  struct NamedBarriers {
    Named of[16];
  };

  Warp& warp() { return warps_[static_cast<size_t>(running.thread / kWarpThreads)]; }
  WarpgroupProducts& warpgroup_products() { return products_[static_cast<size_t>(running.thread / kWarpgroupThreads)]; }
  void execute(WarpgroupProducts& products, uint64_t end) { check(products.execute(end, shared_)); }

  Mbarrier& checked(char* at) {
    Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(at);
    if (!barrier.initialised()) {
      fail("mbarrier 0x%x is not initialised", shared_.address_of(at));
    }
    return barrier;
  }

  char* within(Block& block, uint32_t where, size_t bytes, size_t alignment) {
    if (where % alignment != 0) fail("shared address 0x%x is no multiple of %zu", where, alignment);
    block.shared_.take_variables(shared_);
    char* const at = block.shared_.at(where, bytes);
    if (!at) {
      fail("shared address 0x%x, %zu bytes: the block has 0x%x ... 0x%x", where, bytes, SharedWindow::kBegin,
           shared_.end());
    }
    return at;
  }

  // Before a block shared memory holds, by turns of a coin, numbers below 0, which are NaN, too, or drawn ones that are not, which lead
  // past every tensor.
  void poison() {
    const bool drawn = random().next() % 2 == 0;
    char* const begin = shared_.memory();
    char* const end = begin + grid_.launch.smem_bytes / 4 * 4;
    if (!drawn) {
      std::memset(begin, 0xff, static_cast<size_t>(end - begin));
    } else {
      for (char* at = begin; at < end; at += 4) {
        const uint32_t word = random().next() >> 1;
        std::memcpy(at, &word, sizeof word);
      }
    }
  }

  void release(Wait::Kind kind, uint32_t number) {
    for (int t = 0; t < count_; ++t) {
      const Wait& wait = threads_[static_cast<size_t>(t)].wait;
      if (wait.kind == kind && wait.number == number) {
        threads_[static_cast<size_t>(t)].wait = {};
        warps_[static_cast<size_t>(t / kWarpThreads)].ready |= 1u << t % kWarpThreads;
      }
    }
  }

  // ---- turns -------------------------------------------------------------------------------------------------------

  static void enter() {
    while (true) {
      running.block->grid_.body();
      running.block->end_thread();
    }
  }

  void end_thread() {
    Thread& me = thread();
    for (Thread::Store& store : me.stores) {
      if (!store.has_read) fail("the thread has ended before its bulk copies have read shared memory");
      finish(store);
    }
    const int t = running.thread;
    me.ended = true;
    Warp& warp = this->warp();
    warp.ready &= ~(1u << t % kWarpThreads);
    if (--left_ == 0) {
      if (!copies_.empty()) fail("the block has ended before copies to its shared memory");
      cluster_.end(count_);
      fibers_.leave(t);
    } else {
      switch_away();
    }
  }

  void finish(Thread::Store& store) {
    if (store.written) return;
    if (!store.has_read) read_source(*this, store.copy, store.read);
    write_target(*this, store.copy, store.read);
    store.has_read = store.written = true;
  }

  // The next thread that may run, -1: none.
  int pick() {
    const int warps = count_ / kWarpThreads;
    const auto ready = [this](int w) { return warps_[static_cast<size_t>(w)].ready; };
    if (!ready(warp_) || random().one_in(4)) {
      const int from = random().ordered() ? warp_ : static_cast<int>(random().below(static_cast<unsigned>(warps)));
      int w = from;
      while (!ready(w)) {
        if (++w == warps) w = 0;
        if (w == from) return -1;
      }
      if (w != warp_) backwards_ = random().below(2) != 0;
      warp_ = w;
    }
    const uint32_t lanes = ready(warp_);
    return warp_ * kWarpThreads + (backwards_ ? 31 - std::countl_zero(lanes) : std::countr_zero(lanes));
  }

  // Whether a wait is over.
  bool poll() {
    bool any = false;
    for (size_t w = 0; w < warps_.size(); ++w) {
      for (uint32_t lanes = warps_[w].polled; lanes != 0; lanes &= lanes - 1) {
        const int lane = std::countr_zero(lanes);
        if (threads_[w * kWarpThreads + static_cast<size_t>(lane)].wait.over()) {
          warps_[w].polled &= ~(1u << lane);
          warps_[w].ready |= 1u << lane;
          any = true;
        }
      }
    }
    return any;
  }

  bool run_a_copy() {
    if (copies_.empty()) return false;
    const auto at =
        copies_.begin() + static_cast<std::ptrdiff_t>(random().below(static_cast<unsigned>(copies_.size())));
    const AsyncCopy next = *at;
    copies_.erase(at);
    run_load(*this, next);
    return true;
  }

  void switch_to(int next) {
    const int me = running.thread;
    if (next == me) return;
    running.thread = next;
    fibers_.change(me, next);
  }
  void switch_away() {
    const int me = running.thread;
    while (true) {
      if (random().one_in(16)) poll();
      if (const int next = pick(); next >= 0) return switch_to(next);
      if (poll() || run_a_copy()) continue;
      break;
    }
    fibers_.leave(me);
  }

  GridState& grid_;
  Cluster& cluster_;
  const int rank_, count_;
  EmulatedDim index_;
  SharedWindow shared_;
  Fibers fibers_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<WarpgroupProducts> products_;
  NamedBarriers named_;
  std::deque<AsyncCopy> copies_;
  int left_ = 0, warp_ = 0;
  bool backwards_ = false, element_copies_late_ = false, votes_ = false;
};

}  // namespace tessera::emulated

#include "copies.hpp"
