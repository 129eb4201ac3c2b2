#include "cpu/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::cpu {
namespace {

// A backward pass is three parallel regions in sequence: a thread that has just worked checks for more work this many
// times before it sleeps (some ten microseconds).
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class ThreadPool {
 public:
  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  ~ThreadPool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      region_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  bool try_run(int32_t workers, void (*task)(void*, int32_t), void* argument) {
    std::unique_lock in_use(in_use_, std::try_to_lock);
    if (!in_use.owns_lock()) return false;
    int32_t served = workers;
    {
      std::lock_guard lock(mutex_);
      task_ = task, argument_ = argument, workers_ = workers;
      served = std::min(workers, started(workers));
      pending_.store(served - 1);
      region_.fetch_add(1);
    }
    wake_.notify_all();
    task(argument, 0);
    for (int32_t worker = served; worker < workers; ++worker) task(argument, worker);
    for (int spin = 0; spin < kSpins && pending_.load() != 0; ++spin) relax();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return pending_.load() == 0; });
    return true;
  }

 private:
  // Starts threads until there are `workers` including the caller's own; fewer if the system allows no more.
  int32_t started(int32_t workers) {
    while (static_cast<int32_t>(threads_.size()) + 1 < workers) {
      const int32_t worker = static_cast<int32_t>(threads_.size()) + 1;
      try {
        threads_.emplace_back([this, worker, seen = region_.load()] { serve(worker, seen); });
      } catch (const std::system_error&) {
        break;
      }
    }
    return static_cast<int32_t>(threads_.size()) + 1;
  }

  void serve(int32_t worker, uint64_t seen) {
    while (true) {
      for (int spin = 0; spin < kSpins && region_.load() == seen; ++spin) relax();
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return region_.load() != seen; });
      seen = region_.load();
      if (stop_) return;
      if (worker >= workers_) continue;
      const auto task = task_;
      void* const argument = argument_;
      lock.unlock();
      task(argument, worker);
      if (pending_.fetch_sub(1) == 1) {
        lock.lock();  // so that the notification cannot fall between the caller's check and its sleep
        done_.notify_one();
      }
    }
  }

  std::mutex in_use_;  // one caller at a time
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  std::atomic<uint64_t> region_{0};
  std::atomic<int32_t> pending_{0};
  void (*task_)(void*, int32_t) = nullptr;
  void* argument_ = nullptr;
  int32_t workers_ = 0;
  bool stop_ = false;
};

// Owns the pool of this process. A forked child has none of its parent's threads: it discards the pool and starts
// another.
class PoolOwner {
 public:
  PoolOwner() : pool_(new ThreadPool) {
    pthread_atfork(nullptr, nullptr, [] { owner().pool_ = new ThreadPool; });
  }
  ~PoolOwner() { delete pool_; }
  static PoolOwner& owner() {
    static PoolOwner the_owner;
    return the_owner;
  }
  ThreadPool& pool() { return *pool_; }

 private:
  ThreadPool* pool_;
};

}  // namespace

void run_on_pool(int32_t workers, void (*task)(void* argument, int32_t worker), void* argument) {
  if (workers > 1 && PoolOwner::owner().pool().try_run(workers, task, argument)) return;
  for (int32_t worker = 0; worker < workers; ++worker) task(argument, worker);
}

}  // namespace tessera::cpu
