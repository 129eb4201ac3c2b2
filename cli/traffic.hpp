// The bytes that attention moves at each level of a GPU's memory, by tiles and in three steps. The model, which
// docs/guide/how-it-works.md explains:
//   - A level's bytes are what the next level, nearer to the arithmetic, reads from it and writes to it.
//   - Q, K, V, O (and the stored S and P of standard attention) have the problem's element size; S in registers, O
//     while it is summed, m, l and the LSE are float32.
//   - L2 holds what one head needs, so each tensor crosses to and from HBM once. A matrix of scores does not stay
//     there.
//   - A product reads its operands from shared memory once a tile, P from registers; it reads and writes accumulators.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tiled_attention.hpp"

namespace tessera::cli {

enum Level { kRegisters, kSharedMemory, kL2, kHbm, kLevels };
inline constexpr std::array<const char*, kLevels> kLevelNames = {"registers", "shared_memory", "l2", "hbm"};

struct LevelBytes {
  std::int64_t read = 0, written = 0;
  std::int64_t total() const { return read + written; }
};

struct Traffic {
  std::array<LevelBytes, kLevels> levels;
  LevelBytes& operator[](Level level) { return levels[level]; }
  const LevelBytes& operator[](Level level) const { return levels[level]; }
  Traffic& operator+=(const Traffic& other);
};

// One visited tile of tiled attention.
Traffic traffic_of_tile(const TiledProblem& problem, const Tile& tile, std::int64_t element_bytes);

// Standard attention's three kernels, its products cut into tiles of the same size. It visits all tiles, whatever the
// mask.
struct StandardTraffic {
  Traffic scores, softmax, product;
  Traffic total() const;
};
StandardTraffic traffic_of_standard(const TiledProblem& problem, const std::vector<Tile>& tiles,
                                    std::int64_t element_bytes);

// The data that a multiprocessor holds for a tile.
struct TileMemory {
  std::int64_t shared_bytes;    // Q, K, V
  std::int64_t register_bytes;  // S, O, m, l
};
TileMemory memory_of_tile(const TiledProblem& problem, std::int64_t element_bytes);

}  // namespace tessera::cli
