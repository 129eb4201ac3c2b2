// The compiled tiles of fwd_sm90. Their rows, fwd_sm90_tiles.inc, were measured by scripts/search_fwd_sm90.py.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tessera/config.hpp"

namespace tessera::cuda {

// The classes of problems by which a tile is chosen: all keys are visible; causal; many blocks are partial (the band of
// a window, the sequences of a packed batch); or options change each score, whatever is visible, and registers and the
// softmax decide.
enum class Area { kFull, kCausal, kPartial, kOptions };

// A row serves head sizes up to these, one area, and at least `rows` queries a sequence, or keys that a query under a
// window sees. The plan uses the first that fits.
struct Sm90Tile {
  int head_dim, head_dim_v;
  Area area;
  int64_t rows;
  // The members that the search varies, in the rows' order; they are FwdSm90Config's members of the same names.
  int block_n, consumers, k_stages, v_stages, q_stages, cluster;

  // Whether every number is in its range. The plan and the compiler check what fits together.
  bool in_range() const;

  // Sets the tile in a config whose head sizes and `varying_tile_cost` are known. A cluster needs blocks that see the
  // same keys, which under a causal mask they do not. O gets as many chunks as shared memory has room for beside the
  // tiles, at least one.
  void apply(FwdSm90Config& config) const;

  // For work tiles too few to fill a GPU: half of the rows, twice the keys, about the same shared memory. nullopt if no
  // tile has half of the consumers.
  std::optional<Sm90Tile> halved() const;
};

std::span<const Sm90Tile> sm90_tiles();

// {"fields": those that a row varies, "ranges": their ranges, "config_fields": FwdSm90Config's, "wgmma_widths",
//  "smem_limit_bytes", "rows": the table}
std::string sm90_tiles_json();

// Sets a config's head sizes, padded to sizes that the products support.
void set_head_dims(FwdSm90Config& config, int64_t head_dim, int64_t head_dim_v);

// The problem for which a tile is looked up.
struct Sm90Case {
  int64_t head_dim, head_dim_v;
  Area area;
  int64_t rows;       // queries of a sequence, or the keys that a query under a window sees, if these are fewer
  int64_t rows_a_sm;  // queries of all sequences and heads for each multiprocessor
};

// nullopt: no row has these head sizes, or kForcedTile (runtime/environment.hpp: block_n, consumers, k_stages,
// v_stages, q_stages, cluster, as "128,3,4,4,6,1", set by the search) is not a tile.
std::optional<Sm90Tile> find_sm90_tile(const Sm90Case& wanted);

}  // namespace tessera::cuda
