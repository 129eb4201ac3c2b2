#include "cuda/families/fwd_sm90_tiles.hpp"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <iterator>
#include <string>

#include "cuda/kernels.hpp"
#include "cuda/runtime/environment.hpp"

namespace tessera::cuda {
namespace {

constexpr Sm90Tile kTiles[] = {
#include "cuda/families/fwd_sm90_tiles.inc"
};

// What a row varies, and the config's field that it is.
struct Varied {
  int Sm90Tile::*in_tile;
  int FwdSm90Config::*in_config;
  int least, most;
};
constexpr Varied kVaried[] = {
    {&Sm90Tile::block_n, &FwdSm90Config::block_n, 16, 256}, {&Sm90Tile::consumers, &FwdSm90Config::consumers, 2, 4},
    {&Sm90Tile::k_stages, &FwdSm90Config::k_stages, 1, 8},  {&Sm90Tile::v_stages, &FwdSm90Config::v_stages, 1, 8},
    {&Sm90Tile::q_stages, &FwdSm90Config::q_stages, 2, 9},  {&Sm90Tile::cluster, &FwdSm90Config::cluster, 1, 2},
};

std::optional<Sm90Tile> parse(const char* text) {
  Sm90Tile tile{};
  for (const Varied& varied : kVaried) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (end == text || value < INT_MIN || value > INT_MAX) return std::nullopt;
    if (*end != (&varied == std::end(kVaried) - 1 ? '\0' : ',')) return std::nullopt;
    tile.*varied.in_tile = static_cast<int>(value);
    text = end + 1;
  }
  return tile.in_range() ? std::optional(tile) : std::nullopt;
}

}  // namespace

bool Sm90Tile::in_range() const {
  for (const Varied& varied : kVaried) {
    const int value = this->*varied.in_tile;
    if (value < varied.least || value > varied.most) return false;
  }
  return block_n % 16 == 0 && q_stages >= consumers && kv_rings_cannot_deadlock(consumers, block_n, k_stages, v_stages);
}

void Sm90Tile::apply(FwdSm90Config& config) const {
  for (const Varied& varied : kVaried) config.*varied.in_config = this->*varied.in_tile;
  if (config.causal) config.cluster = 1;
  constexpr int kMostBytes = 227 << 10;  // of a block of compute capability 9.0
  config.o_chunks = chunks_of(config.head_dim_v);
  while (config.o_chunks > 1 && smem_bytes(config) > kMostBytes) --config.o_chunks;
}

std::span<const Sm90Tile> sm90_tiles() { return kTiles; }

std::optional<Sm90Tile> Sm90Tile::halved() const {
  Sm90Tile half = *this;
  half.block_n *= 2;
  for (int* part : {&half.consumers, &half.q_stages}) *part /= 2;
  for (int* stages : {&half.k_stages, &half.v_stages})
    *stages = std::max(*stages / 2, 2);  // one comes, one is multiplied
  return half.consumers * 2 == consumers && half.in_range() ? std::optional(half) : std::nullopt;
}

std::optional<Sm90Tile> find_sm90_tile(const Sm90Case& wanted) {
  if (const std::string forced = environment_variable(kForcedTile); !forced.empty()) return parse(forced.c_str());
  for (const Sm90Tile& tile : kTiles) {
    if (wanted.head_dim > tile.head_dim || wanted.head_dim_v > tile.head_dim_v) continue;
    if (wanted.area != tile.area || wanted.rows < tile.rows) continue;
    // Half a tile takes some 0.7 of the time of a whole one, so it pays where no multiprocessor then has two. Under a
    // staircase one may: the largest work decides, and its second is among the smallest.
    const int64_t block_m = tile.consumers * kConsumerRows, full = wanted.area == Area::kStairs ? block_m : block_m / 2;
    const std::optional<Sm90Tile> half = wanted.rows_a_sm <= full ? tile.halved() : std::nullopt;
    return half ? half : tile;
  }
  return std::nullopt;
}

}  // namespace tessera::cuda
