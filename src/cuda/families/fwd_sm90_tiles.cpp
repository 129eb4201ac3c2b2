#include "cuda/families/fwd_sm90_tiles.hpp"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <iterator>
#include <string>

#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/tiles_json.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera::cuda {
namespace {

constexpr Sm90Tile kTiles[] = {
#include "cuda/families/fwd_sm90_tiles.inc"
};

// least number of columns of a chunk of O = P V, to which narrower heads are padded
constexpr int kLeastOutputWidth = 64;

// A number that a row varies, and the config's member that it sets.
struct Varied {
  const char* name;
  int Sm90Tile::*in_tile;
  int FwdSm90Config::*in_config;
  int least, most;
};
constexpr Varied kVaried[] = {
    {"block_n", &Sm90Tile::block_n, &FwdSm90Config::block_n, 16, 256},
    {"consumers", &Sm90Tile::consumers, &FwdSm90Config::consumers, 2, 4},
    {"k_stages", &Sm90Tile::k_stages, &FwdSm90Config::k_stages, 1, 8},
    {"v_stages", &Sm90Tile::v_stages, &FwdSm90Config::v_stages, 1, 8},
    {"q_stages", &Sm90Tile::q_stages, &FwdSm90Config::q_stages, 2, 9},
    {"cluster", &Sm90Tile::cluster, &FwdSm90Config::cluster, 1, 2},
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
  return block_n % 16 == 0 && whole_q_stages(consumers, q_stages) &&
         kv_rings_cannot_deadlock(consumers, block_n, k_stages, v_stages);
}

void Sm90Tile::apply(FwdSm90Config& config) const {
  for (const Varied& varied : kVaried) config.*varied.in_config = this->*varied.in_tile;
  if (config.varying_tile_cost) config.cluster = 1;
  config.o_chunks = chunks_of(config.head_dim_v);
  while (config.o_chunks > 1 && smem_bytes(config) > kHopperSharedBytes) --config.o_chunks;
}

std::span<const Sm90Tile> sm90_tiles() { return kTiles; }

void set_head_dims(FwdSm90Config& config, int64_t head_dim, int64_t head_dim_v) {
  config.head_dim = static_cast<int>(padded_to(head_dim, 16));
  config.head_dim_v = *std::find_if(std::begin(kWgmmaWidths), std::end(kWgmmaWidths), [head_dim_v](int width) {
    return width >= std::max<int64_t>(head_dim_v, kLeastOutputWidth);
  });
}

std::string sm90_tiles_json() {
  constexpr const char* kAreas[] = {"kFull", "kCausal", "kPartial", "kOptions"};
  const auto row = [&](const Sm90Tile& tile) {
    std::string text = json_object({{"head_dim", tile.head_dim},
                                    {"head_dim_v", tile.head_dim_v},
                                    {"area", kAreas[static_cast<int>(tile.area)]},
                                    {"rows", tile.rows}});
    text.pop_back();
    for (const Varied& varied : kVaried) {
      text.append(", \"").append(varied.name).append("\": ").append(std::to_string(tile.*varied.in_tile));
    }
    return text + "}";
  };
  const auto quoted = [](const auto& name) { return "\"" + std::string(name) + "\""; };
  const auto name_of = [&](const Varied& varied) { return quoted(varied.name); };
  const auto range = [](const Varied& varied) {
    return json_object({{"field", varied.name}, {"least", varied.least}, {"most", varied.most}});
  };
  const auto number = [](int value) { return std::to_string(value); };
  return json_object({{"fields", JsonValue::raw(json_array(kVaried, name_of))},
                      {"ranges", JsonValue::raw(json_array(kVaried, range))},
                      {"config_fields", JsonValue::raw(json_array(config_fields(FwdSm90Config{}), quoted))},
                      {"wgmma_widths", JsonValue::raw(json_array(kWgmmaWidths, number))},
                      {"smem_limit_bytes", kHopperSharedBytes},
                      {"rows", JsonValue::raw(json_array(kTiles, row))}});
}

std::optional<Sm90Tile> Sm90Tile::halved() const {
  Sm90Tile half = *this;
  half.block_n *= 2;
  for (int* part : {&half.consumers, &half.q_stages}) *part /= 2;
  for (int* stages : {&half.k_stages, &half.v_stages})
    *stages = std::max(*stages / 2, 2);  // one is loaded while one is multiplied
  return half.consumers * 2 == consumers && half.in_range() ? std::optional(half) : std::nullopt;
}

std::optional<Sm90Tile> find_sm90_tile(const Sm90Case& wanted) {
  if (const std::string forced = environment_variable(kForcedTile); !forced.empty()) return parse(forced.c_str());
  for (const Sm90Tile& tile : kTiles) {
    if (wanted.head_dim > tile.head_dim || wanted.head_dim_v > tile.head_dim_v) continue;
    if (wanted.area != tile.area || wanted.rows < tile.rows) continue;
    // Half a tile takes about 0.7 of the time of a full one, so it pays if no multiprocessor then has two. Under a
    // causal mask one may have two: the largest tile decides the time, and its second tile is among the smallest.
    const int64_t block_m = tile.consumers * kConsumerRows, full = wanted.area == Area::kCausal ? block_m : block_m / 2;
    const std::optional<Sm90Tile> half = wanted.rows_a_sm <= full ? tile.halved() : std::nullopt;
    return half ? half : tile;
  }
  return std::nullopt;
}

}  // namespace tessera::cuda
