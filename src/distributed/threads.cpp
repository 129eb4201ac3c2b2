#include "distributed/threads.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>

namespace tessera::distributed {
namespace {

struct Sent {
  uint64_t exchange;
  const void* data;
  size_t bytes;
};

// What the ranks share.
struct Meeting {
  explicit Meeting(int32_t count)
      : ranks(count),
        sent(static_cast<size_t>(count) * static_cast<size_t>(count)),
        taken(static_cast<size_t>(count)),
        copying(static_cast<size_t>(count)),
        left(static_cast<size_t>(count)) {}

  std::deque<Sent>& from_to(int32_t from, int32_t to) {
    return sent[static_cast<size_t>(from) * static_cast<size_t>(ranks) + static_cast<size_t>(to)];
  }

  const int32_t ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Sent>> sent;  // messages that are not taken yet
  std::vector<size_t> taken;           // by sender: messages of its present exchange that were copied
  std::vector<int32_t> copying;        // by sender: messages that are being copied at this moment
  std::vector<bool> left;              // ranks whose communicator was destroyed
  char failure[480] = "";              // why the ranks cannot go on; "" if they can
};

class ThreadTransport final : public core::Transport {
 public:
  ThreadTransport(std::shared_ptr<Meeting> meeting, int32_t rank) : meeting_(std::move(meeting)), rank_(rank) {}
  ThreadTransport(const ThreadTransport&) = delete;
  ThreadTransport& operator=(const ThreadTransport&) = delete;
  ~ThreadTransport() override {
    const std::lock_guard lock(meeting_->mutex);
    meeting_->left[static_cast<size_t>(rank_)] = true;
    meeting_->changed.notify_all();
  }

  int32_t rank() const override { return rank_; }
  int32_t ranks() const override { return meeting_->ranks; }
  tessera_status check(const tessera_device& device) const override {
    if (device.backend != TESSERA_BACKEND_CPU) {
      return invalid(
          "communicator: of threads, accepted for calls on the CPU; on a GPU tessera_communicator_nccl makes it");
    }
    const std::lock_guard lock(meeting_->mutex);
    if (!failed()) return ok();
    return internal("communicator: serves no more calls, make new ones for all ranks: %s", meeting_->failure);
  }

  tessera_status begin(uint64_t exchange, void*) override {
    exchange_ = exchange;
    sends_.clear(), receives_.clear();
    return ok();
  }
  tessera_status send(const void* data, size_t bytes, int32_t peer) override {
    sends_.push_back({peer, {exchange_, data, bytes}});
    return ok();
  }
  tessera_status receive(void* data, size_t bytes, int32_t peer) override {
    receives_.push_back({peer, data, bytes});
    return ok();
  }
  tessera_status start() override {
    const std::lock_guard lock(meeting_->mutex);
    if (failed()) return failure();
    meeting_->taken[static_cast<size_t>(rank_)] = 0;
    for (const auto& [peer, sent] : sends_) meeting_->from_to(rank_, peer).push_back(sent);
    meeting_->changed.notify_all();
    return ok();
  }
  // The receiver copies a message, while its sender computes or waits.
  tessera_status wait(void*, core::Cancel& cancel) override {
    std::unique_lock lock(meeting_->mutex);
    for (const Receive& receive : receives_) {
      std::deque<Sent>& queue = meeting_->from_to(receive.peer, rank_);
      TESSERA_RETURN_IF_ERROR(await(
          lock, cancel, [&] { return !queue.empty(); }, [&](int32_t peer) { return peer == receive.peer; }));
      const Sent sent = queue.front();
      queue.pop_front();
      if (sent.exchange != exchange_ || sent.bytes != receive.bytes) {
        return invalid("call: rank %d makes another one than rank %d, accepted the same calls in the same order on all",
                       receive.peer, rank_);
      }
      const auto sender = static_cast<size_t>(receive.peer);
      ++meeting_->copying[sender];
      lock.unlock();
      std::memcpy(receive.data, sent.data, sent.bytes);
      lock.lock();
      --meeting_->copying[sender];
      ++meeting_->taken[sender];
      meeting_->changed.notify_all();
    }
    const size_t& taken = meeting_->taken[static_cast<size_t>(rank_)];
    return await(
        lock, cancel, [&] { return taken == sends_.size(); },
        [&](int32_t peer) { return !meeting_->from_to(rank_, peer).empty(); });
  }

  tessera_status all_gather(uint64_t mine, uint64_t* all, void* stream, core::Cancel& cancel) override {
    TESSERA_RETURN_IF_ERROR(begin(kAllGather, stream));
    all[rank_] = mine_ = mine;
    for (int32_t peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      TESSERA_RETURN_IF_ERROR(send(&mine_, sizeof mine_, peer));
      TESSERA_RETURN_IF_ERROR(receive(all + peer, sizeof mine, peer));
    }
    TESSERA_RETURN_IF_ERROR(start());
    return wait(stream, cancel);
  }

  void abandon(const char* reason) noexcept override {
    std::unique_lock lock(meeting_->mutex);
    if (meeting_->ranks > 1 && !failed()) {
      std::snprintf(meeting_->failure, sizeof meeting_->failure, "rank %d ended its call: %.440s", rank_, reason);
      meeting_->changed.notify_all();
    }
    // After this call no rank reads the messages of this rank, whose caller may free their memory.
    for (int32_t peer = 0; peer < meeting_->ranks; ++peer) meeting_->from_to(rank_, peer).clear();
    meeting_->changed.wait(lock, [&] { return meeting_->copying[static_cast<size_t>(rank_)] == 0; });
  }

 private:
  struct Receive {
    int32_t peer;
    void* data;
    size_t bytes;
  };
  static constexpr uint64_t kAllGather = 0;
  static constexpr std::chrono::milliseconds kAskAgain{1};  // how often `cancel` is asked

  bool failed() const { return meeting_->failure[0] != '\0'; }
  tessera_status failure() const { return internal("%s", meeting_->failure); }

  // Waits until ready(). Fails if the ranks cannot go on, or if one has left with awaited(rank).
  template <class Ready, class Awaited>
  tessera_status await(std::unique_lock<std::mutex>& lock, core::Cancel& cancel, const Ready& ready,
                       const Awaited& awaited) {
    const auto lost = [&] {
      int32_t peer = 0;
      while (peer < ranks() && !(meeting_->left[static_cast<size_t>(peer)] && awaited(peer))) ++peer;
      return peer;
    };
    const auto ends = [&] { return ready() || failed() || lost() < ranks(); };
    if (!cancel.can_be_asked()) meeting_->changed.wait(lock, ends);
    // By the system's clock: wait_for calls pthread_cond_clockwait, which glibc has only since 2.30.
    while (!meeting_->changed.wait_until(lock, std::chrono::system_clock::now() + kAskAgain, ends)) {
      lock.unlock();
      const bool asked = cancel.asked();
      lock.lock();
      if (asked) return cancelled();
    }
    if (ready()) return ok();
    if (failed()) return failure();
    return internal("the communicator of rank %d was destroyed", lost());
  }

  const std::shared_ptr<Meeting> meeting_;
  const int32_t rank_;
  uint64_t exchange_ = 0;
  uint64_t mine_ = 0;  // all_gather's, read by the others until this rank abandons a call that fails
  std::vector<std::pair<int32_t, Sent>> sends_;
  std::vector<Receive> receives_;
};

}  // namespace

std::vector<std::unique_ptr<core::Transport>> make_thread_transports(int32_t ranks) {
  const auto meeting = std::make_shared<Meeting>(ranks);
  std::vector<std::unique_ptr<core::Transport>> transports;
  for (int32_t rank = 0; rank < ranks; ++rank) transports.push_back(std::make_unique<ThreadTransport>(meeting, rank));
  return transports;
}

}  // namespace tessera::distributed
