// A GPU's memory, streams and graphs through the driver's own interface, as a caller of the library uses them. libcuda
// is opened at run time: the tests build and run without it. Every call throws std::runtime_error, with the driver's
// function and its message, if the driver refuses.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::testing {

// A GPU, by its primary context. gpu_missing() must be "".
class Gpu {
 public:
  // The first GPU; its context becomes current in the first thread that calls this.
  static Gpu& get();
  // The second GPU, or GPU number `index` of those from the first on, which must exist. Its context is current only
  // during calls of this class.
  static Gpu& second() { return at(1); }
  static Gpu& at(int index);
  // The context that is current in this thread, NULL: none.
  static void* current();

  void* context() const { return context_; }
  std::byte* allocate(size_t bytes);
  void release(std::byte* address);
  size_t free_bytes();

  void* stream() const { return stream_; }  // one that does not wait for the default stream
  void* create_stream();
  void destroy_stream(void* stream);
  void synchronize(void* stream);

  // In the stream's order; finished on return.
  void upload(std::byte* device, const void* host, size_t bytes, void* stream);
  void download(void* host, const std::byte* device, size_t bytes, void* stream);
  void copy(std::byte* to, const std::byte* from, size_t bytes, void* stream);
  void fill(std::byte* device, unsigned char byte, size_t bytes, void* stream);

  // What `work` puts into the stream, as a graph that can be launched any number of times.
  template <class Work>
  void* capture(void* stream, Work work) {
    begin_capture(stream);
    work();
    return end_capture(stream);
  }
  void launch_graph(void* graph, void* stream);
  void destroy_graph(void* graph);

 private:
  friend class GpuBlock;
  class Scope;
  explicit Gpu(int ordinal);
  void begin_capture(void* stream);
  void* end_capture(void* stream);

  struct CachedBlock {
    std::byte* data;
    size_t bytes;
  };
  std::vector<CachedBlock> cache_;
  void* context_ = nullptr;
  void* stream_ = nullptr;
};

// Memory of a GPU, returned to its cache or to the driver.
class GpuBlock {
 public:
  GpuBlock(size_t bytes, bool cached, Gpu& gpu = Gpu::get());
  GpuBlock(const GpuBlock&) = delete;
  GpuBlock& operator=(const GpuBlock&) = delete;
  ~GpuBlock();
  std::byte* data() const { return data_; }

 private:
  Gpu& gpu_;
  std::byte* data_;
  size_t bytes_;
  bool cached_;
};

}  // namespace tessera::testing
