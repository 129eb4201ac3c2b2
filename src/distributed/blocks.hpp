// Tensors in the memory that a pass is given, and blocks of chunks in them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "distributed/band.hpp"
#include "tessera/distributed.h"

namespace tessera::distributed {

// The memory in which a tensor lies; kNone: there is no tensor.
enum class Base : int32_t {
  kNone,
  kQ,
  kK,
  kV,
  kO,
  kLse,
  kSlopes,
  kSink,
  kDO,
  kDQ,
  kDK,
  kDV,
  kDSink,
  kBias,
  kMask,
  kDBias,
  kSaved,
  kWorkspace,
  kConstants,  // of the program, in the workspace
  kDCaptured,  // of the first captured tensor; then of the others
  kBases = kDCaptured + TESSERA_MAX_CAPTURED_TENSORS
};
constexpr Base d_captured(int tensor) { return static_cast<Base>(static_cast<int32_t>(Base::kDCaptured) + tensor); }
struct Ref {
  Base base = Base::kNone;
  int64_t offset = 0;  // bytes
};

// A contiguous tensor [B, rows, heads, columns], or of statistics: float32 [B, heads, rows].
struct Slab {
  Ref at;
  int32_t dtype = TESSERA_FLOAT32;
  int64_t batch = 0, rows = 0, heads = 0, columns = 0;
  bool statistics = false;

  int64_t element_bytes() const { return static_cast<int64_t>(tessera_dtype_bytes(dtype)); }
  int64_t elements() const { return batch * rows * heads * columns; }
  int64_t bytes() const { return elements() * element_bytes(); }
  int64_t batch_stride() const { return rows * heads * columns; }
  int64_t row_stride() const { return statistics ? 1 : heads * columns; }
  int64_t head_stride() const { return statistics ? rows : columns; }
  Ref ref(int64_t row = 0, int64_t head = 0, int64_t of_batch = 0) const {
    const int64_t element = of_batch * batch_stride() + row * row_stride() + head * head_stride();
    return {at.base, at.offset + element * element_bytes()};
  }
  // Of `count` rows. packed: without the batch, which is 1.
  tessera_layout layout(int64_t count, bool packed) const {
    if (!packed) return layout(count);
    if (statistics) return {TESSERA_FLOAT32, 2, {heads, count}, {head_stride(), row_stride()}};
    return {dtype, 3, {count, heads, columns}, {row_stride(), head_stride(), 1}};
  }
  tessera_layout layout(int64_t count) const {
    if (statistics) {
      return {TESSERA_FLOAT32, 3, {batch, heads, count}, {batch_stride(), head_stride(), row_stride()}};
    }
    return {dtype, 4, {batch, count, heads, columns}, {batch_stride(), row_stride(), head_stride(), 1}};
  }
};

// Some chunks whose rows lie one after another in tensors, in the order of their numbers.
class Block {
 public:
  Block(const std::vector<tessera_chunk>& chunks, std::vector<int64_t> numbers)
      : numbers_(std::move(numbers)), chunks_(&chunks) {
    std::sort(numbers_.begin(), numbers_.end());
    for (const int64_t number : numbers_) {
      first_rows_[number] = rows_;
      rows_ += chunk(number).length;
    }
  }

  const std::vector<int64_t>& numbers() const { return numbers_; }
  int64_t rows() const { return rows_; }
  bool has(int64_t number) const { return first_rows_.contains(number); }
  bool has(int64_t first, int64_t count) const {
    for (int64_t number = first; number < first + count; ++number) {
      if (!has(number)) return false;
    }
    return true;
  }
  const tessera_chunk& chunk(int64_t number) const { return (*chunks_)[static_cast<size_t>(number)]; }
  int64_t row(int64_t number) const { return first_rows_.at(number); }
  // Of a position in a sequence, in a run of chunks that begins with `number`.
  int64_t row(int64_t number, int64_t position) const { return row(number) + position - chunk(number).begin; }

 private:
  std::vector<int64_t> numbers_;
  const std::vector<tessera_chunk>* chunks_;
  std::map<int64_t, int64_t> first_rows_;
  int64_t rows_ = 0;
};

// Ranges of rows in layers; no two ranges of a layer overlap.
class Layers {
 public:
  explicit Layers(size_t first = 0) : layers_(first) {}
  // Adds a range to the first layer, from number `first` on, where it overlaps no other; returns that layer's number.
  size_t place(Range range, size_t first = 0) {
    size_t n = first;
    const auto overlaps = [&range](const Range& other) { return other.begin < range.end && range.begin < other.end; };
    while (n < layers_.size() && std::any_of(layers_[n].begin(), layers_[n].end(), overlaps)) ++n;
    if (n >= layers_.size()) layers_.resize(n + 1);
    layers_[n].push_back(range);
    return n;
  }
  size_t count() const { return layers_.size(); }

 private:
  std::vector<std::vector<Range>> layers_;
};

// Assigns parts of a memory while a pass is planned. A released part may be assigned again.
class Arena {
 public:
  int64_t assign(int64_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    int64_t at = 0;
    auto next = used_.begin();
    for (; next != used_.end() && next->first - at < bytes; ++next) at = next->first + next->second;
    if (bytes > 0) used_.emplace_hint(next, at, bytes);
    bytes_ = std::max(bytes_, at + bytes);
    return at;
  }
  void release(int64_t at) { used_.erase(at); }
  int64_t bytes() const { return bytes_; }  // the most that was assigned at once

  static constexpr int64_t kAlignment = 256;

 private:
  std::map<int64_t, int64_t> used_;  // bytes by offset
  int64_t bytes_ = 0;
};

}  // namespace tessera::distributed
