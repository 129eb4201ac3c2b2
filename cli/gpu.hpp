// A GPU's memory and clock through the driver alone, which is opened when the first one is asked for.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tensor.hpp"

namespace tessera::cli {

// Its primary context becomes the thread's current one, and the default stream takes all work. Everything here throws
// Failure, with what was called and the driver's words, when the driver refuses.
class Gpu {
 public:
  explicit Gpu(std::int32_t ordinal);

  // Uninitialised, given back with its last copy. Throws Failure naming `what` when there is not that much memory.
  Memory allocate(std::int64_t size_bytes, const std::string& what) const;
  Memory copy_of(const Memory& host, const std::string& what) const;
  void download(const Memory& host, const Memory& device) const;
  void fill(const Memory& device, std::uint8_t byte) const;

  // Seconds a call, of `calls` put into the stream one after the other; finished on return.
  double seconds(int calls, const std::function<void()>& call) const;

  std::int64_t memory_bytes() const;  // all of it
  // Whether `size_bytes` more can be had, with some for the driver's own.
  bool fits(std::int64_t size_bytes) const;
};

}  // namespace tessera::cli
