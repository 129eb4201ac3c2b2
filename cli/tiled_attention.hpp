// Attention by tiles with an online softmax, in float64, a tile at a time: FlashAttention-2's forward pass (Dao 2023,
// algorithm 1), written for demonstration. `tessera trace` shows it; it shares no code with the kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::cli {

// One head: N queries over N keys.
struct TiledProblem {
  std::int64_t length = 0, head_dim = 0;
  std::int64_t block_m = 0, block_n = 0;  // a tile of queries, a block of keys; the last of each may be shorter
  std::int64_t left = -1, right = -1;     // query i sees keys i - left .. i + right; -1: all
  double scale = 1;
  // A score program's mask and score, of query i and key j. Empty: every key is visible, the score stays.
  std::function<bool(std::int64_t i, std::int64_t j)> visible = {};
  std::function<double(std::int64_t i, std::int64_t j, double s)> score = {};
};

// The same with the mask and scale that a plan's problem has.
TiledProblem tiled_problem(const tessera_plan& plan, std::int64_t block_m, std::int64_t block_n);

enum class TileKind { kSkipped, kPartial, kFull };  // no pair visible, some, all
const char* tile_kind_name(TileKind kind);

struct Tile {
  std::int64_t i = 0, j = 0;  // which tile of queries, which block of keys
  std::int64_t row_begin, row_end, key_begin, key_end;
  TileKind kind = TileKind::kSkipped;
  bool first = false, last = false;  // of the visited tiles of these queries
  bool first_touch = false;          // no earlier tile of queries has read these keys

  std::int64_t rows() const { return row_end - row_begin; }
  std::int64_t keys() const { return key_end - key_begin; }
};

// Every tile in the algorithm's order: query tiles in the outer loop, key blocks in the inner one.
std::vector<Tile> tiles_of(const TiledProblem& problem);

// A row's state between two blocks of keys. o is not divided by l yet.
struct RowState {
  double m, l;
  std::vector<double> o;  // [D]

  double lse() const;                  // -inf before the first visible key
  std::vector<double> output() const;  // o / l, or 0
};

// q, k, v, o: [N, D]; lse: [N]. Calls `after_tile` for each visited tile, with the state of its rows.
void tiled_attention(const TiledProblem& problem, const std::vector<Tile>& tiles, const double* q, const double* k,
                     const double* v, double* o, double* lse,
                     const std::function<void(const Tile&, const std::vector<RowState>&)>& after_tile);

}  // namespace tessera::cli
