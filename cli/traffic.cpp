#include "traffic.hpp"

#include <algorithm>

namespace tessera::cli {
namespace {

constexpr std::int64_t kFloat_bytes = 4;
constexpr std::int64_t kStatistics_bytes = 2 * kFloat_bytes;  // m and l of a row

}  // namespace

Traffic& Traffic::operator+=(const Traffic& other) {
  for (int level = 0; level < kLevels; ++level) {
    levels[level].read += other.levels[level].read;
    levels[level].written += other.levels[level].written;
  }
  return *this;
}

Traffic traffic_of_tile(const TiledProblem& problem, const Tile& tile, std::int64_t element_bytes) {
  const std::int64_t m = tile.rows(), n = tile.keys(), d = problem.head_dim;
  const std::int64_t q_bytes = m * d * element_bytes, kv_bytes = 2 * n * d * element_bytes;
  const std::int64_t state_bytes = m * (d * kFloat_bytes + kStatistics_bytes);  // O, m, l
  Traffic t;
  if (tile.first) {
    t[kHbm].read += q_bytes;
    t[kL2].read += q_bytes;
    t[kRegisters].written += state_bytes;  // O = 0, m = -inf, l = 0
  }
  if (tile.first_touch) t[kHbm].read += kv_bytes;
  t[kL2].read += kv_bytes;
  t[kSharedMemory].read += q_bytes + kv_bytes;
  // S, and P in its place; then O, m and l, rescaled and added to.
  t[kRegisters].written += m * n * (kFloat_bytes + element_bytes) + state_bytes;
  t[kRegisters].read += m * n * (kFloat_bytes + element_bytes) + state_bytes;
  if (tile.last) {
    const std::int64_t out_bytes = m * (d * element_bytes + kFloat_bytes);  // O and the LSE
    t[kRegisters].read += state_bytes;
    t[kL2].written += out_bytes;
    t[kHbm].written += out_bytes;
  }
  return t;
}

Traffic StandardTraffic::total() const {
  Traffic sum = scores;
  sum += softmax;
  sum += product;
  return sum;
}

StandardTraffic traffic_of_standard(const TiledProblem& problem, const std::vector<Tile>& tiles,
                                    std::int64_t element_bytes) {
  const std::int64_t length = problem.length, d = problem.head_dim;
  const std::int64_t tensor_bytes = length * d * element_bytes;
  StandardTraffic t;
  for (const Tile& tile : tiles) {
    const std::int64_t m = tile.rows(), n = tile.keys();
    const std::int64_t stored = m * n * element_bytes, values = m * n * kFloat_bytes,
                       accumulators = m * d * kFloat_bytes;
    const std::int64_t operands = (m + n) * d * element_bytes;  // Q, K
    t.scores[kL2].read += operands;
    t.scores[kSharedMemory].read += operands;
    t.scores[kRegisters].written += values;
    t.scores[kRegisters].read += values;
    t.scores[kL2].written += stored;
    t.scores[kHbm].written += stored;

    t.softmax[kHbm].read += stored;
    t.softmax[kL2].read += stored;
    t.softmax[kRegisters].written += values + stored;
    t.softmax[kRegisters].read += values + stored;
    t.softmax[kL2].written += stored;
    t.softmax[kHbm].written += stored;

    t.product[kHbm].read += stored;
    t.product[kL2].read += stored + n * d * element_bytes;  // P, V
    t.product[kSharedMemory].read += stored + n * d * element_bytes;
    t.product[kRegisters].read += accumulators;
    t.product[kRegisters].written += accumulators;
  }
  t.scores[kHbm].read += 2 * tensor_bytes;          // Q, K
  t.softmax[kL2].written += length * kFloat_bytes;  // the LSE
  t.softmax[kHbm].written += length * kFloat_bytes;
  t.product[kRegisters].written += length * d * kFloat_bytes;  // O = 0
  t.product[kRegisters].read += length * d * kFloat_bytes;     // to be stored
  t.product[kHbm].read += tensor_bytes;                        // V
  t.product[kL2].written += tensor_bytes;                      // O
  t.product[kHbm].written += tensor_bytes;
  return t;
}

TileMemory memory_of_tile(const TiledProblem& problem, std::int64_t element_bytes) {
  const std::int64_t m = std::min(problem.block_m, problem.length), n = std::min(problem.block_n, problem.length);
  const std::int64_t d = problem.head_dim;
  return {.shared_bytes = (m + 2 * n) * d * element_bytes,
          .register_bytes = m * (n + d) * kFloat_bytes + m * kStatistics_bytes};
}

}  // namespace tessera::cli
