// A GPU's memory and clock through the driver alone, which is opened at the first request.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tensor.hpp"

namespace tessera::cli {

// Its primary context becomes the thread's current one, and all work goes to the default stream. Every function throws
// Failure, with the driver's function and its message, if the driver refuses.
class Gpu {
 public:
  explicit Gpu(std::int32_t ordinal);

  // Uninitialised memory, freed with its last copy. Throws Failure naming `what` if there is not enough memory.
  Memory allocate(std::int64_t size_bytes, const std::string& what) const;
  Memory copy_of(const Memory& host, const std::string& what) const;
  void download(const Memory& host, const Memory& device) const;
  void fill(const Memory& device, std::uint8_t byte) const;

  // Seconds per call, for `calls` calls in sequence in the stream; waits for them.
  double seconds(int calls, const std::function<void()>& call) const;

  std::int64_t memory_bytes() const;  // of the whole GPU
  // Whether `size_bytes` more can be allocated, with a reserve for the driver.
  bool fits(std::int64_t size_bytes) const;
};

}  // namespace tessera::cli
