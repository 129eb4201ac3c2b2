// What all options of a score share: which entry of the scores is meant, and tensors over scores.
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

// Which entries the lanes of a kernel's vectors are (coordinates.hpp). With KeyLanes the keys of a vector are
// neighbours.
struct QueryLanes;
struct RowLanes;
struct KeyLanes;
template <class At>
constexpr bool kLanesAreKeys = false;
template <>
constexpr bool kLanesAreKeys<KeyLanes> = true;

// Keys that the rows of a tile see alike, as far as an option goes: none of the rows sees them, all do, or some.
struct KeyRun {
  int64_t end;
  bool visible;  // to some row
  bool options;  // a score is more than scale * (q . k) under a positional mask
};

// Scratch of an option's load: tiles as large as the scores', handed out in order.
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
