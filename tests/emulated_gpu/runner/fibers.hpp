// Threads that alternate on one thread of the host, each with its own stack.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace tessera::emulated {

inline constexpr size_t kMostThreads = 1024, kStackBytes = size_t{1} << 18;

// Stacks of a block's threads, kept for all kernels of the process, each of which has its own runner: new stacks would
// cost page faults again.
class __attribute__((visibility("default"))) Stacks {
 public:
  Stacks() {
    const std::lock_guard lock(pool().mutex);
    if (!pool().free.empty()) {
      memory_ = pool().free.back();
      pool().free.pop_back();
      return;
    }
    memory_ = mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) std::abort();
  }
  ~Stacks() {
    const std::lock_guard lock(pool().mutex);
    pool().free.push_back(memory_);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* of(int thread) const { return static_cast<char*>(memory_) + static_cast<size_t>(thread) * kStackBytes; }

 private:
  struct Pool {
    std::mutex mutex;
    std::vector<void*> free;
  };
  static Pool& pool() {
    static Pool& it = *new Pool;
    return it;
  }
  void* memory_;
};

// Fibers start by contexts and switch by jumps, since switching contexts is a system call.
class Fibers {
 public:
  // entry() must not return.
  Fibers(int count, void (*entry)()) : fibers_(static_cast<size_t>(count)) {
    for (int t = 0; t < count; ++t) {
      ucontext_t& context = fiber(t).context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_.of(t);
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = nullptr;
      makecontext(&context, entry, 0);
    }
  }

  // Switches from the host to a fiber, until one leaves.
  __attribute__((noinline)) void enter(int to) {
    if (_setjmp(host_) == 0) jump(to);
  }
  // Switches from one fiber to another.
  __attribute__((noinline)) void change(int from, int to) {
    if (_setjmp(fiber(from).place) == 0) jump(to);
  }
  // Switches to the host, until the fiber is entered again.
  __attribute__((noinline)) void leave(int from) {
    if (_setjmp(fiber(from).place) == 0) _longjmp(host_, 1);
  }
  // Switches to the host for ever.
  [[noreturn]] void abandon() { _longjmp(host_, 1); }

 private:
  struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool begun = false;
  };
  Fiber& fiber(int t) { return fibers_[static_cast<size_t>(t)]; }
  [[noreturn]] void jump(int to) {
    Fiber& next = fiber(to);
    if (!next.begun) {
      next.begun = true;
      setcontext(&next.context);
    }
    _longjmp(next.place, 1);
  }

  Stacks stacks_;
  std::vector<Fiber> fibers_;
  jmp_buf host_;
};

}  // namespace tessera::emulated
