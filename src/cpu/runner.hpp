// Parallel regions: items of work distributed over the caller's threads or the library's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "core/cancel.hpp"
#include "core/guarded.hpp"
#include "cpu/thread_pool.hpp"
#include "tessera/tessera.h"

namespace tessera::cpu {

// One parallel region, whose items are claimed by threads until none is left.
struct Region {
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> finished{0};  // workers
  core::Cancel* cancel = nullptr;
  int64_t items = 0;
  void (*body)(const void* context, int64_t item, char* scratch) = nullptr;
  const void* context = nullptr;
  char* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

inline void drain(void* argument, int32_t worker) {
  Region& region = *static_cast<Region*>(argument);
  char* scratch = region.scratch + worker * region.scratch_bytes;
  for (int64_t item; (item = region.next.fetch_add(1, std::memory_order_relaxed)) < region.items;) {
    if (region.cancel->asked()) break;
    region.body(region.context, item, scratch);
  }
  region.finished.fetch_add(1);
}

// Runs on the caller's own threads, whose behaviour is not trusted.
inline void run_by(const tessera_executor& executor, int32_t workers, Region& region) {
  try {
    executor.run(executor.context, workers, drain, &region);
  } catch (const std::exception& error) {
    throw core::ExecutorError(std::string("run threw \"") + error.what() +
                              "\", accepted a function that throws nothing");
  }
#if defined(__GLIBCXX__)
  catch (const abi::__forced_unwind&) {
    throw;
  }
#endif
  catch (...) {
    throw core::ExecutorError("run threw what is no std::exception, accepted a function that throws nothing");
  }
  const int32_t finished = region.finished.load();
  if (finished == workers) return;
  throw core::ExecutorError("run returned with " + std::to_string(finished) + " of " + std::to_string(workers) +
                            " tasks done, accepted when each was done once");
}

class Runner {
 public:
  // `small`: a second thread would cost more than it gains.
  Runner(int32_t threads, char* scratch, int64_t scratch_bytes, const tessera_executor& executor, core::Cancel& cancel,
         bool small)
      : threads_(small ? 1 : threads),
        scratch_(scratch),
        scratch_bytes_(scratch_bytes),
        executor_(executor),
        cancel_(cancel) {}

  // Runs body(item, scratch) for every item, on as many threads as are available and have items.
  template <class Body>
  void run(int64_t items, const Body& body) const {
    Region region;
    region.cancel = &cancel_;
    region.items = items;
    region.context = &body;
    region.body = [](const void* context, int64_t item, char* scratch) {
      (*static_cast<const Body*>(context))(item, scratch);
    };
    region.scratch = scratch_;
    region.scratch_bytes = scratch_bytes_;
    const int32_t workers = static_cast<int32_t>(std::min<int64_t>(threads_, items));
    if (workers <= 1) return drain(&region, 0);
    if (executor_.run) return run_by(executor_, workers, region);
    run_on_pool(workers, drain, &region);
  }

 private:
  int32_t threads_;
  char* scratch_;
  int64_t scratch_bytes_;  // of one thread
  const tessera_executor& executor_;
  core::Cancel& cancel_;
};

}  // namespace tessera::cpu
