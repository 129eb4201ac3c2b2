#include "distributed/layout.hpp"

#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>

#include "distributed/band.hpp"

namespace tessera::distributed {
namespace {

struct Part {  // rows of one sequence
  int32_t sequence;
  Range rows;
};

// Rows [begin, end) of the concatenated sequences, cut where a sequence ends.
void add_rows(const tessera_ranks_problem& p, Range rows, int32_t rank, std::vector<tessera_chunk>& chunks) {
  int64_t first = 0;
  for (int64_t s = 0; s < p.num_sequences; first += p.lengths[s++]) {
    const Range part{std::max(rows.begin - first, int64_t{0}), std::min(rows.end - first, p.lengths[s])};
    if (part.length() > 0) chunks.push_back({rank, static_cast<int32_t>(s), part.begin, part.length(), 0});
  }
}

// ---- planned --------------------------------------------------------------------------------------------------------

// Rows that are assigned to one rank together: a whole sequence, or its chunks j and 2m - 1 - j of 2m.
struct Item {
  double area;
  int64_t rows;
  std::vector<Part> parts;
};

// Areas are causal whatever the mask is, so that the layout of rows is the same for every call: without a mask a
// sequence's area is twice the causal one, and with a narrow window it is proportional to rows, which are balanced.
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

// A sequence whose area exceeds 1 / kShare of a rank's area is cut for enough ranks that each part is smaller. More
// cuts do not help once areas are evened out.
constexpr double kShare = 2;

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
        std::max(std::min(p.chunk_rows, item.rows / (8 * ranks)), int64_t{1});  // small compared with a chunk
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

double area_of(const tessera_ranks_problem& p, const tessera_chunk& chunk) {
  return item_of(p, {{chunk.sequence, {chunk.begin, chunk.begin + chunk.length}}}).area;
}

// Assigns the item with the largest area first, to the rank with the least area. Rows that exceed the rank's room are
// cut off and become a new item.
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
  double left_area = all_area, left_rows = static_cast<double>(rows_per_rank) * p.ranks;
  while (!queue.empty()) {
    const Item next = items[queue.top()];
    queue.pop();
    size_t best = loads.size();
    double best_load = 0;
    for (size_t r = 0; r < loads.size(); ++r) {  // ranks without room for the whole item come last
      if (loads[r].rows == rows_per_rank) continue;
      // The rank's area if its other rows are filled with average rows of the rest.
      const double room = static_cast<double>(rows_per_rank - loads[r].rows);
      const bool fits = loads[r].rows + next.rows <= rows_per_rank;
      const double load = loads[r].area + room * left_area / left_rows + (fits ? 0 : 4 * all_area);
      if (best == loads.size() || load < best_load) best = r, best_load = load;
    }
    Load& load = loads[best];
    int64_t room = rows_per_rank - load.rows;
    std::vector<Part> taken, left;
    for (const Part& part : next.parts) {
      const int64_t fit = std::min(room, part.rows.length());
      if (fit > 0) taken.push_back({part.sequence, {part.rows.begin, part.rows.begin + fit}});
      if (fit < part.rows.length()) left.push_back({part.sequence, {part.rows.begin + fit, part.rows.end}});
      room -= fit;
    }
    const Item mine = item_of(p, taken);
    load.area += mine.area, load.rows += mine.rows;
    left_area -= mine.area, left_rows -= static_cast<double>(mine.rows);
    for (const Part& part : taken) {
      chunks.push_back({static_cast<int32_t>(best), part.sequence, part.rows.begin, part.rows.length(), 0});
    }
    if (left.empty()) continue;
    items.push_back(item_of(p, left));
    queue.push(items.size() - 1);
  }
  return chunks;
}

// Between the ranks with the most and the least area, exchanges the last rows of the longest reach of one for as many
// first rows of the shortest reach of the other, until areas are equal within 1 % or the number of swaps is exhausted.
void even_out(const tessera_ranks_problem& p, std::vector<tessera_chunk>& chunks) {
  std::vector<double> areas(static_cast<size_t>(p.ranks), 0);
  double mean = 0;
  for (const tessera_chunk& chunk : chunks) areas[static_cast<size_t>(chunk.rank)] += area_of(p, chunk);
  for (const double area : areas) mean += area / p.ranks;
  for (int32_t swap = 0; swap < 4 * p.ranks; ++swap) {
    const auto [least, most] = std::minmax_element(areas.begin(), areas.end());
    if (*most <= 1.01 * mean) return;
    size_t from = chunks.size(), to = chunks.size();
    for (size_t c = 0; c < chunks.size(); ++c) {
      const tessera_chunk& chunk = chunks[c];
      const auto end = [&](size_t n) { return chunks[n].begin + chunks[n].length; };
      if (chunk.rank == most - areas.begin() && (from == chunks.size() || end(c) > end(from))) from = c;
      if (chunk.rank == least - areas.begin() && (to == chunks.size() || chunk.begin < chunks[to].begin)) to = c;
    }
    tessera_chunk &heavy = chunks[from], &light = chunks[to];
    // Moving n rows lowers the area by n (reach - n): takes the least n that moves half of the difference, or the n
    // that moves the most.
    const auto reach = static_cast<double>(heavy.begin + heavy.length - light.begin);
    const double wanted = (*most - *least) / 2, root = reach * reach - 4 * wanted;
    const auto best = static_cast<int64_t>(root > 0 ? (reach - std::sqrt(root)) / 2 : reach / 2);
    const int64_t rows = std::min({best, heavy.length, light.length});
    if (rows < 1) return;
    const tessera_chunk tail{light.rank, heavy.sequence, heavy.begin + heavy.length - rows, rows, 0};
    const tessera_chunk head{heavy.rank, light.sequence, light.begin, rows, 0};
    const double moved = area_of(p, tail) - area_of(p, head);
    if (moved <= 0) return;
    *most -= moved, *least += moved;
    heavy.length -= rows;
    light.begin += rows, light.length -= rows;
    chunks.push_back(tail);
    chunks.push_back(head);
    std::erase_if(chunks, [](const tessera_chunk& chunk) { return chunk.length == 0; });
  }
}

void sort(std::vector<tessera_chunk>& chunks) {
  std::sort(chunks.begin(), chunks.end(), [](const tessera_chunk& a, const tessera_chunk& b) {
    return std::pair(a.sequence, a.begin) < std::pair(b.sequence, b.begin);
  });
}

// Joins consecutive chunks of a rank.
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
  if (p.layout == TESSERA_RANKS_PLANNED) {
    chunks = deal(p, each);
    even_out(p, chunks);
    join(chunks);
  }
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
