// Decoding by AMX: the rows of a block of keys, and how they are asked for ahead of their use.
#pragma once

#include "cpu/amx_scores.hpp"
#include "cpu/decode.hpp"

namespace tessera::cpu {
namespace {

// Rows of K and V of one block of keys, of the first of the item's KV heads.
struct DecodeBlock {
  const char* keys[kAmxDecodeKeys];
  const char* values[kAmxDecodeKeys];
  int64_t begin, count;

  TESSERA_INLINE void locate(const Params& p, const DecodePart& part, int64_t first, int64_t end) {
    begin = first, count = max_of<int64_t>(0, min_of<int64_t>(kAmxDecodeKeys, end - first));
    for (int64_t n = 0; n < count; ++n) {
      keys[n] = key_row(p, p.k, part.sequence, part.batch, part.head_begin, first + n);
      values[n] = key_row(p, p.v, part.sequence, part.batch, part.head_begin, first + n);
    }
  }
};

// Asks for a block's rows in the order of memory, first K's, then V's, some lines at a time.
class DecodePrefetch {
 public:
  TESSERA_INLINE void begin(const Params& p, const DecodePart& part, const DecodeBlock& block) {
    block_ = &block;
    row_ = 0, head_ = 0, value_ = false;
    heads_ = part.heads;
    head_bytes_[0] = p.k.head, head_bytes_[1] = p.v.head;
    row_bytes_[0] = p.head_dim * 2, row_bytes_[1] = p.head_dim_v * 2;
    if (heads_ > 1 && head_bytes_[0] == row_bytes_[0] && head_bytes_[1] == row_bytes_[1]) {  // neighbours
      row_bytes_[0] *= heads_, row_bytes_[1] *= heads_;
      heads_ = 1;
    }
    start_row();
  }
  // 4 n lines.
  template <int kFours>
  TESSERA_INLINE void lines() {
#pragma GCC unroll 4
    for (int i = 0; i < kFours; ++i) {
      if (left_ >= 4) {
        ask(0), ask(1), ask(2), ask(3);
        at_ += 4 * kCacheLine_bytes, left_ -= 4;
        if (left_ == 0) next_row();
      } else {
        for (int n = 0; n < 4 && left_ > 0; ++n) {
          ask(0);
          at_ += kCacheLine_bytes;
          if (--left_ == 0) next_row();
        }
      }
    }
  }
  TESSERA_INLINE void rest() {
    while (left_ > 0) lines<1>();
  }

 private:
  TESSERA_INLINE void ask(int64_t line) const {
    constexpr int kIntoSecondCache = 2;
    __builtin_prefetch(at_ + line * kCacheLine_bytes, 0, kIntoSecondCache);
  }
  TESSERA_INLINE void start_row() {
    left_ = 0;
    if (row_ >= block_->count) return;
    at_ = (value_ ? block_->values : block_->keys)[row_] + head_ * head_bytes_[value_];
    left_ = (row_bytes_[value_] + kCacheLine_bytes - 1) / kCacheLine_bytes;
  }
  TESSERA_INLINE void next_row() {
    if (++head_ == heads_) {
      head_ = 0;
      if (++row_ == block_->count && !value_) row_ = 0, value_ = true;
    }
    start_row();
  }

  const DecodeBlock* block_ = nullptr;
  const char* at_ = nullptr;
  int64_t left_ = 0;  // lines of the row
  int64_t row_ = 0, head_ = 0, heads_ = 0;
  int64_t head_bytes_[2], row_bytes_[2];  // of K, of V
  bool value_ = false;
};

}  // namespace
}  // namespace tessera::cpu
