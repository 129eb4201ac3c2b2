// New inputs: standard normal values in any input dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

namespace bench {

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// Uninitialised memory on a page boundary, so that no cell depends on the heap's addresses.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);

  void* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }
  template <typename T>
  std::span<T> as() const {
    return {static_cast<T*>(memory_.get()), bytes_ / sizeof(T)};
  }

 private:
  std::unique_ptr<void, FreeDeleter> memory_;
  size_t bytes_ = 0;
};

// elements values from N(0, 1), rounded to dtype (float32, float16 or bfloat16).
Buffer random_normal(int64_t elements, int32_t dtype, uint64_t seed);

}  // namespace bench
