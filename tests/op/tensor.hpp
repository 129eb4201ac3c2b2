// A tensor with its own memory, with any order of dimensions, gaps between rows, reversed rows, and guard bands: all
// bytes outside its elements are 0xFF (a NaN in every float format) and must remain so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::testing {

// Guard bands hide an overrun from the address sanitizer, whose own red zones do better.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kGuardBytes = 0;
#else
inline constexpr int64_t kGuardBytes = 256;
#endif

// A tensor's layout in memory.
struct Placement {
  std::vector<int> order;  // dimensions, outermost first; empty: in the given order
  int64_t gap = 0;         // elements after each innermost row
  int reversed_dim = -1;   // its stride is negative
  int repeated_dim = -1;   // its stride is 0
};

class Tensor {
 public:
  Tensor() = default;  // absent: rank 0, no data
  Tensor(int32_t dtype, std::vector<int64_t> shape, const Placement& placement = {});

  bool present() const { return layout_.rank > 0; }
  const tessera_layout& layout() const { return layout_; }
  int64_t size() const;  // elements

  // nullptr if absent. Aligned to the element's size only.
  void* data() const { return present() ? origin_ : nullptr; }
  template <class T>
  T* data_as() const {
    return static_cast<T*>(data());
  }

  void poison();                                  // every byte 0xFF
  void store(const std::vector<double>& values);  // elements in the shape's own order
  std::vector<double> load() const;
  std::vector<char> untouched() const;   // elements that are still poison
  bool unharmed_outside() const;         // no byte outside the elements was written
  std::vector<std::byte> bytes() const;  // all of them

  // Its storage, gaps and guard bands included; shared with its slices.
  std::byte* storage() const { return storage_.get(); }
  int64_t storage_bytes() const { return storage_bytes_; }

  // The part [start, start + count) of a dimension, in the same memory.
  Tensor slice(int dim, int64_t start, int64_t count) const;
  // Entry `index` of the first dimension, without that dimension.
  Tensor at(int64_t index) const;

 private:
  template <class F>
  void each_element(F f) const;

  tessera_layout layout_{};
  std::shared_ptr<std::byte[]> storage_;
  int64_t storage_bytes_ = 0;
  std::byte* origin_ = nullptr;
};

}  // namespace tessera::testing
