// Streams. Their work is executed when it is launched, or added to a graph while they are captured.
#pragma once

#include <cstdint>
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

struct Stream {
  Context* context = nullptr;
  uint64_t id = 0;
  int priority = 0;
  std::unique_ptr<Graph> captured;  // NULL: not captured
  bool invalidated = false;         // the capture, by an operation that it does not permit
  int capture_mode = 0;
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

// True if allocating and waiting calls of this thread are refused because some stream is captured.
bool refuses_while_captured();

}  // namespace tessera::emulated
