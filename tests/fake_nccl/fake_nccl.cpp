// A libnccl.so.2 whose ranks are threads of one process, for TESSERA_NCCL: messages are copies between memories that
// the host can access, as those of the emulated GPUs are, in the stream that they are given. FAKE_NCCL_VERSION sets its
// version.
#include <dlfcn.h>

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#define FAKE_NCCL extern "C" __attribute__((visibility("default"))) int

namespace {

enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5 };

struct Message {
  const void* data;
  size_t bytes;
};
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Message>> sent;  // [from][to]
  std::vector<size_t> taken;              // by sender, in its present group
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Meeting> meeting;
  int rank, ranks, device;
  void* stream;  // of its messages: always the same one, and never the default stream

  std::deque<Message>& queue(int from, int to) {
    return meeting->sent[static_cast<size_t>(from) * static_cast<size_t>(ranks) + static_cast<size_t>(to)];
  }
};

namespace {

struct Listed {
  ncclComm* comm;
  bool receive;
  int peer;
  void* data;
  size_t bytes;
};
thread_local int depth = 0;
thread_local std::vector<Listed> listed;

// A group's messages, in its stream.
void exchange(const std::vector<Listed>& all) {
  ncclComm& comm = *all.front().comm;
  Meeting& meeting = *comm.meeting;
  std::unique_lock lock(meeting.mutex);
  size_t sends = 0;
  meeting.taken[static_cast<size_t>(comm.rank)] = 0;
  for (const Listed& one : all) {
    if (one.receive) continue;
    comm.queue(comm.rank, one.peer).push_back({one.data, one.bytes});
    ++sends;
  }
  meeting.changed.notify_all();
  for (const Listed& one : all) {
    if (!one.receive) continue;
    std::deque<Message>& queue = comm.queue(one.peer, comm.rank);
    meeting.changed.wait(lock, [&] { return !queue.empty(); });
    const Message message = queue.front();
    queue.pop_front();
    if (message.bytes != one.bytes) {  // NCCL's ranks would wait for ever
      std::fprintf(stderr, "fake NCCL: rank %d receives %zu bytes where rank %d sends %zu\n", comm.rank, one.bytes,
                   one.peer, message.bytes);
      std::abort();
    }
    std::memcpy(one.data, message.data, one.bytes);
    ++meeting.taken[static_cast<size_t>(one.peer)];
    meeting.changed.notify_all();
  }
  meeting.changed.wait(lock, [&] { return meeting.taken[static_cast<size_t>(comm.rank)] == sends; });
}

// The end of a group.
int submit() {
  if (listed.empty()) return kSuccess;
  using LaunchHostFunc = int (*)(void* stream, void (*function)(void*), void* argument);
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  static const auto launch = driver ? reinterpret_cast<LaunchHostFunc>(dlsym(driver, "cuLaunchHostFunc")) : nullptr;
  if (!launch) return kInvalidUsage;
  const auto run = [](void* argument) {
    const std::unique_ptr<std::vector<Listed>> all(static_cast<std::vector<Listed>*>(argument));
    exchange(*all);
  };
  void* const stream = listed.front().comm->stream;
  return launch(stream, run, new std::vector<Listed>(std::exchange(listed, {}))) == 0 ? kSuccess : kInvalidUsage;
}

int list(const Listed& message, size_t element_bytes, void* stream) {
  ncclComm& comm = *message.comm;
  if (message.peer < 0 || message.peer >= comm.ranks || !stream) return kInvalidArgument;
  if (comm.stream && comm.stream != stream) return kInvalidUsage;
  comm.stream = stream;
  listed.push_back(message);
  listed.back().bytes *= element_bytes;
  return depth > 0 ? static_cast<int>(kSuccess) : submit();
}

size_t bytes_of(int type) { return type == 0 ? 1 : type == 5 ? 8 : 0; }  // ncclInt8, ncclUint64

}  // namespace

FAKE_NCCL ncclGetVersion(int* version) {
  const char* const given = std::getenv("FAKE_NCCL_VERSION");
  return *version = given ? std::atoi(given) : 22705, kSuccess;
}
extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int) { return "NCCL's own words"; }

FAKE_NCCL ncclCommInitAll(ncclComm** comms, int ranks, const int* devices) {
  const auto meeting = std::make_shared<Meeting>();
  meeting->sent.resize(static_cast<size_t>(ranks) * static_cast<size_t>(ranks));
  meeting->taken.resize(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    comms[rank] = new ncclComm{meeting, rank, ranks, devices ? devices[rank] : rank, nullptr};
  }
  return kSuccess;
}
FAKE_NCCL ncclCommDestroy(ncclComm* comm) { return delete comm, kSuccess; }
FAKE_NCCL ncclCommCount(const ncclComm* comm, int* count) { return *count = comm->ranks, kSuccess; }
FAKE_NCCL ncclCommUserRank(const ncclComm* comm, int* rank) { return *rank = comm->rank, kSuccess; }
FAKE_NCCL ncclCommCuDevice(const ncclComm* comm, int* device) { return *device = comm->device, kSuccess; }

FAKE_NCCL ncclGroupStart() { return ++depth, kSuccess; }
FAKE_NCCL ncclGroupEnd() {
  if (depth == 0) return kInvalidUsage;
  return --depth > 0 ? static_cast<int>(kSuccess) : submit();
}
FAKE_NCCL ncclSend(const void* data, size_t count, int type, int peer, ncclComm* comm, void* stream) {
  return list({comm, false, peer, const_cast<void*>(data), count}, bytes_of(type), stream);
}
FAKE_NCCL ncclRecv(void* data, size_t count, int type, int peer, ncclComm* comm, void* stream) {
  return list({comm, true, peer, data, count}, bytes_of(type), stream);
}
FAKE_NCCL ncclAllGather(const void* from, void* to, size_t count, int type, ncclComm* comm, void* stream) {
  const size_t bytes = count * bytes_of(type);
  ncclGroupStart();
  for (int peer = 0; peer < comm->ranks; ++peer) {
    auto* const place = static_cast<char*>(to) + static_cast<size_t>(peer) * bytes;
    ncclSend(from, count, type, peer, comm, stream);
    ncclRecv(place, count, type, peer, comm, stream);
  }
  return ncclGroupEnd();
}
