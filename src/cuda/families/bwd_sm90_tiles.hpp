// The compiled tiles of bwd_sm90 (one block, no cluster). Their rows, bwd_sm90_tiles.inc, were measured by
// scripts/search_bwd_sm90.py.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tessera/bwd_sm90/config.hpp"

namespace tessera::cuda {

// A row serves head sizes up to head_dim, to which its tiles are padded.
struct BwdSm90Tile {
  int head_dim;
  bool options;  // registers hold a bit or an entry for each score of a step: mask, bias, a softcap's slope
  // The members that the search varies, in the rows' order; they are BwdSm90Config's members of the same names.
  int block_m, stages;
  bool alternate, staged_dq;

  void apply(BwdSm90Config& config) const;
};

std::span<const BwdSm90Tile> bwd_sm90_tiles();

// {"config_fields": those of BwdSm90Config, "candidates": tiles that fit shared memory with every problem their row
// serves, "rows": the table}
std::string bwd_sm90_tiles_json();

// nullopt: kForcedBackwardTile (runtime/environment.hpp: block_m, stages, alternate, staged_dq, as "128,2,1,1", set by
// the search) is not a candidate.
std::optional<BwdSm90Tile> find_bwd_sm90_tile(int64_t head_dim, bool options);

}  // namespace tessera::cuda
