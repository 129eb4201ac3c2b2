// Cooperation of a block's threads, and the order in which they run.
#include "block.hpp"

#include <algorithm>
#include <bit>
#include <cstdarg>

#include "runner/fibers.hpp"
#include "runner/products.hpp"

namespace tessera::emulated {

Block::Block(GridState& grid, Cluster& cluster, int rank)
    : grid_(grid),
      cluster_(cluster),
      rank_(rank),
      count_(grid.threads()),
      fibers_(std::make_unique<Fibers>(count_, enter)),
      threads_(static_cast<size_t>(count_)),
      warps_(static_cast<size_t>(count_ / kWarpThreads)),
      products_(static_cast<size_t>(count_ + kWarpgroupThreads - 1) / kWarpgroupThreads) {}
Block::~Block() = default;

void Block::await() {
  left_ = count_;
  shared_ = {};
}
void Block::begin(EmulatedDim index) {
  index_ = index;
  shared_ = SharedWindow(grid_.launch.smem_bytes);
  left_ = count_;
  votes_ = false;
  warp_ = 0;
  std::fill(std::begin(named_), std::end(named_), Named());
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
// Before a block starts, shared memory is filled, at random, with negative numbers, which are also NaN, or with random
// numbers that are not NaN and would be indices beyond every tensor.
void Block::poison() {
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

bool Block::run() {
  poll();
  const int next = pick();
  if (next < 0) return false;
  running.block_index = index_;
  running.thread = next;
  running.block = this;
  fibers_->enter(next);
  running.block = nullptr;
  return true;
}

std::string Block::waits() const {
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

void Block::fail(const char* format, ...) {
  char what[400], text[600];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  std::snprintf(text, sizeof text, "block (%u, %u, %u), thread %d: %s", index_.x, index_.y, index_.z, running.thread,
                what);
  grid_.fail(text);
  running.block = nullptr;
  fibers_->abandon();
}

// ---- cooperation of lanes and warps ----

bool Block::arrive(Warp& warp, const char* what) {
  if (warp.arrived == 0) {
    warp.what = what;
  } else if (warp.what != what && std::strcmp(warp.what, what) != 0) {
    fail("lanes of one warp at %s and at %s", what, warp.what);
  }
  if (++warp.arrived < kWarpThreads) return false;
  warp.arrived = 0;
  ++warp.turn;
  return true;
}
void Block::sync_warp(const char* what) {
  Warp& warp = this->warp();
  if (arrive(warp, what)) {
    warp.ready = kAllLanes;
  } else {
    wait({.kind = Wait::Kind::kWarp, .what = what});
  }
}
void Block::sync_lanes(uint32_t mask) {
  if (mask == kAllLanes) return sync_warp("__syncwarp");
  if (!(mask >> lane() & 1)) fail("__syncwarp(%08x) of a lane that is not among them", mask);
  Warp& warp = this->warp();
  const auto part = std::find_if(std::begin(warp.parts), std::end(warp.parts),
                                 [mask](const Part& other) { return other.arrived == 0 || other.mask == mask; });
  if (part == std::end(warp.parts)) fail("__syncwarp of more than two parts of a warp at once, not emulated");
  part->mask = mask;
  if (++part->arrived < std::popcount(mask)) {
    wait({.kind = Wait::Kind::kWarp, .what = "__syncwarp of some lanes", .number = mask});
  } else {
    part->arrived = 0;
    warp.ready |= mask;
  }
}
void Block::sync_threads() {
  Named& barrier = named_[0];
  if (++barrier.arrived == count_) {
    barrier.arrived = 0;
    release(Wait::Kind::kBlock, 0);
  } else {
    wait({.kind = Wait::Kind::kBlock});
  }
}
bool Block::sync_threads_or(bool x) {
  votes_ |= x;
  sync_threads();
  const bool any = votes_;
  sync_threads();
  votes_ = false;
  sync_threads();
  return any;
}
void Block::named_barrier(const char* what, int number, int threads, bool waits) {
  if (number < 1 || number > 15) fail("%s %d: 1 ... 15 are accepted", what, number);
  if (threads % kWarpThreads != 0 || threads <= 0 || threads > count_) fail("%s of %d threads", what, threads);
  const auto id = static_cast<uint32_t>(number);
  Named& barrier = named_[id];
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
void Block::release(Wait::Kind kind, uint32_t number) {
  for (int t = 0; t < count_; ++t) {
    const Wait& wait = threads_[static_cast<size_t>(t)].wait;
    if (wait.kind == kind && wait.number == number) {
      threads_[static_cast<size_t>(t)].wait = {};
      warps_[static_cast<size_t>(t / kWarpThreads)].ready |= 1u << t % kWarpThreads;
    }
  }
}

// ---- order of threads ----

void Block::may_yield() {
  if (random().one_in(8)) switch_to(pick());
}
void Block::may_yield_block() {
  if (random().one_in(2)) fibers_->leave(running.thread);
}
void Block::wait(const Wait& wait) {
  if (wait.polled() && wait.over()) return;
  const int me = running.thread;
  threads_[static_cast<size_t>(me)].wait = wait;
  Warp& warp = warps_[static_cast<size_t>(me / kWarpThreads)];
  warp.ready &= ~(1u << me % kWarpThreads);
  if (wait.polled()) warp.polled |= 1u << me % kWarpThreads;
  switch_away();
  threads_[static_cast<size_t>(me)].wait = {};
}
void Block::enter() {
  while (true) {
    running.block->grid_.body();
    running.block->end_thread();
  }
}
void Block::end_thread() {
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
    fibers_->leave(t);
  } else {
    switch_away();
  }
}

// The next thread that can run, or -1.
int Block::pick() {
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
// Returns true if a wait is over.
bool Block::poll() {
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
void Block::switch_to(int next) {
  const int me = running.thread;
  if (next == me) return;
  running.thread = next;
  fibers_->change(me, next);
}
void Block::switch_away() {
  const int me = running.thread;
  while (true) {
    if (random().one_in(16)) poll();
    if (const int next = pick(); next >= 0) {
      if (random().one_in(256)) break;  // other blocks first
      return switch_to(next);
    }
    if (poll() || run_a_copy()) continue;
    break;
  }
  fibers_->leave(me);
}

}  // namespace tessera::emulated
