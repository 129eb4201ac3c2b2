// Schedules of many ranks, checked without a device: by counting every (query, key) pair, by executing all ranks' lists
// at once, and by tracking the transferred data.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/distributed.hpp"

namespace {

struct Problem : tessera_ranks_problem {
  std::vector<int64_t> rows;

  explicit Problem(int32_t number_of_ranks, std::vector<int64_t> sequence_rows) : rows(std::move(sequence_rows)) {
    tessera_ranks_problem_init(this);
    ranks = number_of_ranks;
    num_sequences = static_cast<int64_t>(rows.size());
    lengths = rows.data();
    heads_q = 8, heads_kv = 4, head_dim = 16;
  }
  Problem(const Problem& other) : tessera_ranks_problem(other), rows(other.rows) { lengths = rows.data(); }
  Problem& operator=(const Problem&) = delete;

  int64_t all_rows() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  bool sees(int64_t i, int64_t j) const {
    if (causal && j > i) return false;
    return (window_left < 0 || j >= i - window_left) && (window_right < 0 || j <= i + window_right);
  }
  std::string text() const {
    std::string text = std::string(tessera_strategy_name(strategy)) + " " + tessera_rank_layout_name(layout) +
                       " ranks " + std::to_string(ranks) + " head_ranks " + std::to_string(head_ranks) + " direction " +
                       std::to_string(direction) + " causal " + std::to_string(causal) + " window " +
                       std::to_string(window_left) + " " + std::to_string(window_right) + " heads " +
                       std::to_string(heads_q) + "/" + std::to_string(heads_kv) + " rows";
    for (const int64_t n : rows) text += " " + std::to_string(n);
    return text;
  }
};

tessera_ranks_plan plan_of(const Problem& problem) {
  tessera_ranks_plan plan{};
  const tessera_status status = tessera_make_ranks_plan(&problem, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message << " for " << problem.text();
  return plan;
}

std::string refusal(const Problem& problem) {
  tessera_ranks_plan plan{};
  const tessera_status status = tessera_make_ranks_plan(&problem, &plan);
  EXPECT_NE(status.code, TESSERA_OK) << problem.text();
  EXPECT_EQ(plan.struct_size, 0u);
  return status.message;
}

using tessera::RankSchedule;

std::vector<RankSchedule> schedules_of(const tessera_ranks_plan& plan) {
  std::vector<RankSchedule> all;
  for (int32_t rank = 0; rank < plan.problem.ranks; ++rank) {
    all.emplace_back(plan, rank);
    const tessera_rank_schedule& header = all.back().header();
    EXPECT_EQ(header.bytes, tessera_ranks_schedule_bytes(&plan, rank));
    EXPECT_EQ(header.rank, rank);
    EXPECT_EQ(header.hash, plan.hash);
  }
  return all;
}

// ---- properties of every schedule -----------------------------------------------------------------------------------

// Every row of every sequence is in one chunk, and a rank's chunks are contiguous among its rows.
void expect_layout(const Problem& problem, const tessera_ranks_plan& plan, std::span<const tessera_chunk> chunks) {
  ASSERT_EQ(static_cast<int64_t>(chunks.size()), plan.num_chunks);
  std::vector<int64_t> next_row(static_cast<size_t>(problem.ranks), 0);
  std::vector<int64_t> next_position(problem.rows.size(), 0);
  for (const tessera_chunk& chunk : chunks) {
    ASSERT_GT(chunk.length, 0);
    EXPECT_EQ(chunk.begin, next_position[static_cast<size_t>(chunk.sequence)]);
    EXPECT_EQ(chunk.row, next_row[static_cast<size_t>(chunk.rank)]);
    next_position[static_cast<size_t>(chunk.sequence)] += chunk.length;
    next_row[static_cast<size_t>(chunk.rank)] += chunk.length;
  }
  EXPECT_EQ(next_position, problem.rows);
  for (const int64_t rows : next_row) EXPECT_EQ(rows, plan.rows_per_rank);
}

// As a call computes it, by a pair's own window: each visible (head, query, key) once, and nothing else.
void expect_each_pair_once(const Problem& problem, const std::vector<RankSchedule>& all) {
  for (size_t s = 0; s < problem.rows.size(); ++s) {
    const int64_t n = problem.rows[s];
    std::vector<int> seen(static_cast<size_t>(problem.heads_q * n * n), 0);
    for (const RankSchedule& rank : all) {
      for (const tessera_rank_step& step : rank.steps()) {
        for (const tessera_rank_pair& pair : rank.pairs(step)) {
          if (pair.sequence != static_cast<int64_t>(s)) continue;
          int64_t area = 0;
          for (int64_t i = 0; i < pair.q_length; ++i) {
            for (int64_t j = 0; j < pair.k_length; ++j) {
              const int64_t diagonal = i + pair.k_length - pair.q_length;
              if (pair.window_left >= 0 && j < diagonal - pair.window_left) continue;
              if (pair.window_right >= 0 && j > diagonal + pair.window_right) continue;
              ++area;
              for (int32_t h = 0; h < rank.header().num_heads_q; ++h) {
                const int64_t head = rank.header().first_head_q + h;
                ++seen[static_cast<size_t>((head * n + pair.q_begin + i) * n + pair.k_begin + j)];
              }
            }
          }
          EXPECT_EQ(area, pair.area);
        }
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t h = 0; h < problem.heads_q; ++h) {
          ASSERT_EQ(seen[static_cast<size_t>((h * n + i) * n + j)], problem.sees(i, j) ? 1 : 0)
              << "sequence " << s << ", head " << h << ", query " << i << ", key " << j;
        }
      }
    }
  }
}

using Message =
    std::tuple<int32_t, int64_t, int32_t, int32_t, int32_t, int64_t>;  // travels, chunk, heads, partial, bytes
Message message_of(const tessera_rank_transfer& t) {
  return {t.travels, t.chunk, t.first_head, t.num_heads, t.partial, t.bytes};
}

// All ranks walk their lists: a rank leaves a step when its peers have reached the same one, with the same messages in
// the same order.
void expect_no_deadlock(const std::vector<RankSchedule>& all) {
  std::vector<size_t> at(all.size(), 0);
  const size_t steps = all[0].steps().size();
  for (const RankSchedule& rank : all) ASSERT_EQ(rank.steps().size(), steps);
  const auto messages = [&](size_t rank, size_t step, bool receive, size_t peer) {
    std::vector<Message> result;
    for (const tessera_rank_transfer& t : all[rank].transfers(all[rank].steps()[step])) {
      if ((t.receive != 0) == receive && t.peer == static_cast<int32_t>(peer)) result.push_back(message_of(t));
    }
    return result;
  };
  // Any order of the ranks: the last is tried first, so that nothing relies on luck.
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = all.size(); r-- > 0;) {
      if (at[r] == steps) continue;
      bool complete = true;
      for (const tessera_rank_transfer& t : all[r].transfers(all[r].steps()[at[r]])) {
        const auto peer = static_cast<size_t>(t.peer);
        ASSERT_NE(peer, r);
        complete = complete && at[peer] >= at[r];
      }
      if (!complete) continue;
      ++at[r];
      moved = true;
    }
  }
  for (size_t r = 0; r < all.size(); ++r) EXPECT_EQ(at[r], steps) << "rank " << r << " waits forever";
  for (size_t step = 0; step < steps; ++step) {
    for (size_t from = 0; from < all.size(); ++from) {
      for (size_t to = 0; to < all.size(); ++to) {
        EXPECT_EQ(messages(from, step, false, to), messages(to, step, true, from));
      }
    }
  }
}

// Follows the data. A rank computes from rows that it holds when a step begins, and the results of a row end, complete,
// at the row's owner: each pair adds its area to the totals of its queries and its keys.
class Flow {
 public:
  Flow(const Problem& problem, const std::vector<RankSchedule>& all)
      : problem_(problem), all_(all), chunks_(all[0].chunks()), backward_(problem.direction == TESSERA_BACKWARD) {
    states_.resize(all.size());
    for (size_t r = 0; r < all.size(); ++r) {
      for (size_t c = 0; c < chunks_.size(); ++c) {
        if (chunks_[c].rank != static_cast<int32_t>(r)) continue;
        hold(r, TESSERA_TRAVELS_Q, c, 0, problem.heads_q);
        hold(r, TESSERA_TRAVELS_D_O, c, 0, problem.heads_q);
        hold(r, TESSERA_TRAVELS_KV, c, 0, problem.heads_kv);
      }
    }
  }

  void expect_all_arrives() {
    for (size_t n = 0; n < all_[0].steps().size(); ++n) {
      std::vector<State> before = states_;
      for (size_t r = 0; r < all_.size(); ++r) compute(r, n, before[r]);
      for (size_t r = 0; r < all_.size(); ++r) send(r, n, before);
    }
    for (size_t c = 0; c < chunks_.size(); ++c) {
      const State& owner = states_[static_cast<size_t>(chunks_[c].rank)];
      int64_t of_queries = 0, of_keys = 0;
      const int64_t n = problem_.rows[static_cast<size_t>(chunks_[c].sequence)];
      for (int64_t row = chunks_[c].begin; row < chunks_[c].begin + chunks_[c].length; ++row) {
        for (int64_t other = 0; other < n; ++other)
          of_queries += problem_.sees(row, other), of_keys += problem_.sees(other, row);
      }
      for (int64_t h = 0; h < problem_.heads_q; ++h) EXPECT_EQ(owner.of_queries.at({c, h}), of_queries);
      for (int64_t h = 0; backward_ && h < problem_.heads_kv; ++h) {
        EXPECT_EQ(owner.of_keys.at({c, h}), of_keys * problem_.heads_q / problem_.heads_kv);
      }
    }
  }

 private:
  using Rows = std::pair<size_t, int64_t>;  // chunk, head
  struct State {
    std::map<std::tuple<int32_t, size_t, int64_t>, bool> held;  // travels, chunk, head
    std::map<Rows, int64_t> of_queries, of_keys;
  };

  void hold(size_t r, int32_t travels, size_t chunk, int64_t first, int64_t count) {
    for (int64_t h = first; h < first + count; ++h) states_[r].held[{travels, chunk, h}] = true;
  }

  void compute(size_t r, size_t n, const State& before) {
    const tessera_rank_schedule& header = all_[r].header();
    for (const tessera_rank_pair& pair : all_[r].pairs(all_[r].steps()[n])) {
      for (int64_t qc = pair.q_chunk; qc < pair.q_chunk + pair.q_chunks; ++qc) {
        for (int64_t kc = pair.k_chunk; kc < pair.k_chunk + pair.k_chunks; ++kc) {
          const tessera_chunk &q = chunks_[static_cast<size_t>(qc)], &k = chunks_[static_cast<size_t>(kc)];
          ASSERT_EQ(q.sequence, pair.sequence);
          ASSERT_EQ(k.sequence, pair.sequence);
          int64_t area = 0;
          for (int64_t i = std::max(q.begin, pair.q_begin);
               i < std::min(q.begin + q.length, pair.q_begin + pair.q_length); ++i) {
            for (int64_t j = std::max(k.begin, pair.k_begin);
                 j < std::min(k.begin + k.length, pair.k_begin + pair.k_length); ++j) {
              area += problem_.sees(i, j);
            }
          }
          for (int32_t h = 0; h < header.num_heads_q; ++h) {
            const int64_t head = header.first_head_q + h, kv = head * problem_.heads_kv / problem_.heads_q;
            ASSERT_GE(kv, header.first_head_kv);
            ASSERT_LT(kv, header.first_head_kv + header.num_heads_kv);
            // Within a rank the head keeps its KV head: the library's own rule, on the heads that the rank has.
            ASSERT_EQ(kv, header.first_head_kv + int64_t{h} * header.num_heads_kv / header.num_heads_q);
            // Backward, Q, K and V of an exchange of heads are those that the forward pass received.
            const bool exchanged = backward_ && problem_.ranks != 1 && header.num_heads_q < problem_.heads_q;
            const bool own_group = same_group(q, r) && same_group(k, r);
            ASSERT_TRUE(before.held.count(
                {backward_ ? TESSERA_TRAVELS_D_O : TESSERA_TRAVELS_Q, static_cast<size_t>(qc), head}));
            ASSERT_TRUE(before.held.count({TESSERA_TRAVELS_KV, static_cast<size_t>(kc), kv}) ||
                        (exchanged && own_group))
                << "rank " << r << " step " << n << " chunk " << kc;
            states_[r].of_queries[{static_cast<size_t>(qc), head}] += area;
            states_[r].of_keys[{static_cast<size_t>(kc), kv}] += area;
          }
        }
      }
    }
  }

  bool same_group(const tessera_chunk& chunk, size_t r) const {
    const int64_t group = problem_.heads_q / all_[r].header().num_heads_q;
    return chunk.rank / group == static_cast<int64_t>(r) / group;
  }

  void send(size_t r, size_t n, const std::vector<State>& before) {
    for (const tessera_rank_transfer& t : all_[r].transfers(all_[r].steps()[n])) {
      if (t.receive) continue;
      const auto peer = static_cast<size_t>(t.peer), chunk = static_cast<size_t>(t.chunk);
      for (int64_t h = t.first_head; h < t.first_head + t.num_heads; ++h) {
        if (t.travels == TESSERA_TRAVELS_Q || t.travels == TESSERA_TRAVELS_KV || t.travels == TESSERA_TRAVELS_D_O) {
          const bool exchanged = backward_ && same_group(chunks_[chunk], r);
          ASSERT_TRUE(before[r].held.count({t.travels, chunk, h}) || exchanged) << "sent before it is there";
          hold(peer, t.travels, chunk, h, 1);
          continue;
        }
        const bool of_keys = t.travels == TESSERA_TRAVELS_D_KV;
        // The data sent are those present when the step began, without this step's pairs.
        const auto& had = of_keys ? before[r].of_keys : before[r].of_queries;
        auto& mine = of_keys ? states_[r].of_keys : states_[r].of_queries;
        auto& theirs = of_keys ? states_[peer].of_keys : states_[peer].of_queries;
        const auto value = had.find({chunk, h});
        ASSERT_NE(value, had.end()) << "nothing was computed of chunk " << chunk;
        ASSERT_EQ(value->second, mine.at({chunk, h})) << "sent while it is added to";
        EXPECT_TRUE(!of_keys || t.partial || theirs.count({chunk, h}) == 0) << "a sum that was rounded";
        theirs[{chunk, h}] += value->second;
        mine.erase({chunk, h});
      }
    }
  }

  const Problem& problem_;
  const std::vector<RankSchedule>& all_;
  std::span<const tessera_chunk> chunks_;
  bool backward_;
  std::vector<State> states_;
};

void expect_proved(const Problem& problem) {
  SCOPED_TRACE(problem.text());
  const tessera_ranks_plan plan = plan_of(problem);
  if (plan.struct_size == 0) return;
  const std::vector<RankSchedule> all = schedules_of(plan);
  expect_layout(problem, plan, all[0].chunks());
  expect_each_pair_once(problem, all);
  expect_no_deadlock(all);
  Flow(problem, all).expect_all_arrives();
}

struct Mask {
  int32_t causal;
  int64_t left, right;
};
constexpr Mask kMasks[] = {{0, -1, -1}, {1, -1, -1}, {1, 5, -1}, {0, 7, 3}, {0, -1, 2}, {0, 0, 0}, {1, 1000, -1}};

void expect_proved_in_both_directions(Problem problem) {
  for (const Mask& mask : kMasks) {
    problem.causal = mask.causal, problem.window_left = mask.left, problem.window_right = mask.right;
    for (problem.direction = 0; problem.direction < 2; ++problem.direction) expect_proved(problem);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Ranks, ARingSeesEachPairOnce) {
  for (const int32_t ranks : {1, 2, 3, 4, 5, 8}) {
    for (const int32_t layout : {TESSERA_RANKS_CONTIGUOUS, TESSERA_RANKS_ZIG_ZAG, TESSERA_RANKS_PLANNED}) {
      Problem problem(ranks, {2 * ranks * 3});
      problem.strategy = TESSERA_STRATEGY_RING, problem.layout = layout;
      problem.heads_q = 2, problem.heads_kv = 1;
      expect_proved_in_both_directions(problem);
    }
  }
}

TEST(Ranks, AllGatherSeesEachPairOnce) {
  for (const int32_t ranks : {1, 2, 3, 8}) {
    for (const int32_t layout : {TESSERA_RANKS_CONTIGUOUS, TESSERA_RANKS_ZIG_ZAG}) {
      Problem problem(ranks, {2 * ranks * 2});
      problem.strategy = TESSERA_STRATEGY_ALL_GATHER, problem.layout = layout;
      problem.heads_q = 2, problem.heads_kv = 2;
      for (problem.chunk_rows = 0; problem.chunk_rows < 2; ++problem.chunk_rows) {
        expect_proved_in_both_directions(problem);
      }
    }
  }
}

// Each row is in one call, and those that need no other rank's keys hide the exchanges.
TEST(Ranks, AllGatherMergesNothing) {
  Problem problem(4, {8 * 1024});
  problem.causal = 1, problem.window_left = 256, problem.strategy = TESSERA_STRATEGY_ALL_GATHER;
  for (problem.direction = 0; problem.direction < 2; ++problem.direction) {
    for (const RankSchedule& rank : schedules_of(plan_of(problem))) {
      const auto steps = rank.steps();
      ASSERT_EQ(steps.size(), problem.direction ? 3u : 2u);
      int64_t rows = 0;
      for (const tessera_rank_step& step : steps) {
        for (const tessera_rank_pair& pair : rank.pairs(step)) rows += pair.q_length;
      }
      EXPECT_EQ(rows, 2 * 1024);
      EXPECT_GT(steps.front().area, problem.direction ? steps[1].area / 2 : 2 * steps[1].area);
      EXPECT_GT(steps.back().area, problem.direction ? steps[1].area / 2 : 0);
    }
  }
}

TEST(Ranks, AnExchangeOfHeadsSeesEachPairOnce) {
  const struct {
    int32_t ranks;
    int64_t heads_q, heads_kv;
  } rows[] = {{1, 4, 2}, {2, 4, 2}, {2, 4, 1}, {4, 8, 4}, {4, 8, 2}, {8, 8, 2}, {3, 6, 3}, {3, 3, 1}};
  for (const auto& row : rows) {
    for (const int32_t layout : {TESSERA_RANKS_CONTIGUOUS, TESSERA_RANKS_ZIG_ZAG}) {
      Problem problem(row.ranks, {2 * row.ranks * 2});
      problem.strategy = TESSERA_STRATEGY_ALL_TO_ALL, problem.layout = layout;
      problem.heads_q = row.heads_q, problem.heads_kv = row.heads_kv;
      expect_proved_in_both_directions(problem);
    }
  }
}

TEST(Ranks, AMeshSeesEachPairOnce) {
  const struct {
    int32_t ranks, head_ranks;
    int64_t heads_kv;
  } rows[] = {{4, 2, 2}, {4, 2, 1}, {4, 4, 4}, {4, 1, 1}, {6, 2, 4}, {6, 3, 3}, {8, 2, 4}, {8, 4, 1}};
  for (const auto& row : rows) {
    for (const int32_t layout : {TESSERA_RANKS_CONTIGUOUS, TESSERA_RANKS_ZIG_ZAG}) {
      Problem problem(row.ranks, {2 * row.ranks * 2});
      problem.strategy = TESSERA_STRATEGY_MESH, problem.head_ranks = row.head_ranks, problem.layout = layout;
      problem.heads_q = 12, problem.heads_kv = row.heads_kv;
      expect_proved_in_both_directions(problem);
    }
  }
}

TEST(Ranks, PackedBatchesSeeEachPairOnce) {
  std::mt19937 random(5);
  for (int round = 0; round < 12; ++round) {
    const int32_t ranks = 2 + 2 * static_cast<int32_t>(random() % 3);
    std::vector<int64_t> rows(1 + random() % 6);
    for (int64_t& n : rows) n = static_cast<int64_t>(random() % 24);
    const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    rows.push_back((2 * ranks - all % (2 * ranks)) % (2 * ranks));
    for (const int32_t layout : {TESSERA_RANKS_CONTIGUOUS, TESSERA_RANKS_ZIG_ZAG, TESSERA_RANKS_PLANNED}) {
      for (const int32_t strategy :
           {TESSERA_STRATEGY_RING, TESSERA_STRATEGY_ALL_TO_ALL, TESSERA_STRATEGY_MESH, TESSERA_STRATEGY_ALL_GATHER}) {
        Problem problem(ranks, rows);
        problem.layout = layout, problem.strategy = strategy;
        problem.head_ranks = strategy == TESSERA_STRATEGY_MESH ? 2 : 0;
        problem.heads_q = 12, problem.heads_kv = ranks == 4 ? 4 : 6;
        problem.causal = round % 2, problem.window_left = round % 3 == 0 ? 6 : -1;
        problem.direction = round / 2 % 2, problem.chunk_rows = 1 + round % 3;
        expect_proved(problem);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Ranks, NothingToSeeIsASchedule) {
  for (const auto& rows : {std::vector<int64_t>{}, {0}, {0, 0, 8}}) {
    Problem problem(4, rows);
    problem.layout = TESSERA_RANKS_PLANNED;
    for (problem.direction = 0; problem.direction < 2; ++problem.direction) {
      const tessera_ranks_plan plan = plan_of(problem);
      EXPECT_EQ(plan.rows_per_rank, problem.all_rows() / 4);
      for (const RankSchedule& rank : schedules_of(plan)) EXPECT_GE(rank.steps().size(), 1u);
    }
  }
}

// ---- balance and bytes ----------------------------------------------------------------------------------------------

TEST(Ranks, ZigZagSharesACausalAreaEqually) {
  for (const int32_t ranks : {2, 4, 8, 64}) {
    Problem problem(ranks, {int64_t{ranks} * 4096});
    problem.causal = 1, problem.strategy = TESSERA_STRATEGY_RING;
    const tessera_ranks_plan plan = plan_of(problem);
    const double n = ranks * 4096.0;
    EXPECT_EQ(plan.visible_area, n * (n + 1) / 2);
    EXPECT_EQ(plan.largest_area, plan.visible_area / ranks);
    problem.layout = TESSERA_RANKS_CONTIGUOUS;
    EXPECT_GT(plan_of(problem).largest_area, 1.4 * plan.visible_area / ranks);
    EXPECT_GT(plan_of(problem).predicted_us, plan.predicted_us);
  }
}

TEST(Ranks, ACausalZigZagRingSendsOnlyTheChunksThatAreSeen) {
  const int64_t ranks = 4, chunk = 1024;
  Problem problem(ranks, {2 * ranks * chunk});
  problem.causal = 1, problem.strategy = TESSERA_STRATEGY_RING;
  const int64_t chunk_bytes = chunk * 4 * (16 + 16) * 2;  // KV heads, K and V, bfloat16
  for (problem.direction = 0; problem.direction < 2; ++problem.direction) {
    const tessera_ranks_plan plan = plan_of(problem);
    for (const RankSchedule& rank : schedules_of(plan)) {
      // Ranks after the owner see its first chunk, those before it both; partial dK and dV come back in float32.
      const int64_t r = rank.header().rank, seen_of_mine = (ranks - 1 - r) + 2 * r,
                    seen_by_me = r + 2 * (ranks - 1 - r);
      int64_t sent = 0, received = 0;
      for (const tessera_rank_step& step : rank.steps()) sent += step.sent_bytes, received += step.received_bytes;
      EXPECT_EQ(sent, chunk_bytes * (seen_of_mine + (problem.direction ? 2 * seen_by_me : 0)));
      EXPECT_EQ(received, chunk_bytes * (seen_by_me + (problem.direction ? 2 * seen_of_mine : 0)));
      EXPECT_EQ(rank.steps().size(), problem.direction ? 5u : 4u);
    }
  }
}

TEST(Ranks, AWindowNeedsItsNeighbourAlone) {
  Problem problem(8, {8 * 1024});
  problem.causal = 1, problem.window_left = 512;
  problem.layout = TESSERA_RANKS_CONTIGUOUS, problem.strategy = TESSERA_STRATEGY_RING;
  for (const RankSchedule& rank : schedules_of(plan_of(problem))) {
    ASSERT_EQ(rank.steps().size(), 2u);
    for (const tessera_rank_transfer& t : rank.transfers(rank.steps()[0])) {
      EXPECT_EQ(t.peer, rank.header().rank + (t.receive ? -1 : 1));
    }
  }
}

TEST(Ranks, HalfOfARanksOwnPairsHideTheLastGradients) {
  Problem problem(4, {8 * 1024});
  problem.causal = 1, problem.strategy = TESSERA_STRATEGY_RING, problem.direction = TESSERA_BACKWARD;
  for (const RankSchedule& rank : schedules_of(plan_of(problem))) {
    const auto steps = rank.steps();
    EXPECT_GT(steps.back().area, 0);
    EXPECT_NEAR(static_cast<double>(steps.front().area), static_cast<double>(steps.back().area), 1024.0 * 1024 / 100);
  }
}

// Lengths of documents as corpora have them: the logarithm is normal.
std::vector<int64_t> log_normal_rows(uint32_t seed, int64_t sequences, int64_t all) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1);
  std::vector<double> weights(static_cast<size_t>(sequences));
  for (double& weight : weights) weight = std::exp(normal(random));
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> rows;
  for (const double weight : weights) rows.push_back(static_cast<int64_t>(weight / sum * static_cast<double>(all)));
  rows.back() += all - std::accumulate(rows.begin(), rows.end(), int64_t{0});
  return rows;
}

TEST(Ranks, PlannedLayoutsBalancePackedBatches) {
  for (const int32_t ranks : {2, 4, 8, 16}) {
    for (uint32_t seed = 0; seed < 8; ++seed) {
      Problem problem(ranks, log_normal_rows(seed, 48, 131072));
      problem.causal = 1, problem.strategy = TESSERA_STRATEGY_RING, problem.layout = TESSERA_RANKS_PLANNED;
      const tessera_ranks_plan plan = plan_of(problem);
      EXPECT_LE(plan.largest_area, 1.02 * plan.visible_area / ranks) << ranks << " ranks, seed " << seed;
      EXPECT_EQ(plan.rows_per_rank, 131072 / ranks);
    }
  }
}

// ---- rules and choice -----------------------------------------------------------------------------------------------

TEST(Ranks, LengthsThatDoNotDivideAreRefusedByName) {
  Problem problem(4, {1001});
  EXPECT_EQ(refusal(problem),
            "lengths: 1001 rows do not divide into the 8 equal chunks of zig_zag over 4 ranks; accepted a multiple: "
            "pad to 1008");
  problem.layout = TESSERA_RANKS_CONTIGUOUS;
  EXPECT_NE(refusal(problem).find("4 equal chunks of contiguous"), std::string::npos);
}

TEST(Ranks, HeadsThatDoNotDivideAreRefusedByName) {
  Problem problem(4, {64});
  problem.strategy = TESSERA_STRATEGY_ALL_TO_ALL;
  problem.heads_q = 6, problem.heads_kv = 3;
  EXPECT_EQ(refusal(problem),
            "strategy: all_to_all, heads_q: 6 do not divide over 4 ranks; ring and all_gather take any heads");
  problem.heads_q = 12, problem.heads_kv = 3;
  EXPECT_NE(refusal(problem).find("heads_kv: 3, accepted a multiple or a divisor of 4 ranks"), std::string::npos);
  problem.strategy = TESSERA_STRATEGY_AUTO;
  const tessera_ranks_plan plan = plan_of(problem);
  EXPECT_NE(plan.problem.strategy, TESSERA_STRATEGY_ALL_TO_ALL);
}

TEST(Ranks, WrongMembersAreRefusedByName) {
  const auto refused = [](const char* name, const auto& change) {
    Problem problem(4, {64});
    change(problem);
    const std::string message = refusal(problem);
    EXPECT_EQ(message.rfind(std::string(name) + ": ", 0), 0u) << message;
  };
  refused("ranks", [](Problem& p) { p.ranks = 0; });
  refused("ranks", [](Problem& p) { p.ranks = 1025; });
  refused("strategy", [](Problem& p) { p.strategy = 5; });
  refused("layout", [](Problem& p) { p.layout = 3; });
  refused("direction", [](Problem& p) { p.direction = 2; });
  refused("dtype", [](Problem& p) { p.dtype = TESSERA_FLOAT64; });
  refused("causal", [](Problem& p) { p.causal = 2; });
  refused("window_left", [](Problem& p) { p.window_left = -2; });
  refused("lengths", [](Problem& p) { p.lengths = nullptr; });
  refused("lengths", [](Problem& p) { p.rows[0] = -8; });
  refused("batch", [](Problem& p) { p.batch = -1; });
  refused("heads_q", [](Problem& p) { p.heads_q = 6; });
  refused("heads_kv", [](Problem& p) { p.heads_kv = 0; });
  refused("head_dim", [](Problem& p) { p.head_dim = 0; });
  refused("head_ranks", [](Problem& p) { p.head_ranks = 3; });
  refused("link_gbps", [](Problem& p) { p.link_gbps = -1; });
  refused("overlap_loss", [](Problem& p) { p.overlap_loss = 2; });
  refused("problem", [](Problem& p) { p.struct_size = 0; });
}

TEST(Ranks, AutoTakesWhatTheModelPredictsToBeTheFastest) {
  for (const int64_t rows : {4096, 32768, 131072}) {
    for (const int32_t ranks : {1, 2, 4, 8, 16}) {
      Problem problem(ranks, {rows});
      problem.causal = 1, problem.heads_q = 32, problem.heads_kv = 8, problem.head_dim = 128;
      const tessera_ranks_plan plan = plan_of(problem);
      ASSERT_GE(plan.num_answers, 1);
      EXPECT_EQ(plan.answers[0].strategy, plan.problem.strategy);
      EXPECT_EQ(plan.answers[0].predicted_us, plan.predicted_us);
      EXPECT_GE(plan.predicted_us, plan.ideal_us);
      for (int32_t n = 0; n < plan.num_answers; ++n) {
        EXPECT_STRNE(plan.answers[n].reason, "");
        if (!plan.answers[n].accepted) continue;
        EXPECT_LE(plan.predicted_us, plan.answers[n].predicted_us);
        // Requested by name, it matches its answer.
        problem.strategy = plan.answers[n].strategy, problem.head_ranks = plan.answers[n].head_ranks;
        EXPECT_EQ(plan_of(problem).predicted_us, plan.answers[n].predicted_us);
        problem.strategy = TESSERA_STRATEGY_AUTO, problem.head_ranks = 0;
      }
    }
  }
}

// The 48 lengths of bench/many_gpus.py.
const std::vector<int64_t> kDocuments = {553,  538,  1326, 1104, 3983, 3405, 1242, 205,  2353, 481,   2419, 2320,
                                         1921, 5877, 5208, 1331, 440,  312,  3004, 3769, 3102, 360,   1211, 10874,
                                         3609, 949,  1433, 2048, 6840, 8329, 4391, 733,  922,  1759,  1041, 2185,
                                         2646, 1907, 3235, 2650, 1539, 3765, 1276, 1796, 2875, 17041, 392,  373};

// Times of forward, and of forward with backward, measured on 2 GPUs (bench/results/2026-11-28-h200-x2-ranks.csv), and
// those of each GPU's part without exchanges. By the model, the first over the second is within 0.12 of that; but for
// the exchange of heads of a packed batch, whose rows are copied by a launch for each range (not in the model).
TEST(Ranks, TheModelIsNearWhatWasMeasured) {
  struct Times {
    double forward, both;
  };
  struct Cell {
    int32_t strategy;
    Times measured;
    double within = 0.12;
  };
  const struct {
    std::vector<int64_t> rows;
    int32_t layout;
    int64_t window;
    Times ideal;
    std::vector<Cell> cells;
  } problems[] = {
      {{32768},
       TESSERA_RANKS_ZIG_ZAG,
       -1,
       {5.63, 25.44},
       {{TESSERA_STRATEGY_RING, {7.585, 29.14}},
        {TESSERA_STRATEGY_ALL_GATHER, {6.73, 27.57}},
        {TESSERA_STRATEGY_ALL_TO_ALL, {7.385, 29.42}}}},
      {{131072},
       TESSERA_RANKS_ZIG_ZAG,
       -1,
       {96.88, 410.5},
       {{TESSERA_STRATEGY_RING, {103.9, 428.9}},
        {TESSERA_STRATEGY_ALL_GATHER, {99.77, 419.9}},
        {TESSERA_STRATEGY_ALL_TO_ALL, {101.6, 424.5}}}},
      {kDocuments,
       TESSERA_RANKS_PLANNED,
       -1,
       {4.624, 22.29},
       {{TESSERA_STRATEGY_RING, {8.055, 25.77}},
        {TESSERA_STRATEGY_ALL_GATHER, {5.342, 25.97}},
        {TESSERA_STRATEGY_ALL_TO_ALL, {9.659, 32.3}, 0.2}}},
      {{131072},
       TESSERA_RANKS_ZIG_ZAG,
       4096,
       {6.675, 27.65},
       {{TESSERA_STRATEGY_RING, {9.792, 33.43}}, {TESSERA_STRATEGY_ALL_GATHER, {7.38, 31.33}}}},
  };
  for (const auto& one : problems) {
    Problem problem(2, one.rows);
    problem.causal = 1, problem.window_left = one.window, problem.heads_q = 32, problem.heads_kv = 8;
    problem.head_dim = 128, problem.layout = one.layout;
    for (const Cell& cell : one.cells) {
      problem.strategy = cell.strategy;
      double predicted = 0, ideal = 0;
      for (problem.direction = 0; problem.direction < 2; ++problem.direction) {
        const tessera_ranks_plan plan = plan_of(problem);
        predicted += plan.predicted_us, ideal += plan.ideal_us;
        const double measured =
            problem.direction ? cell.measured.both / one.ideal.both : cell.measured.forward / one.ideal.forward;
        EXPECT_NEAR(predicted / ideal / measured, 1, cell.within) << problem.text();
      }
    }
    problem.strategy = TESSERA_STRATEGY_AUTO, problem.direction = TESSERA_FORWARD;
    EXPECT_EQ(plan_of(problem).problem.strategy, TESSERA_STRATEGY_ALL_GATHER) << problem.text();  // the fastest
  }
}

TEST(Ranks, TheHashTellsProblemsApart) {
  Problem problem(4, {64, 64});
  const uint64_t hash = plan_of(problem).hash;
  EXPECT_EQ(plan_of(Problem(problem)).hash, hash);
  problem.rows = {32, 96};
  problem.lengths = problem.rows.data();
  EXPECT_NE(plan_of(problem).hash, hash);
  problem.rows = {64, 64};
  problem.causal = 1;
  EXPECT_NE(plan_of(problem).hash, hash);
}

TEST(Ranks, ABlockThatIsTooSmallAndAChangedPlanAreRefused) {
  Problem problem(2, {64});
  tessera_ranks_plan plan = plan_of(problem);
  std::vector<uint64_t> block(tessera_ranks_schedule_bytes(&plan, 1) / 8);
  EXPECT_EQ(tessera_ranks_schedule(&plan, 1, block.data(), block.size() * 8 - 1).code, TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_ranks_schedule(&plan, 2, block.data(), block.size() * 8).code, TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_ranks_schedule_bytes(&plan, 2), 0u);
  plan.problem.causal = 1;
  EXPECT_EQ(tessera_ranks_schedule(&plan, 1, block.data(), block.size() * 8).code, TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_ranks_plan_json(&plan, -1, nullptr, 0), 0u);
}

TEST(Ranks, TextAndJsonSayWhatTheDataSay) {
  Problem problem(4, {8 * 1024});
  problem.causal = 1, problem.strategy = TESSERA_STRATEGY_RING;
  const tessera_ranks_plan plan = plan_of(problem);
  const RankSchedule rank(plan, 1);
  const auto json = nlohmann::json::parse(tessera::json(plan, 1));
  EXPECT_EQ(json["hash"], plan.hash);
  EXPECT_EQ(json["rank"], 1);
  ASSERT_EQ(json["steps"].size(), rank.steps().size());
  for (size_t n = 0; n < rank.steps().size(); ++n) {
    const tessera_rank_step step = rank.steps()[n];
    EXPECT_EQ(json["steps"][n]["area"], step.area);
    ASSERT_EQ(json["steps"][n]["pairs"].size(), static_cast<size_t>(step.num_pairs));
    ASSERT_EQ(json["steps"][n]["transfers"].size(), static_cast<size_t>(step.num_transfers));
  }
  EXPECT_FALSE(nlohmann::json::parse(tessera::json(plan)).contains("rank"));
  const std::string words = tessera::describe(plan);
  EXPECT_NE(words.find("ring"), std::string::npos);
  EXPECT_NE(words.find("prediction"), std::string::npos);
  const std::string table = tessera::describe(plan, 1);
  EXPECT_NE(table.find("1 x 1 causal"), std::string::npos) << table;
  EXPECT_NE(table.find("K, V of 0 from 0"), std::string::npos) << table;
}

}  // namespace
