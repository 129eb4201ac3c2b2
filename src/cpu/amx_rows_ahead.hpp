// Prefetches rows of memory that AMX's backward pass will soon read or write.
#pragma once

#include "cpu/kv_block.hpp"

namespace tessera::cpu {
namespace {

// Rows to prefetch, a few beside each pair: all at once would fill the L1 cache's miss buffers. Rows that will be
// written are prefetched for writing; otherwise their lines would be requested twice.
class RowsAhead {
 public:
  TESSERA_INLINE void clear() { count_ = 0; }
  TESSERA_INLINE void add(const char* first, int64_t step_bytes, int64_t rows, int64_t row_bytes, bool write) {
    streams_[count_++] = {first, step_bytes, row_bytes, rows << 16, 0, 0, write};
  }
  // Spreads all rows over this number of calls of ask().
  TESSERA_INLINE void spread_over(int64_t calls) {
    for (int64_t i = 0; i < count_; ++i) streams_[i].per_call = (streams_[i].left + calls - 1) / calls;
  }
  TESSERA_INLINE void ask() {
    constexpr int64_t kOne = 1 << 16;
    for (int64_t i = 0; i < count_; ++i) {
      Stream& s = streams_[i];
      for (s.due += min_of(s.per_call, s.left - s.due); s.due >= kOne;
           s.due -= kOne, s.left -= kOne, s.row += s.step_bytes) {
        if (s.write) {
          for (int64_t at = 0; at < s.row_bytes; at += kCacheLine_bytes) prefetch_write(s.row + at);
        } else {
          prefetch_row(s.row, s.row_bytes);
        }
      }
    }
  }

 private:
  // left, per_call, due: with 16 fractional bits.
  struct Stream {
    const char* row;
    int64_t step_bytes, row_bytes, left, per_call, due;
    bool write;
  };
  Stream streams_[7];
  int64_t count_ = 0;
};

}  // namespace
}  // namespace tessera::cpu
