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
// Nodes in an order that their dependencies allow: that in which they were added, since those must be there.
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  Context* context = nullptr;
};

struct Stream {
  Context* context = nullptr;
  uint64_t id = 0;
  int priority = 0;
  std::unique_ptr<Graph> captured;  // NULL: is not
  bool invalidated = false;         // the capture, by something that it does not permit
  int capture_mode = 0;
};

// That of a handle, for a call with this context current; the default streams are the current context's.
CUresult find_stream(cuda::CUstream handle, Stream*& stream);
// use(stream) of it, or why there is none.
template <class Use>
CUresult with_stream(cuda::CUstream handle, const Use& use) {
  Stream* stream = nullptr;
  const CUresult result = find_stream(handle, stream);
  return result == kSuccess ? use(*stream) : result;
}
CUresult submit(cuda::CUstream handle, Work work);

// Whether what allocates or waits for the GPU is refused to this thread, since some stream is captured.
bool refuses_while_captured();

}  // namespace tessera::emulated
