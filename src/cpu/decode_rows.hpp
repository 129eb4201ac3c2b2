// A query row of decoding, and the score entries that the kernels' lanes hold.
#pragma once

#include "cpu/score/step.hpp"

namespace tessera::cpu {
namespace {

struct DecodeRow {
  int64_t query, head;
  int64_t low, high;               // visible keys
  int64_t full_high;               // the last key up to which no mask hides any
  float stale_max, shift, offset;  // as in a Tile
  LogSumExp as_tiled;              // set if its scores are huge and the lower digits are needed
  bool rounded;                    // decode_codes.hpp, a head's first row: its weights are bfloat16
  alignas(64) float sum[kLanes];   // of 2^(log2(e) (score - shift) - offset), for each lane
};

// For ScoreStep: lanes are keys of one row, kLanes at a time.
struct KeyLanes {
  static constexpr int kVecs = 1;
  static constexpr int64_t kStep = kLanes;

  const Sequence& of_sequence;
  int64_t of_batch;
  const DecodeRow& row;
  int64_t first_key, key_count;

  TESSERA_INLINE static int vecs() { return 1; }
  TESSERA_INLINE static int64_t count() { return 1; }
  TESSERA_INLINE static int64_t offset(int64_t n, int) { return n; }
  TESSERA_INLINE const Sequence& sequence() const { return of_sequence; }
  TESSERA_INLINE int64_t batch() const { return of_batch; }
  TESSERA_INLINE int64_t key(int64_t n) const { return first_key + n; }
  TESSERA_INLINE ScoreEntry entry(int64_t, int64_t key) const {
    return {of_sequence, of_batch, row.head, row.query, key};
  }
  TESSERA_INLINE VecI heads(int) const { return splat(static_cast<int32_t>(row.head)); }
  TESSERA_INLINE VecI queries(int) const { return splat(static_cast<int32_t>(row.query)); }
  TESSERA_INLINE VecI keys(int64_t n) const { return iota<VecI>() + static_cast<int32_t>(key(n)); }
  TESSERA_INLINE VecI distance(int64_t n, int) const {
    return static_cast<int32_t>(row.query + of_sequence.bottom_right - key(n)) - iota<VecI>();
  }
  TESSERA_INLINE bool all_seen(int64_t begin, int64_t end) const {
    return key(begin) >= row.low && key(end) - 1 <= row.full_high && (end - begin) % kLanes == 0;
  }
  TESSERA_INLINE VecI seen(int64_t n, int) const {
    const VecI index = keys(n);
    return (index >= static_cast<int32_t>(row.low)) & (index <= static_cast<int32_t>(row.high)) &
           (index < static_cast<int32_t>(key(key_count)));
  }
  template <class Number>
  TESSERA_INLINE VecF of_heads(int, const Number& number) const {
    return splat(number(row.head));
  }
};

// The same with lanes = up to kLanes rows of one KV head; lanes past the last row repeat it.
struct RowLanes {
  static constexpr int kVecs = 1;
  static constexpr int64_t kStep = 1;

  const Sequence& of_sequence;
  int64_t of_batch;
  const DecodeRow* rows;
  int64_t row_count, first_key;

  TESSERA_INLINE static int vecs() { return 1; }
  TESSERA_INLINE int64_t count() const { return row_count; }
  TESSERA_INLINE static int64_t offset(int64_t n, int) { return n * kLanes; }
  TESSERA_INLINE const Sequence& sequence() const { return of_sequence; }
  TESSERA_INLINE int64_t batch() const { return of_batch; }
  TESSERA_INLINE int64_t key(int64_t n) const { return first_key + n; }
  TESSERA_INLINE ScoreEntry entry(int64_t lane, int64_t key) const {
    return {of_sequence, of_batch, rows[lane].head, rows[lane].query, key};
  }
  TESSERA_INLINE VecI heads(int) const {
    VecI v{};
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = static_cast<int32_t>(row(lane).head);
    return v;
  }
  TESSERA_INLINE VecI queries(int) const {
    VecI v{};
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = static_cast<int32_t>(row(lane).query);
    return v;
  }
  TESSERA_INLINE VecI keys(int64_t n) const { return splat(static_cast<int32_t>(key(n))); }
  TESSERA_INLINE VecI distance(int64_t n, int c) const {
    return queries(c) + static_cast<int32_t>(of_sequence.bottom_right - key(n));
  }
  TESSERA_INLINE static bool all_seen(int64_t, int64_t) { return false; }
  TESSERA_INLINE VecI seen(int64_t n, int) const {
    VecI sees{};
    for (int lane = 0; lane < kLanes; ++lane) sees[lane] = row(lane).low <= key(n) && key(n) <= row(lane).high ? -1 : 0;
    return sees;
  }
  template <class Number>
  TESSERA_INLINE VecF of_heads(int, const Number& number) const {
    VecF v{};
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = number(row(lane).head);
    return v;
  }

 private:
  TESSERA_INLINE const DecodeRow& row(int64_t lane) const { return rows[min_of(lane, row_count - 1)]; }
};

}  // namespace
}  // namespace tessera::cpu
