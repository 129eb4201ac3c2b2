// A fixed team of threads that waits between jobs, so that a short job does not pay for starting threads.
#pragma once

#include <atomic>
#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tessera::peers {

class Team {
 public:
  explicit Team(int threads) : size_(threads < 1 ? 1 : threads), start_(size_), finish_(size_) {
    for (int worker = 1; worker < size_; ++worker) {
      threads_.emplace_back([this, worker] { serve(worker); });
    }
  }

  ~Team() {
    job_ = nullptr;
    if (!threads_.empty()) start_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // job(worker) on every thread of the team, the caller's among them. Jobs do not throw.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    start_.arrive_and_wait();
    job(0);
    finish_.arrive_and_wait();
  }

  // task(i) for each i in 0 .. count - 1; a free thread takes the next one.
  void for_each(std::int64_t count, const std::function<void(std::int64_t)>& task) {
    std::atomic<std::int64_t> next{0};
    run([&](int) {
      for (std::int64_t i = next++; i < count; i = next++) task(i);
    });
  }

 private:
  void serve(int worker) {
    while (true) {
      start_.arrive_and_wait();
      if (job_ == nullptr) return;
      (*job_)(worker);
      finish_.arrive_and_wait();
    }
  }

  int size_;
  std::barrier<> start_;
  std::barrier<> finish_;
  const std::function<void(int)>* job_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace tessera::peers
