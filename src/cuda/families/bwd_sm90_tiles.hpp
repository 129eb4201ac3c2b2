// The tiles that bwd_sm90's blocks alone are compiled for. The rows, bwd_sm90_tiles.inc, are what scripts/search_bwd_sm90.py measured.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tessera/bwd_sm90/config.hpp"

namespace tessera::cuda {

// A row: for head sizes up to head_dim, to which tiles are padded.
struct BwdSm90Tile {
  int head_dim;
  bool options;  // registers hold a bit or an entry of each score of a step: of mask, bias; a softcap's slope
  // What the search varies, in the rows' order: BwdSm90Config's fields of these names.
  int block_m, stages;
  bool alternate, staged_dq;

  void apply(BwdSm90Config& config) const;
};

std::span<const BwdSm90Tile> bwd_sm90_tiles();

// {"config_fields": BwdSm90Config's, "candidates": tiles that fit shared memory with whatever a row of theirs serves, "rows": the table}
std::string bwd_sm90_tiles_json();

// Nothing: kForcedBackwardTile (runtime/environment.hpp: block_m, stages, alternate, staged_dq, as "128,2,1,1", for the search)
// holds what is no candidate.
std::optional<BwdSm90Tile> find_bwd_sm90_tile(int64_t head_dim, bool options);

}  // namespace tessera::cuda
