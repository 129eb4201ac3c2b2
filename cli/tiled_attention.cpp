#include "tiled_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace tessera::cli {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// The keys that query i sees: [begin, end).
struct Keys {
  std::int64_t begin, end;
};

Keys visible_keys(const TiledProblem& problem, std::int64_t i) {
  const std::int64_t n = problem.length;
  return {problem.left < 0 ? 0 : std::max<std::int64_t>(0, i - problem.left),
          problem.right < 0 ? n : std::min(n, i + problem.right + 1)};
}

// With a program's mask every pair of a tile is asked.
TileKind kind_of_pairs(const TiledProblem& problem, const Tile& tile) {
  std::int64_t seen = 0;
  for (std::int64_t i = tile.row_begin; i < tile.row_end; ++i) {
    const Keys visible = visible_keys(problem, i);
    const std::int64_t end = std::min(tile.key_end, visible.end);
    for (std::int64_t j = std::max(tile.key_begin, visible.begin); j < end; ++j) {
      seen += problem.visible(i, j);
    }
  }
  if (seen == 0) return TileKind::kSkipped;
  return seen == tile.rows() * tile.keys() ? TileKind::kFull : TileKind::kPartial;
}

// Both ends of what a query sees move right with i, so the first and the last row of a tile decide.
TileKind kind_of(const TiledProblem& problem, const Tile& tile) {
  const Keys first = visible_keys(problem, tile.row_begin), last = visible_keys(problem, tile.row_end - 1);
  if (last.end <= tile.key_begin || first.begin >= tile.key_end) return TileKind::kSkipped;
  if (problem.visible) return kind_of_pairs(problem, tile);
  return last.begin <= tile.key_begin && first.end >= tile.key_end ? TileKind::kFull : TileKind::kPartial;
}

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t x = 0; x < n; ++x) sum += a[x] * b[x];
  return sum;
}

// One row and one block of keys: scores, new maximum, earlier sums rescaled to it, and the block's sums.
void update_row(const TiledProblem& problem, const Tile& tile, std::int64_t i, const double* q, const double* k,
                const double* v, std::vector<double>& s, RowState& row) {
  const std::int64_t d = problem.head_dim;
  const Keys visible = visible_keys(problem, i);
  const std::int64_t begin = std::max(tile.key_begin, visible.begin), end = std::min(tile.key_end, visible.end);
  if (begin >= end) return;  // other rows of the tile see these keys
  double m = row.m;
  for (std::int64_t j = begin; j < end; ++j) {
    s[j - begin] = problem.scale * dot(q + i * d, k + j * d, d);
    if (problem.score) s[j - begin] = problem.score(i, j, s[j - begin]);
    if (problem.visible && !problem.visible(i, j)) s[j - begin] = kMinusInfinity;
    m = std::max(m, s[j - begin]);
  }
  if (m == kMinusInfinity) return;             // all of these keys are hidden
  const double rescale = std::exp(row.m - m);  // exp(-inf) = 0 for the first keys
  row.l *= rescale;
  for (double& o : row.o) o *= rescale;
  for (std::int64_t j = begin; j < end; ++j) {
    const double p = std::exp(s[j - begin] - m);
    row.l += p;
    for (std::int64_t x = 0; x < d; ++x) row.o[x] += p * v[j * d + x];
  }
  row.m = m;
}

}  // namespace

TiledProblem tiled_problem(const tessera_plan& plan, std::int64_t block_m, std::int64_t block_n) {
  const tessera_problem& p = plan.problem;
  return {.length = plan.max_seqlen_q,
          .head_dim = plan.head_dim,
          .block_m = block_m,
          .block_n = block_n,
          .left = p.window_left,
          .right = p.causal ? 0 : p.window_right,
          .scale = p.scale};
}

const char* tile_kind_name(TileKind kind) {
  return kind == TileKind::kSkipped ? "skipped" : kind == TileKind::kPartial ? "partial" : "full";
}

std::vector<Tile> tiles_of(const TiledProblem& problem) {
  std::vector<Tile> tiles;
  std::set<std::int64_t> touched;
  for (std::int64_t i = 0; i * problem.block_m < problem.length; ++i) {
    const std::size_t begin = tiles.size();
    std::size_t last = 0;
    bool visited = false;
    for (std::int64_t j = 0; j * problem.block_n < problem.length; ++j) {
      Tile tile{.i = i,
                .j = j,
                .row_begin = i * problem.block_m,
                .row_end = std::min((i + 1) * problem.block_m, problem.length),
                .key_begin = j * problem.block_n,
                .key_end = std::min((j + 1) * problem.block_n, problem.length)};
      tile.kind = kind_of(problem, tile);
      if (tile.kind != TileKind::kSkipped) {
        tile.first = !visited;
        tile.first_touch = touched.insert(j).second;
        visited = true;
        last = static_cast<std::size_t>(j);
      }
      tiles.push_back(tile);
    }
    if (visited) tiles[begin + last].last = true;
  }
  return tiles;
}

double RowState::lse() const { return l > 0 ? m + std::log(l) : kMinusInfinity; }

std::vector<double> RowState::output() const {
  std::vector<double> result(o.size(), 0.0);
  if (l > 0) std::transform(o.begin(), o.end(), result.begin(), [this](double x) { return x / l; });
  return result;
}

void tiled_attention(const TiledProblem& problem, const std::vector<Tile>& tiles, const double* q, const double* k,
                     const double* v, double* o, double* lse,
                     const std::function<void(const Tile&, const std::vector<RowState>&)>& after_tile) {
  const std::int64_t d = problem.head_dim;
  std::vector<RowState> rows;
  std::vector<double> scores(static_cast<std::size_t>(problem.block_n));
  for (const Tile& tile : tiles) {
    if (tile.kind == TileKind::kSkipped) continue;
    if (tile.first) rows.assign(tile.rows(), {kMinusInfinity, 0, std::vector<double>(static_cast<std::size_t>(d))});
    for (std::int64_t r = 0; r < tile.rows(); ++r) {
      update_row(problem, tile, tile.row_begin + r, q, k, v, scores, rows[r]);
    }
    after_tile(tile, rows);
    if (!tile.last) continue;
    for (std::int64_t r = 0; r < tile.rows(); ++r) {
      std::ranges::copy(rows[r].output(), o + (tile.row_begin + r) * d);
      lse[tile.row_begin + r] = rows[r].lse();
    }
  }
}

}  // namespace tessera::cli
