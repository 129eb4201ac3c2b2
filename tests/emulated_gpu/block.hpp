// A thread block on the host, in the place of the device: each of its threads is a fiber, all of them on one thread of the host, and
// whoever waits lets the others run. It runs whole kernels of mma.sync, ldmatrix and cp.async, to show that they compute what
// they should; of races, of memory's order and of time it shows nothing.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

struct EmulatedDim {
  unsigned x = 0, y = 0, z = 0;
};

namespace tessera::emulated {

inline constexpr int kWarpThreads = 32;
inline constexpr size_t kMostThreads = 1024, kStackBytes = size_t{1} << 18;

class Block {
 public:
  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

  // kernel() by `threads` threads.
  static void run(int threads, const std::function<void()>& kernel) { Block(threads, kernel).run(); }

  int thread() const { return thread_; }

  // Until all of the block's threads are here.
  void sync_threads() { wait(block_, threads_); }
  void sync_warp() { wait(warps_[static_cast<size_t>(thread_ / kWarpThreads)], kWarpThreads); }

  // Each of a warp's threads gives a value and gets all of them.
  template <class T, class Use>
  auto exchange(const T& mine, const Use& use) {
    static_assert(sizeof(T) <= sizeof(Slot));
    Slot* const slots = &slots_[static_cast<size_t>(thread_ / kWarpThreads * kWarpThreads)];
    std::memcpy(&slots[thread_ % kWarpThreads], &mine, sizeof mine);
    sync_warp();
    const auto result = use([slots](int lane) {
      T value;
      std::memcpy(&value, &slots[lane], sizeof value);
      return value;
    });
    sync_warp();
    return result;
  }

  // The others run. Contexts begin the fibers, jumps go between them, since a context's switch is a system call.
  void yield() {
    if (_setjmp(places_[static_cast<size_t>(thread_)]) == 0) _longjmp(host_, 1);
  }

 private:
  struct Barrier {
    int arrived = 0;
    unsigned phase = 0;
  };
  struct Slot {
    std::byte bytes[64];
  };

  Block(int threads, const std::function<void()>& kernel)
      : threads_(threads),
        kernel_(kernel),
        fibers_(static_cast<size_t>(threads)),
        places_(static_cast<size_t>(threads)),
        ended_(static_cast<size_t>(threads)),
        warps_(static_cast<size_t>(threads / kWarpThreads)),
        slots_(static_cast<size_t>(threads)) {}

  // The same for every block: to have its pages anew would take longer than to run one.
  static std::byte* stack_of(int thread) {
    static const std::unique_ptr<std::byte[]> stacks(new std::byte[kMostThreads * kStackBytes]);
    return stacks.get() + static_cast<size_t>(thread) * kStackBytes;
  }

  static void enter() {
    Block& block = *current();
    block.kernel_();
    block.ended_[static_cast<size_t>(block.thread_)] = true;
    --block.left_;
    block.yield();
  }

  void make_fiber(int t) {
    ucontext_t& fiber = fibers_[static_cast<size_t>(t)];
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = stack_of(t);
    fiber.uc_stack.ss_size = kStackBytes;
    fiber.uc_link = nullptr;
    makecontext(&fiber, enter, 0);
  }

  void run() {
    current() = this;
    for (thread_ = 0; thread_ < threads_; ++thread_) make_fiber(thread_);
    left_ = threads_;
    for (thread_ = 0; thread_ < threads_; ++thread_) {
      if (_setjmp(host_) == 0) setcontext(&fibers_[static_cast<size_t>(thread_)]);
    }
    while (left_ > 0) {
      for (thread_ = 0; thread_ < threads_; ++thread_) {
        if (!ended_[static_cast<size_t>(thread_)] && _setjmp(host_) == 0)
          _longjmp(places_[static_cast<size_t>(thread_)], 1);
      }
    }
    current() = nullptr;
  }

  void wait(Barrier& barrier, int count) {
    const unsigned phase = barrier.phase;
    if (++barrier.arrived == count) {
      barrier.arrived = 0, ++barrier.phase;
      return;
    }
    while (barrier.phase == phase) yield();
  }

  const int threads_;
  const std::function<void()>& kernel_;
  std::vector<ucontext_t> fibers_;
  struct Place {
    jmp_buf buffer;
    operator jmp_buf&() { return buffer; }
  };
  std::vector<Place> places_;
  std::vector<char> ended_;
  std::vector<Barrier> warps_;
  std::vector<Slot> slots_;
  Barrier block_;
  jmp_buf host_;
  int thread_ = 0, left_ = 0;
};

}  // namespace tessera::emulated
