// The common types of all score options: the coordinates of an entry, and tensors over scores.
#pragma once

#include "cpu/params.hpp"
#include "cpu/product.hpp"

namespace tessera::cpu {
namespace {

TESSERA_INLINE float infinity() { return __builtin_inff(); }

// One entry of the scores: a query of one head of a sequence, and a key.
struct ScoreEntry {
  const Sequence& sequence;
  int64_t batch, head, query, key;
};

TESSERA_INLINE char* score_row(const ScoreTensor& tensor, int64_t batch, int64_t head, int64_t row) {
  return tensor.data + tensor.batch * batch + tensor.head * head + tensor.row * row;
}

// The coordinates of the lanes of a kernel's vectors (coordinates.hpp). With KeyLanes the keys of a vector are
// neighbours.
struct QueryLanes;
struct RowLanes;
struct KeyLanes;
template <class At>
constexpr bool kLanesAreKeys = false;
template <>
constexpr bool kLanesAreKeys<KeyLanes> = true;

// Keys that an option treats alike for all rows of a tile: none of the rows sees them, all do, or some.
struct KeyRun {
  int64_t end;
  bool visible;  // visible to at least one row
  bool options;  // a score is more than scale * (q . k) under a positional mask
};

// Scratch for an option's load: tiles as large as the scores', allocated in order.
struct ScoreTiles {
  float* next;
  int64_t tile_floats;
  TESSERA_INLINE float* take() {
    float* tile = next;
    next += tile_floats;
    return tile;
  }
};

}  // namespace
}  // namespace tessera::cpu
