#include "distributed/schedule.hpp"

#include <algorithm>
#include <iterator>

namespace tessera::distributed {

Mesh::Mesh(const tessera_ranks_problem& problem, const std::vector<tessera_chunk>& chunks)
    : problem_(problem), chunks_(chunks), band_(band_of(problem)), head_ranks_(problem.head_ranks) {
  groups_ = problem.ranks / head_ranks_;
  chunks_of_rank_.resize(static_cast<size_t>(problem.ranks));
  chunks_of_group_.resize(static_cast<size_t>(groups_));
  for (size_t c = 0; c < chunks.size(); ++c) {
    chunks_of_rank_[static_cast<size_t>(chunks[c].rank)].push_back(static_cast<int64_t>(c));
    chunks_of_group_[static_cast<size_t>(chunks[c].rank / head_ranks_)].push_back(static_cast<int64_t>(c));
  }
  for (const Chunks& of_group : chunks_of_group_) runs_of_group_.push_back(runs_of(of_group));
  for (int64_t distance = 1; distance < groups_; ++distance) {
    for (int64_t group = 0; group < groups_; ++group) {
      if (seen(group, (group - distance + groups_) % groups_).empty()) continue;
      distances_.push_back(distance);
      break;
    }
  }
}

Heads Mesh::heads_q(int32_t rank) const {
  const auto each = static_cast<int32_t>(problem_.heads_q / head_ranks_);
  return {static_cast<int32_t>(rank % head_ranks_) * each, each};
}

Heads Mesh::heads_kv(int32_t rank) const {
  const int64_t n = rank % head_ranks_, kv = problem_.heads_kv;
  return {static_cast<int32_t>(n * kv / head_ranks_), static_cast<int32_t>(std::max(kv / head_ranks_, int64_t{1}))};
}

// ---- pairs ----------------------------------------------------------------------------------------------------------

std::vector<Mesh::Run> Mesh::runs_of(const Chunks& chunks) const {
  std::vector<Run> runs;
  for (const int64_t c : chunks) {
    const tessera_chunk& chunk = chunks_[static_cast<size_t>(c)];
    const Range rows{chunk.begin, chunk.begin + chunk.length};
    if (!runs.empty() && runs.back().sequence == chunk.sequence && runs.back().rows.end == rows.begin) {
      runs.back().rows.end = rows.end;
      ++runs.back().chunks;
    } else {
      runs.push_back({chunk.sequence, rows, c, 1});
    }
  }
  return runs;
}

Mesh::Chunks Mesh::seen(int64_t queries, int64_t keys) const {
  const std::vector<Run>& runs = runs_of_group_[static_cast<size_t>(queries)];
  Chunks result;
  for (const int64_t c : chunks_of_group_[static_cast<size_t>(keys)]) {
    const tessera_chunk& chunk = chunks_[static_cast<size_t>(c)];
    auto run = std::lower_bound(runs.begin(), runs.end(), chunk.sequence,
                                [](const Run& r, int32_t sequence) { return r.sequence < sequence; });
    for (; run != runs.end() && run->sequence == chunk.sequence; ++run) {
      if (!cut_to_visible(band_, run->rows, {chunk.begin, chunk.begin + chunk.length})) continue;
      result.push_back(c);
      break;
    }
  }
  return result;
}

Mesh::Run Mesh::cropped(const Run& run, Range rows) const {
  int64_t first = run.chunk, end = run.chunk + run.chunks;
  const auto chunk = [this](int64_t c) -> const tessera_chunk& { return chunks_[static_cast<size_t>(c)]; };
  while (chunk(first).begin + chunk(first).length <= rows.begin) ++first;
  while (chunk(end - 1).begin >= rows.end) --end;
  return {run.sequence, rows, first, end - first};
}

tessera_rank_pair Mesh::pair_of(const Run& queries, const Run& keys, const Visible& visible) const {
  const Band local = local_band(band_, visible);
  const Run q = cropped(queries, visible.q), k = cropped(keys, visible.k);
  return {queries.sequence,
          0,
          visible.q.begin,
          visible.q.length(),
          visible.k.begin,
          visible.k.length(),
          local.left,
          local.right,
          q.chunk,
          q.chunks,
          k.chunk,
          k.chunks,
          visible_area(band_, visible)};
}

std::vector<tessera_rank_pair> Mesh::pairs_of(const std::vector<Run>& queries, const std::vector<Run>& keys) const {
  std::vector<tessera_rank_pair> pairs;
  auto key = keys.begin();
  for (const Run& query : queries) {
    while (key != keys.end() && key->sequence < query.sequence) ++key;
    for (auto k = key; k != keys.end() && k->sequence == query.sequence; ++k) {
      if (const auto visible = cut_to_visible(band_, query.rows, k->rows))
        pairs.push_back(pair_of(query, *k, *visible));
    }
  }
  return pairs;
}

std::pair<std::vector<Mesh::Run>, std::vector<Mesh::Run>> Mesh::divide(const std::vector<Run>& queries,
                                                                       const Chunks& keys) const {
  std::vector<Run> none, some;
  for (const Run& run : queries) {
    std::vector<Range> seeing;
    for (const int64_t c : keys) {
      const tessera_chunk& chunk = chunks_[static_cast<size_t>(c)];
      if (chunk.sequence != run.sequence) continue;
      const auto visible = cut_to_visible(band_, run.rows, {chunk.begin, chunk.begin + chunk.length});
      if (!visible) continue;
      const int64_t first = (visible->q.begin - run.rows.begin) / problem_.chunk_rows;
      const int64_t last = (visible->q.end - run.rows.begin + problem_.chunk_rows - 1) / problem_.chunk_rows;
      seeing.push_back({run.rows.begin + first * problem_.chunk_rows,
                        std::min(run.rows.begin + last * problem_.chunk_rows, run.rows.end)});
    }
    int64_t row = run.rows.begin;
    const auto add = [&run](std::vector<Run>& runs, int64_t begin, int64_t end) {
      if (begin < end) runs.push_back({run.sequence, {begin, end}, run.chunk, run.chunks});
    };
    for (const Range& rows : united(std::move(seeing))) {
      add(none, row, rows.begin), add(some, rows.begin, rows.end);
      row = rows.end;
    }
    add(none, row, run.rows.end);
  }
  return {none, some};
}

// Splits a pair at the row that halves its area: the rows below it, and the others.
std::vector<tessera_rank_pair> Mesh::cut(const Band& band, const tessera_rank_pair& whole) {
  const Range q{whole.q_begin, whole.q_begin + whole.q_length}, k{whole.k_begin, whole.k_begin + whole.k_length};
  int64_t below = q.begin, above = q.end;
  while (above - below > 1) {
    const int64_t row = below + (above - below) / 2;
    const auto visible = cut_to_visible(band, {q.begin, row}, k);
    (visible && 2 * visible_area(band, *visible) > whole.area ? above : below) = row;
  }
  std::vector<tessera_rank_pair> parts;
  for (const Range& rows : {Range{q.begin, below}, Range{below, q.end}}) {
    const auto visible = cut_to_visible(band, rows, k);
    if (!visible) continue;
    const Band local = local_band(band, *visible);
    tessera_rank_pair part = whole;
    part.q_begin = visible->q.begin, part.q_length = visible->q.length();
    part.k_begin = visible->k.begin, part.k_length = visible->k.length();
    part.window_left = local.left, part.window_right = local.right;
    part.area = visible_area(band, *visible);
    parts.push_back(part);
  }
  return parts;
}

void Mesh::halve(const Band& band, std::vector<tessera_rank_pair>& first, std::vector<tessera_rank_pair>& last) {
  if (first.size() == 1) first = cut(band, first[0]);
  int64_t all = 0, kept = 0;
  for (const tessera_rank_pair& pair : first) all += pair.area;
  std::vector<tessera_rank_pair> ordered = std::move(first);
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.area > b.area; });
  first.clear();
  for (const tessera_rank_pair& pair : ordered) {
    const bool now = 2 * kept + pair.area < all;
    (now ? first : last).push_back(pair);
    if (now) kept += pair.area;
  }
}

// ---- steps ----------------------------------------------------------------------------------------------------------

class Mesh::Builder {
 public:
  Builder(const Mesh& mesh, int32_t rank) : mesh_(mesh), p_(mesh.problem_), rank_(rank) {
    group_ = rank / mesh.head_ranks_;
    place_ = rank % mesh.head_ranks_;
  }

  Schedule build() {
    const bool backward = p_.direction == TESSERA_BACKWARD;
    if (mesh_.head_ranks_ > 1) {
      exchange_rows(backward ? std::vector{TESSERA_TRAVELS_D_O} : std::vector{TESSERA_TRAVELS_Q, TESSERA_TRAVELS_KV},
                    true);
    }
    if (p_.strategy == TESSERA_STRATEGY_ALL_GATHER) {
      gather(backward);
    } else {
      ring(backward);
    }
    if (mesh_.head_ranks_ > 1) {
      exchange_rows(backward ? std::vector{TESSERA_TRAVELS_D_Q, TESSERA_TRAVELS_D_KV} : std::vector{TESSERA_TRAVELS_O},
                    false);
    }
    return std::move(schedule_);
  }

 private:
  const std::vector<Run>& own_runs() const { return mesh_.runs_of_group_[static_cast<size_t>(group_)]; }
  int64_t group_at(int64_t distance) const { return (group_ + distance + mesh_.groups_) % mesh_.groups_; }
  int32_t peer_in(int64_t group) const { return static_cast<int32_t>(group * mesh_.head_ranks_ + place_); }

  void begin_step() {
    tessera_rank_step step{};
    step.first_pair = static_cast<int64_t>(schedule_.pairs.size());
    step.first_transfer = static_cast<int64_t>(schedule_.transfers.size());
    schedule_.steps.push_back(step);
  }

  void compute(const std::vector<tessera_rank_pair>& pairs) {
    for (const tessera_rank_pair& pair : pairs) schedule_.steps.back().area += pair.area;
    schedule_.pairs.insert(schedule_.pairs.end(), pairs.begin(), pairs.end());
    schedule_.steps.back().num_pairs += static_cast<int64_t>(pairs.size());
  }

  int64_t row_bytes(tessera_travels travels, bool partial) const {
    const auto element = static_cast<int64_t>(partial ? sizeof(float) : tessera_dtype_bytes(p_.dtype));
    switch (travels) {
      case TESSERA_TRAVELS_Q:
      case TESSERA_TRAVELS_D_Q:
        return p_.head_dim * element;
      case TESSERA_TRAVELS_O:
        return p_.head_dim_v * element + static_cast<int64_t>(sizeof(float));
      case TESSERA_TRAVELS_D_O:
        return p_.head_dim_v * element;
      default:
        return (p_.head_dim + p_.head_dim_v) * element;
    }
  }

  void move(bool receive, int32_t peer, tessera_travels travels, const Chunks& chunks, Heads heads, bool partial) {
    tessera_rank_step& step = schedule_.steps.back();
    for (const int64_t c : chunks) {
      const int64_t rows = mesh_.chunks_[static_cast<size_t>(c)].length * p_.batch;
      const int64_t bytes = rows * heads.count * row_bytes(travels, partial);
      schedule_.transfers.push_back({receive, peer, travels, partial, c, heads.first, heads.count, bytes});
      (receive ? step.received_bytes : step.sent_bytes) += bytes;
      ++step.num_transfers;
    }
  }

  // The heads of a travelling tensor that `rank` computes.
  Heads heads(tessera_travels travels, int32_t rank) const {
    const bool kv = travels == TESSERA_TRAVELS_KV || travels == TESSERA_TRAVELS_D_KV;
    return kv ? mesh_.heads_kv(rank) : mesh_.heads_q(rank);
  }

  // Within the group. `in`: sends every member its rows of the heads that it computes; otherwise returns the results
  // for them.
  void exchange_rows(const std::vector<tessera_travels>& all, bool in) {
    begin_step();
    for (int64_t n = 1; n < mesh_.head_ranks_; ++n) {
      const auto member = [&](int64_t place) {
        return static_cast<int32_t>(group_ * mesh_.head_ranks_ + (place + mesh_.head_ranks_) % mesh_.head_ranks_);
      };
      const int32_t to = member(place_ + n), from = member(place_ - n);
      for (const tessera_travels travels : all) {
        const bool partial = travels == TESSERA_TRAVELS_D_KV && mesh_.sums_heads();
        const auto rows_of = [&](int32_t rank) -> const Chunks& {
          return mesh_.chunks_of_rank_[static_cast<size_t>(rank)];
        };
        move(false, to, travels, rows_of(in ? rank_ : to), heads(travels, in ? to : rank_), partial);
        move(true, from, travels, rows_of(in ? from : rank_), heads(travels, in ? rank_ : from), partial);
      }
    }
  }

  // K and V of the groups at `distance`, for the next step.
  void fetch_keys(int64_t distance) {
    const int64_t to = group_at(distance), from = group_at(-distance);
    move(false, peer_in(to), TESSERA_TRAVELS_KV, mesh_.seen(to, group_), mesh_.heads_kv(rank_), false);
    move(true, peer_in(from), TESSERA_TRAVELS_KV, mesh_.seen(group_, from), mesh_.heads_kv(rank_), false);
  }

  // Partial dK and dV, computed one step before, to the owners of the keys.
  void return_gradients(int64_t distance) {
    const int64_t to = group_at(-distance), from = group_at(distance);
    move(false, peer_in(to), TESSERA_TRAVELS_D_KV, mesh_.seen(group_, to), mesh_.heads_kv(rank_), true);
    move(true, peer_in(from), TESSERA_TRAVELS_D_KV, mesh_.seen(from, group_), mesh_.heads_kv(rank_), true);
  }

  // Backward, half of a rank's own pairs come last, so that they overlap the exchange of the last partial gradients.
  void ring(bool backward) {
    const std::vector<int64_t>& distances = mesh_.distances_;
    std::vector<tessera_rank_pair> first = mesh_.pairs_of(own_runs(), own_runs()), last;
    if (backward && !distances.empty()) halve(mesh_.band_, first, last);
    begin_step();
    compute(first);
    for (size_t n = 0; n < distances.size(); ++n) {
      fetch_keys(distances[n]);
      if (backward && n > 1) return_gradients(distances[n - 2]);
      begin_step();
      compute(mesh_.pairs_of(own_runs(), mesh_.runs_of(mesh_.seen(group_, group_at(-distances[n])))));
    }
    if (!backward || distances.empty()) return;
    if (distances.size() > 1) return_gradients(distances[distances.size() - 2]);
    begin_step();
    compute(last);
    return_gradients(distances.back());
  }

  // No row needs a merge: those that see only this group's keys are computed while the others' keys arrive, and all
  // other rows after that. Backward, half of the former come last, so that they overlap the exchange of gradients.
  void gather(bool backward) {
    Chunks fetched;
    begin_step();
    for (const int64_t distance : mesh_.distances_) {
      fetch_keys(distance);
      const Chunks seen = mesh_.seen(group_, group_at(-distance));
      fetched.insert(fetched.end(), seen.begin(), seen.end());
    }
    const auto [alone, others] = mesh_.divide(own_runs(), fetched);
    std::vector<tessera_rank_pair> first = mesh_.pairs_of(alone, own_runs()), last;
    if (mesh_.distances_.empty()) return compute(first);
    if (backward && !first.empty()) halve(mesh_.band_, first, last);
    compute(first);
    begin_step();
    Chunks all = mesh_.chunks_of_group_[static_cast<size_t>(group_)];
    all.insert(all.end(), fetched.begin(), fetched.end());
    std::sort(all.begin(), all.end());
    compute(mesh_.pairs_of(others, mesh_.runs_of(all)));
    if (!backward) return;
    begin_step();
    compute(last);
    for (const int64_t distance : mesh_.distances_) return_gradients(distance);
  }

  const Mesh& mesh_;
  const tessera_ranks_problem& p_;
  int32_t rank_;
  int64_t group_, place_;
  Schedule schedule_;
};

Schedule Mesh::schedule(int32_t rank) const { return Builder(*this, rank).build(); }

}  // namespace tessera::distributed
