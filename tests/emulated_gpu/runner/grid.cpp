// A grid of blocks. Each resident block has its own thread of the host, so that `thread_local` implements `__shared__`.
// Only one block runs at a time, until it ends or waits for others. So every operation is atomic, and a seed determines
// the whole execution.
#include "grid.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <semaphore>
#include <thread>

#include "block.hpp"
#include "runner/faults.hpp"
#include "runner/fibers.hpp"
#include "runner/products.hpp"

namespace tessera::emulated {
namespace {

class Grid {
 public:
  // Returns 0, or 1 after reporting the reason. body(): code of a thread.
  static int run(const EmulatedLaunch& launch, const char* kernel, const std::function<void()>& body) {
    static std::mutex& one = *new std::mutex;  // one grid of this process at a time
    const std::lock_guard lock(one);
    Grid grid(launch, kernel, body);
    grid.run();
    if (!grid.state_.failed) return 0;
    std::fprintf(stderr, "emulated GPU: %s\n", grid.state_.text.c_str());
    if (launch.error_text && launch.error_bytes > 0) {
      std::snprintf(launch.error_text, launch.error_bytes, "%s", grid.state_.text.c_str());
    }
    return 1;
  }

 private:
  struct Slot;
  // A thread of the host, with its current block.
  struct Worker {
    Slot* slot = nullptr;
    int rank = 0;
    std::unique_ptr<Block> block{};
    std::counting_semaphore<> turn{0};
    std::thread thread{};
    bool begins = true;  // with a block other than its previous one
  };
  // Room for a cluster.
  struct Slot {
    Cluster cluster;
    std::vector<std::unique_ptr<Worker>> workers;
    unsigned index = 0;  // the cluster's index in the grid
    int blocks_left = 0;
  };

  Grid(const EmulatedLaunch& launch, const char* kernel, const std::function<void()>& body)
      : state_{.launch = launch, .kernel = kernel, .body = body, .random = Random(launch.seed)},
        cluster_blocks_(launch.cluster[0]),
        clusters_(launch.grid[0] * launch.grid[1] * launch.grid[2] / cluster_blocks_) {}

  void run() {
    const EmulatedLaunch& launch = state_.launch;
    if (const char* wrong = refuse(launch)) return state_.fail(wrong);
    const Faults faults;
    running.grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
    running.threads = {launch.block[0], launch.block[1], launch.block[2]};
    slots_most_ = std::max(launch.multiprocessors / cluster_blocks_, 1u);
    // Starts as many clusters as fit, or one after another if no cluster waits for another.
    const unsigned at_first = state_.random.ordered() || state_.random.below(2) == 0 ? 1 : slots_most_;
    for (unsigned n = 0; n < at_first && next_cluster_ < clusters_; ++n) open_slot();
    Worker& first = *slots_[0]->workers[0];
    work(first);
    for (const std::unique_ptr<Slot>& slot : slots_)
      for (const std::unique_ptr<Worker>& worker : slot->workers) {
        if (worker->thread.joinable()) worker->thread.join();
      }
  }

  const char* refuse(const EmulatedLaunch& launch) const {
    const int threads = state_.threads();
    if (threads % kWarpThreads != 0 || threads == 0 || static_cast<size_t>(threads) > kMostThreads) {
      return "a block of threads that are no whole warps, or more than 1024";
    }
    if (launch.block[1] != 1 || launch.block[2] != 1) return "a block of more than one dimension, not emulated";
    if (launch.cluster[1] != 1 || launch.cluster[2] != 1) return "a cluster of more than one dimension, not emulated";
    if (launch.grid[0] % cluster_blocks_ != 0) return "a grid that is no multiple of its clusters";
    if (clusters_ == 0) return "an empty grid";
    if (launch.smem_bytes > kEmulatedSharedBytes) return "more shared memory than a block may have";
    return nullptr;
  }

  void open_slot() {
    slots_.push_back(std::make_unique<Slot>());
    Slot& slot = *slots_.back();
    for (unsigned rank = 0; rank < cluster_blocks_; ++rank) {
      slot.workers.push_back(std::make_unique<Worker>());
      Worker& worker = *slot.workers.back();
      worker.slot = &slot, worker.rank = static_cast<int>(rank);
      worker.block = std::make_unique<Block>(state_, slot.cluster, worker.rank);
      slot.cluster.blocks.push_back(worker.block.get());
    }
    fill(slot);
    for (const std::unique_ptr<Worker>& worker : slot.workers) {
      if (live_.empty() && slots_.size() == 1) {
        live_.push_back(worker.get());  // the block of the launching thread
        continue;
      }
      live_.push_back(worker.get());
      worker->thread = std::thread([this, it = worker.get()] {
        it->turn.acquire();
        if (!state_.failed) work(*it);
      });
    }
  }
  // Assigns the next cluster of the grid.
  void fill(Slot& slot) {
    slot.index = next_cluster_++;
    slot.blocks_left = static_cast<int>(cluster_blocks_);
    slot.cluster.threads = slot.blocks_left * state_.threads();
    slot.cluster.arrived = 0;
    for (const std::unique_ptr<Worker>& worker : slot.workers) {
      worker->begins = true;
      worker->block->await();
    }
  }
  void begin(Worker& worker) {
    const unsigned index = worker.slot->index * cluster_blocks_ + static_cast<unsigned>(worker.rank);
    const unsigned* const grid = state_.launch.grid;
    worker.block->begin({index % grid[0], index / grid[0] % grid[1], index / grid[0] / grid[1]});
    worker.begins = false;
  }

  // A worker's main loop; it is the running worker.
  void work(Worker& me) {
    while (true) {
      if (me.begins) begin(me);
      idle_turns_ = me.block->run() ? 0 : idle_turns_ + 1;
      if (state_.failed) return wake_all();
      if (me.block->active()) {
        if (!hand_on(me)) return;
        continue;
      }
      if (--me.slot->blocks_left > 0 || next_cluster_ == clusters_) {
        const bool more = me.slot->blocks_left > 0 && next_cluster_ < clusters_;
        if (!leave(me, more)) return;
        continue;
      }
      fill(*me.slot);
      for (const std::unique_ptr<Worker>& worker : me.slot->workers) {
        if (worker.get() != &me) live_.push_back(worker.get());
      }
      if (!state_.random.ordered() && !hand_on(me)) return;
    }
  }

  // Lets another worker run, and returns when this one runs again. Returns false if the grid has failed.
  bool hand_on(Worker& me) {
    if (idle_turns_ > live_.size()) {  // no worker has made progress
      if (slots_.size() < slots_most_ && next_cluster_ < clusters_) {
        open_slot();
        idle_turns_ = 0;
      } else if (emulated_dependency && *emulated_dependency() != 0) {
        emulated_complete_dependency();
        idle_turns_ = 0;
      } else {
        tell_deadlock();
        wake_all();
        return false;
      }
    }
    Worker& next = after(me);
    if (&next == &me) return true;
    next.turn.release();
    me.turn.acquire();
    return !state_.failed;
  }

  // The worker has no block left. `waits`: it may get one of its slot's next cluster. Returns false if the worker ends.
  bool leave(Worker& me, bool waits) {
    Worker& next = after(me);
    std::erase(live_, &me);
    if (live_.empty()) {  // everything is done
      wake_all();
      return false;
    }
    next.turn.release();
    if (!waits) return false;
    me.turn.acquire();
    return !state_.failed && me.begins;
  }

  // The next worker; round-robin while none makes progress, so that all are polled.
  Worker& after(Worker& me) {
    const size_t count = live_.size();
    const auto at = static_cast<size_t>(std::find(live_.begin(), live_.end(), &me) - live_.begin());
    const unsigned skipped = count > 2 && idle_turns_ == 0 ? state_.random.below(static_cast<unsigned>(count - 1)) : 0;
    return *live_[(at + 1 + skipped) % count];
  }
  void wake_all() {
    for (const std::unique_ptr<Slot>& slot : slots_)
      for (const std::unique_ptr<Worker>& worker : slot->workers) worker->turn.release();
  }

  void tell_deadlock() {
    std::string text = "deadlock\n";
    for (const Worker* worker : live_) text += worker->block->waits();
    state_.fail(text);
  }

  GridState state_;
  const unsigned cluster_blocks_, clusters_;
  unsigned slots_most_ = 1, next_cluster_ = 0;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Worker*> live_;  // with a block that has not ended
  size_t idle_turns_ = 0;
};

}  // namespace

int run_grid(const EmulatedLaunch& launch, const char* kernel, const std::function<void()>& body) {
  return Grid::run(launch, kernel, body);
}

}  // namespace tessera::emulated
