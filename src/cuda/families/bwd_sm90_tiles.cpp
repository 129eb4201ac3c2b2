#include "cuda/families/bwd_sm90_tiles.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <vector>

#include "cuda/kernels.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/tiles_json.hpp"

namespace tessera::cuda {
namespace {

constexpr BwdSm90Tile kTiles[] = {
#include "cuda/families/bwd_sm90_tiles.inc"
};

constexpr int kBlockN = 128;              // 64 keys for each score warpgroup
constexpr int kMostOrderedHeadDim = 128;  // deterministic: larger head sizes use another kernel

bool fits(const BwdSm90Tile& tile, bool deterministic, bool dropout) {
  BwdSm90Config config{};
  tile.apply(config);
  config.deterministic = deterministic, config.score.dropout = dropout, config.block_mask = tile.options;
  return smem_bytes(config) <= kHopperSharedBytes;
}

// The tiles for a row's head size and options that fit shared memory with every problem the row serves. The generated
// dropout bits do not fit beside two dQ tiles of 128 queries, so dropout together with deterministic counts as options.
std::vector<BwdSm90Tile> candidates(int head_dim, bool options) {
  std::vector<BwdSm90Tile> found;
  for (const int block_m : {64, 128}) {
    if (options && block_m != 64) continue;  // one bit for each score
    for (const int stages : {2, 3, 4}) {
      for (const bool alternate : {false, true}) {
        for (const bool staged_dq : {false, true}) {
          const BwdSm90Tile tile{head_dim, options, block_m, stages, alternate, staged_dq};
          const bool may_be_ordered = head_dim <= kMostOrderedHeadDim;
          if ((!may_be_ordered || fits(tile, true, options)) && fits(tile, false, true)) found.push_back(tile);
        }
      }
    }
  }
  return found;
}

std::string row_json(const BwdSm90Tile& tile) {
  return json_object({{"head_dim", tile.head_dim},
                      {"options", tile.options},
                      {"block_m", tile.block_m},
                      {"stages", tile.stages},
                      {"alternate", tile.alternate},
                      {"staged_dq", tile.staged_dq}});
}

}  // namespace

void BwdSm90Tile::apply(BwdSm90Config& config) const {
  config.head_dim = head_dim;
  config.block_m = block_m, config.block_n = kBlockN;
  config.stages = config.ds_stages = stages;
  config.alternate = alternate, config.staged_dq = staged_dq;
}

std::span<const BwdSm90Tile> bwd_sm90_tiles() { return kTiles; }

std::string bwd_sm90_tiles_json() {
  std::vector<BwdSm90Tile> all;
  for (const BwdSm90Tile& row : kTiles)
    std::ranges::copy(candidates(row.head_dim, row.options), std::back_inserter(all));
  const auto quoted = [](const auto& name) { return "\"" + std::string(name) + "\""; };
  return json_object({{"config_fields", JsonValue::raw(json_array(config_fields(BwdSm90Config{}), quoted))},
                      {"candidates", JsonValue::raw(json_array(all, row_json))},
                      {"rows", JsonValue::raw(json_array(kTiles, row_json))}});
}

std::optional<BwdSm90Tile> find_bwd_sm90_tile(int64_t head_dim, bool options) {
  const BwdSm90Tile row = *std::ranges::find_if(
      kTiles, [&](const BwdSm90Tile& tile) { return head_dim <= tile.head_dim && tile.options == options; });
  const std::string forced = environment_variable(kForcedBackwardTile);
  if (forced.empty()) return row;
  for (const BwdSm90Tile& tile : candidates(row.head_dim, options)) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%d,%d,%d,%d", tile.block_m, tile.stages, tile.alternate, tile.staged_dq);
    if (forced == text.data()) return tile;
  }
  return std::nullopt;
}

}  // namespace tessera::cuda
