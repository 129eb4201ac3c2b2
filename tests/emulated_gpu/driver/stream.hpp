// Streams. Their work is executed when it is launched, or added to a graph while they are captured.
//   EMULATED_GPU_STREAMS  late: executed when a call waits for it, that of other streams when an event needs it;
//                         early: the same, but host functions (messages between GPUs) are executed when they are
//                         launched, with what they wait for. These are the two extremes of what a GPU may do.
// In these modes a stream is used by one thread at a time, and a graph is executed when it is launched.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "result.hpp"
#include "work.hpp"

namespace tessera::emulated {

struct Graph;

struct Node {
  Work work;
};
// Nodes in the order in which they were added, which respects their dependencies, since these must exist already.
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  Context* context = nullptr;
};

struct Stream;
struct Event {
  std::chrono::steady_clock::time_point time;
  uint64_t recorded = 0, done = 0;  // how often: by calls, and in its stream
  Stream* stream = nullptr;         // in which it was last recorded
};

// What a stream has not executed yet: work, a host function or a record of an event; or it waits for an event.
struct Task {
  std::function<CUresult()> run;
  Event* awaited = nullptr;
  uint64_t times = 0;  // how often `awaited` has been recorded
};

struct Stream {
  Context* context = nullptr;
  uint64_t id = 0;
  int priority = 0;
  std::unique_ptr<Graph> captured;  // NULL: not captured
  bool invalidated = false;         // the capture, by an operation that it does not permit
  int capture_mode = 0;
  std::deque<Task> tasks = {};
};

// The stream of a handle, for a call with the current context; the default streams are the current context's.
CUresult find_stream(cuda::CUstream handle, Stream*& stream);
// Calls use(stream), or returns why there is no stream.
template <class Use>
CUresult with_stream(cuda::CUstream handle, const Use& use) {
  Stream* stream = nullptr;
  const CUresult result = find_stream(handle, stream);
  return result == kSuccess ? use(*stream) : result;
}
CUresult submit(cuda::CUstream handle, Work work);
// Executes all tasks of the current context's streams.
CUresult finish_context();

// True if allocating and waiting calls of this thread are refused because some stream is captured.
bool refuses_while_captured();

}  // namespace tessera::emulated
