// The tiles that fwd_sm90 is compiled for. The rows, fwd_sm90_tiles.inc, are what scripts/search_fwd_sm90.py measured.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tessera/config.hpp"

namespace tessera::cuda {

// What a tile is chosen by: all keys are visible; causal; many blocks are partial (a window's band, a packed batch's
// sequences); or, whatever is visible, options change each score: there registers and the softmax decide.
enum class Area { kFull, kCausal, kPartial, kOptions };

// A row: for head sizes up to these, such an area, at least `rows` queries a sequence, or keys that a query under a window sees.
// The first that fits is taken.
struct Sm90Tile {
  int head_dim, head_dim_v;
  Area area;
  int64_t rows;
  // What the search varies, in the rows' order: FwdSm90Config's fields of these names.
  int block_n, consumers, k_stages, v_stages, q_stages, cluster;

  // Whether every number is in its range; what fits together is for the plan and the compiler to say.
  bool in_range() const;

  // To a config whose head sizes and `causal` are known: a cluster's blocks see the same keys, which under a causal mask they
  // do not. O's chunks are as many as shared memory has room for beside the tiles, and one at least.
  void apply(FwdSm90Config& config) const;

  // For work tiles too few to fill a GPU: half of the rows, twice the keys, about the same shared memory. Nothing where half of
  // the consumers are no tile's.
  std::optional<Sm90Tile> halved() const;
};

std::span<const Sm90Tile> sm90_tiles();

// {"fields": those that a row varies, "ranges": of these, "config_fields": FwdSm90Config's, "wgmma_widths", "smem_limit_bytes",
//  "rows": the table}
std::string sm90_tiles_json();

// A config's head sizes: padded to what the products take.
void set_head_dims(FwdSm90Config& config, int64_t head_dim, int64_t head_dim_v);

// What a tile is looked up for.
struct Sm90Case {
  int64_t head_dim, head_dim_v;
  Area area;
  int64_t rows;       // queries of a sequence, or keys that a query under a window sees, if these are fewer
  int64_t rows_a_sm;  // queries of all sequences and heads, for each multiprocessor
};

// Nothing: the head sizes have no row, or kForcedTile (runtime/environment.hpp: block_n, consumers,
// k_stages, v_stages, q_stages, cluster, as "128,3,4,4,6,1", for the search) holds what is no tile.
std::optional<Sm90Tile> find_sm90_tile(const Sm90Case& wanted);

}  // namespace tessera::cuda
