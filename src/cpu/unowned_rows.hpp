// Rows of packed tensors that belong to no sequence: those before the first sequence's and after the last's. A call
// writes them like any other row: it clears them in work items after those that compute.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/geometry.hpp"
#include "cpu/params.hpp"

namespace tessera::cpu {

class UnownedRows {
 public:
  // `rows` rows packed by `offsets`. Without offsets the tensor is dense and has no such rows.
  UnownedRows(const tessera_layout& offsets, const int32_t* data, int64_t rows) {
    if (!core::present(offsets)) return;
    begin_ = data[0], end_ = data[(offsets.shape[0] - 1) * offsets.strides[0]];
    count_ = begin_ + rows - end_;
  }

  int64_t items() const { return (count_ + kRowsPerItem - 1) / kRowsPerItem; }

  // body(row) for the rows of one item.
  template <class Body>
  void for_each(int64_t item, const Body& body) const {
    const int64_t stop = std::min(count_, (item + 1) * kRowsPerItem);
    for (int64_t n = item * kRowsPerItem; n < stop; ++n) body(n < begin_ ? n : end_ + n - begin_);
  }

 private:
  static constexpr int64_t kRowsPerItem = 64;
  int64_t begin_ = 0, end_ = 0;  // the sequences have rows begin_ ... end_ - 1
  int64_t count_ = 0;
};

inline void clear_row(const RowTensor& tensor, int64_t row, int64_t heads, int64_t row_bytes) {
  for (int64_t head = 0; head < heads; ++head) {
    std::memset(tensor.data + tensor.row * row + tensor.head * head, 0, static_cast<size_t>(row_bytes));
  }
}

}  // namespace tessera::cpu
