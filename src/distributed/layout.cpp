#include "distributed/layout.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

#include "distributed/band.hpp"

namespace tessera::distributed {
namespace {

struct Part {  // rows of one sequence
  int32_t sequence;
  Range rows;
};

// Rows [begin, end) of all sequences, one after another, cut where a sequence ends.
void add_rows(const tessera_ranks_problem& p, Range rows, int32_t rank, std::vector<tessera_chunk>& chunks) {
  int64_t first = 0;
  for (int64_t s = 0; s < p.num_sequences; first += p.lengths[s++]) {
    const Range part{std::max(rows.begin - first, int64_t{0}), std::min(rows.end - first, p.lengths[s])};
    if (part.length() > 0) chunks.push_back({rank, static_cast<int32_t>(s), part.begin, part.length(), 0});
  }
}

// ---- planned --------------------------------------------------------------------------------------------------------

// What one rank gets together: a whole sequence, or its chunks j and 2m - 1 - j of 2m.
struct Item {
  double area;
  int64_t rows;
  std::vector<Part> parts;
};

// Areas are causal ones whatever the mask, so that rows lie where they lie for every call: without a mask a sequence's
// area is twice that, and a narrow window's is in proportion to rows, which are equal.
constexpr Band kCausal{-1, 0};

Item item_of(const tessera_ranks_problem& p, std::vector<Part> parts) {
  Item item{0, 0, std::move(parts)};
  for (const Part& part : item.parts) {
    item.rows += part.rows.length();
    const auto visible = cut_to_visible(kCausal, part.rows, {0, p.lengths[part.sequence]});
    if (visible) item.area += static_cast<double>(visible_area(kCausal, *visible));
  }
  return item;
}

// A sequence whose area is more than a kShare-th of a rank's is cut for so many ranks that their shares are less.
constexpr double kShare = 8;

std::vector<Item> make_items(const tessera_ranks_problem& p) {
  double area = 0;
  std::vector<Item> whole, items;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    if (p.lengths[s] == 0) continue;
    whole.push_back(item_of(p, {{static_cast<int32_t>(s), {0, p.lengths[s]}}}));
    area += whole.back().area;
  }
  for (Item& item : whole) {
    const double share = area > 0 ? item.area / area * p.ranks * kShare : 0;
    const auto ranks = std::min(static_cast<int64_t>(std::min<double>(share, p.ranks)), item.rows / 2);
    if (ranks <= 1) {
      items.push_back(std::move(item));
      continue;
    }
    const Part all = item.parts[0];
    const int64_t unit =
        std::max(std::min(p.chunk_rows, item.rows / (8 * ranks)), int64_t{1});  // of a small part of a chunk
    const auto border = [&](int64_t n) {
      return n == 2 * ranks ? item.rows : item.rows * n / (2 * ranks) / unit * unit;
    };
    for (int64_t n = 0; n < ranks; ++n) {
      const int64_t m = 2 * ranks - 1 - n;
      items.push_back(
          item_of(p, {{all.sequence, {border(n), border(n + 1)}}, {all.sequence, {border(m), border(m + 1)}}}));
    }
  }
  return items;
}

// The largest area first, to the rank that then has the least; what a rank has no room for is cut off, and is an item
// again.
std::vector<tessera_chunk> deal(const tessera_ranks_problem& p, int64_t rows_per_rank) {
  std::vector<Item> items = make_items(p);
  double all_area = 0;
  for (const Item& item : items) all_area += item.area;
  const auto smaller = [&items](size_t a, size_t b) {
    return std::tuple(items[a].area, items[a].rows, b) < std::tuple(items[b].area, items[b].rows, a);
  };
  std::priority_queue<size_t, std::vector<size_t>, decltype(smaller)> queue(smaller);
  for (size_t n = 0; n < items.size(); ++n) queue.push(n);
  struct Load {
    double area = 0;
    int64_t rows = 0;
  };
  std::vector<Load> loads(static_cast<size_t>(p.ranks));
  std::vector<tessera_chunk> chunks;
  while (!queue.empty()) {
    const size_t next = queue.top();
    queue.pop();
    size_t best = loads.size();
    double best_load = 0;
    for (size_t r = 0; r < loads.size(); ++r) {  // what does not fit whole comes after all that does
      if (loads[r].rows == rows_per_rank) continue;
      const bool fits = loads[r].rows + items[next].rows <= rows_per_rank;
      const double load = loads[r].area + (fits ? 0 : all_area);
      if (best == loads.size() || load < best_load) best = r, best_load = load;
    }
    Load& load = loads[best];
    int64_t room = rows_per_rank - load.rows;
    std::vector<Part> taken, left;
    for (const Part& part : items[next].parts) {
      const int64_t fit = std::min(room, part.rows.length());
      if (fit > 0) taken.push_back({part.sequence, {part.rows.begin, part.rows.begin + fit}});
      if (fit < part.rows.length()) left.push_back({part.sequence, {part.rows.begin + fit, part.rows.end}});
      room -= fit;
    }
    const Item mine = item_of(p, taken);
    load.area += mine.area, load.rows += mine.rows;
    for (const Part& part : taken) {
      chunks.push_back({static_cast<int32_t>(best), part.sequence, part.rows.begin, part.rows.length(), 0});
    }
    if (left.empty()) continue;
    items.push_back(item_of(p, left));
    queue.push(items.size() - 1);
  }
  return chunks;
}

void sort(std::vector<tessera_chunk>& chunks) {
  std::sort(chunks.begin(), chunks.end(), [](const tessera_chunk& a, const tessera_chunk& b) {
    return std::pair(a.sequence, a.begin) < std::pair(b.sequence, b.begin);
  });
}

// Two chunks of a rank that follow each other become one.
void join(std::vector<tessera_chunk>& chunks) {
  sort(chunks);
  std::vector<tessera_chunk> joined;
  for (const tessera_chunk& chunk : chunks) {
    const bool follows = !joined.empty() && joined.back().rank == chunk.rank &&
                         joined.back().sequence == chunk.sequence &&
                         joined.back().begin + joined.back().length == chunk.begin;
    if (follows)
      joined.back().length += chunk.length;
    else
      joined.push_back(chunk);
  }
  chunks = std::move(joined);
}

}  // namespace

std::vector<tessera_chunk> make_chunks(const tessera_ranks_problem& p) {
  int64_t rows = 0;
  for (int64_t s = 0; s < p.num_sequences; ++s) rows += p.lengths[s];
  std::vector<tessera_chunk> chunks;
  const int64_t each = rows / p.ranks, half = each / 2;
  if (p.layout == TESSERA_RANKS_PLANNED) join(chunks = deal(p, each));
  for (int32_t r = 0; r < p.ranks; ++r) {
    const int64_t mirrored = 2 * int64_t{p.ranks} - 1 - r;
    if (p.layout == TESSERA_RANKS_CONTIGUOUS) add_rows(p, {r * each, (r + 1) * each}, r, chunks);
    if (p.layout == TESSERA_RANKS_ZIG_ZAG) {
      add_rows(p, {r * half, (r + 1) * half}, r, chunks);
      add_rows(p, {mirrored * half, (mirrored + 1) * half}, r, chunks);
    }
  }
  sort(chunks);
  std::vector<int64_t> next(static_cast<size_t>(p.ranks), 0);
  for (tessera_chunk& chunk : chunks) {
    chunk.row = next[static_cast<size_t>(chunk.rank)];
    next[static_cast<size_t>(chunk.rank)] += chunk.length;
  }
  return chunks;
}

}  // namespace tessera::distributed
