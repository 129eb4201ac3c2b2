#include "distributed/threads.hpp"

#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

namespace tessera::distributed {
namespace {

struct Sent {
  const void* data;
  size_t bytes;
};

// What the ranks share.
struct Meeting {
  explicit Meeting(int32_t count)
      : ranks(count),
        sent(static_cast<size_t>(count) * static_cast<size_t>(count)),
        taken(static_cast<size_t>(count)),
        copying(static_cast<size_t>(count)) {}

  std::deque<Sent>& from_to(int32_t from, int32_t to) {
    return sent[static_cast<size_t>(from) * static_cast<size_t>(ranks) + static_cast<size_t>(to)];
  }

  const int32_t ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Sent>> sent;  // messages that are not taken yet
  std::vector<size_t> taken;           // by sender: messages of its present exchange that were copied
  std::vector<int32_t> copying;        // by sender: messages that are being copied at this moment
  std::string failure;                 // why the ranks cannot go on; "" if they can
};

class ThreadTransport final : public core::Transport {
 public:
  ThreadTransport(std::shared_ptr<Meeting> meeting, int32_t rank) : meeting_(std::move(meeting)), rank_(rank) {}

  int32_t rank() const override { return rank_; }
  int32_t ranks() const override { return meeting_->ranks; }
  tessera_status check(const tessera_device& device) const override {
    if (device.backend == TESSERA_BACKEND_CPU) return ok();
    return invalid(
        "communicator: of threads, accepted for calls on the CPU; on a GPU tessera_communicator_nccl makes it");
  }

  tessera_status begin(void*) override {
    sends_.clear(), receives_.clear();
    return ok();
  }
  tessera_status send(const void* data, size_t bytes, int32_t peer) override {
    sends_.push_back({peer, {data, bytes}});
    return ok();
  }
  tessera_status receive(void* data, size_t bytes, int32_t peer) override {
    receives_.push_back({peer, data, bytes});
    return ok();
  }
  tessera_status start() override {
    const std::lock_guard lock(meeting_->mutex);
    meeting_->taken[static_cast<size_t>(rank_)] = 0;
    for (const auto& [peer, sent] : sends_) meeting_->from_to(rank_, peer).push_back(sent);
    meeting_->changed.notify_all();
    return ok();
  }
  // The receiver copies a message, while its sender computes or waits.
  tessera_status wait(void*) override {
    std::unique_lock lock(meeting_->mutex);
    for (const Receive& receive : receives_) {
      std::deque<Sent>& queue = meeting_->from_to(receive.peer, rank_);
      meeting_->changed.wait(lock, [&] { return !queue.empty() || !meeting_->failure.empty(); });
      if (queue.empty()) return failed(lock);
      const Sent sent = queue.front();
      queue.pop_front();
      if (sent.bytes != receive.bytes) {
        withdraw(lock);
        return internal("rank %d sends %zu bytes where rank %d receives %zu", receive.peer, sent.bytes, rank_,
                        receive.bytes);
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
    meeting_->changed.wait(lock, [&] { return taken == sends_.size() || !meeting_->failure.empty(); });
    return taken == sends_.size() ? ok() : failed(lock);
  }

  tessera_status all_gather(uint64_t mine, uint64_t* all, void* stream) override {
    TESSERA_RETURN_IF_ERROR(begin(stream));
    all[rank_] = mine;
    for (int32_t peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      TESSERA_RETURN_IF_ERROR(send(&mine, sizeof mine, peer));
      TESSERA_RETURN_IF_ERROR(receive(all + peer, sizeof mine, peer));
    }
    TESSERA_RETURN_IF_ERROR(start());
    return wait(stream);
  }

  void abandon(const char* reason) override {
    std::unique_lock lock(meeting_->mutex);
    if (meeting_->failure.empty()) {
      meeting_->failure = "rank " + std::to_string(rank_) + " ended its call: " + reason;
      meeting_->changed.notify_all();
    }
    withdraw(lock);
  }

 private:
  struct Receive {
    int32_t peer;
    void* data;
    size_t bytes;
  };

  // Nobody reads what this rank has sent once its call has ended: its caller may free it.
  void withdraw(std::unique_lock<std::mutex>& lock) {
    for (int32_t peer = 0; peer < meeting_->ranks; ++peer) meeting_->from_to(rank_, peer).clear();
    meeting_->changed.wait(lock, [&] { return meeting_->copying[static_cast<size_t>(rank_)] == 0; });
  }

  tessera_status failed(std::unique_lock<std::mutex>& lock) {
    withdraw(lock);
    return internal("%.400s", meeting_->failure.c_str());
  }

  const std::shared_ptr<Meeting> meeting_;
  const int32_t rank_;
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
