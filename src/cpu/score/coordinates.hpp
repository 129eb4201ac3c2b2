// The coordinates of the score entries in a kernel's vectors, by which ScoreStep is parameterised. Scores are stored in
// rows of vectors: row n and vector c at offset(n, c), rows kStep apart.
#pragma once

#include "cpu/tile.hpp"

namespace tessera::cpu {
namespace {

// Lanes are the queries of a tile, rows are keys from first_key on: for the tiled kernels, forward and backward, and
// AMX's.
struct QueryLanes {
  static constexpr int kVecs = kBlockM / kLanes;
  static constexpr int64_t kStep = 1;

  const Tile& tile;
  int64_t first_key;

  TESSERA_INLINE int vecs() const { return tile.vecs; }
  TESSERA_INLINE int64_t count() const { return tile.count; }  // lanes that are queries
  TESSERA_INLINE static int64_t offset(int64_t n, int c) { return n * kBlockM + c * kLanes; }

  TESSERA_INLINE const Sequence& sequence() const { return *tile.sequence; }
  TESSERA_INLINE int64_t batch() const { return tile.batch; }
  TESSERA_INLINE int64_t head(int64_t lane) const { return tile.head[lane]; }
  TESSERA_INLINE int64_t query(int64_t lane) const { return tile.query[lane]; }
  TESSERA_INLINE int64_t key(int64_t n) const { return first_key + n; }
  TESSERA_INLINE ScoreEntry entry(int64_t lane, int64_t key) const {
    return {sequence(), batch(), head(lane), query(lane), key};
  }
  TESSERA_INLINE bool consecutive() const { return tile.consecutive; }

  TESSERA_INLINE VecI queries(int c) const { return load_as<VecI>(tile.query + c * kLanes); }
  TESSERA_INLINE VecI heads(int c) const { return load_as<VecI>(tile.head + c * kLanes); }
  TESSERA_INLINE VecI keys(int64_t n) const { return splat(static_cast<int32_t>(key(n))); }
  // query + Sk - Sq - key in the whole
  TESSERA_INLINE VecI distance(int64_t n, int c) const {
    return queries(c) + static_cast<int32_t>(sequence().bottom_right - key(n));
  }
  // Whether every query sees rows begin ... end - 1 by position, and which queries see row n.
  TESSERA_INLINE bool all_seen(int64_t begin, int64_t end) const {
    return key(begin) >= tile.all_low && key(end) - 1 <= tile.all_high;
  }
  TESSERA_INLINE VecI seen(int64_t n, int c) const {
    const int32_t at = static_cast<int32_t>(key(n));
    return (load_as<VecI>(tile.low + c * kLanes) <= at) & (load_as<VecI>(tile.high + c * kLanes) >= at);
  }
  // number(head) for every lane's head.
  template <class Number>
  TESSERA_INLINE VecF of_heads(int c, const Number& number) const {
    if (tile.consecutive) return splat(number(tile.head[0]));
    VecF v{};
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = number(tile.head[c * kLanes + lane]);
    return v;
  }
};

}  // namespace
}  // namespace tessera::cpu
