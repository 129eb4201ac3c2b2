// Few queries split the keys in use between threads: a cache's capacity changes neither the work nor a bit.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

class Splits : public testing::Test {
 protected:
  static constexpr std::int64_t kHeads = 2, kD = 64;

  // o and lse of `queries` queries with caches of `capacity` keys, the first `lengths` of which are in use; each
  // sequence's keys are the same for every capacity.
  static std::vector<float> run(std::int64_t queries, const std::vector<std::int32_t>& lengths, std::int64_t capacity,
                                bool batch_invariant, bool with_mask) {
    const auto batch = static_cast<std::int64_t>(lengths.size());
    Problem problem;
    problem.q = problem.o = layout(float32, {batch, queries, kHeads, kD});
    problem.k = problem.v = layout(float32, {batch, capacity, kHeads, kD});
    problem.seqused_k = layout(int32, {batch});
    problem.lse = lse_layout(problem);
    problem.batch_invariant = batch_invariant;
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(capacity), 1);
    if (with_mask) problem.mask = layout(boolean, {capacity});
    std::mt19937_64 random(2);
    std::normal_distribution<float> normal;
    std::vector<float> q(static_cast<std::size_t>(elements(problem.q))), o(q.size());
    std::vector<float> k(static_cast<std::size_t>(elements(problem.k))), v(k.size());
    for (float& x : q) x = normal(random);
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto row = static_cast<std::size_t>(kHeads * kD);
      for (std::size_t n = 0; n < static_cast<std::size_t>(lengths[b]) * row; ++n) {
        k[static_cast<std::size_t>(b * capacity) * row + n] = normal(random);
        v[static_cast<std::size_t>(b * capacity) * row + n] = normal(random);
      }
    }
    std::vector<float> lse(static_cast<std::size_t>(elements(problem.lse)));
    Device device = cpu();
    device.cores = 8;
    const Plan plan = tessera::plan(problem, device);
    std::vector<std::byte> workspace(plan.workspace_bytes);
    Buffers b = {.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .lse = lse.data()};
    b.seqused_k = lengths.data(), b.mask = mask.data();
    forward(plan, b, workspace);
    o.insert(o.end(), lse.begin(), lse.end());
    return o;
  }

  static void expect_same(std::int64_t queries, const std::vector<std::int32_t>& lengths, std::int64_t exact,
                          bool batch_invariant, bool with_mask = false) {
    const std::vector<float> expected = run(queries, lengths, exact, batch_invariant, with_mask);
    for (const std::int64_t capacity : {exact + 1, 4 * exact, std::int64_t{32768}}) {
      const std::vector<float> found = run(queries, lengths, capacity, batch_invariant, with_mask);
      EXPECT_EQ(std::memcmp(found.data(), expected.data(), expected.size() * sizeof(float)), 0)
          << queries << " queries, capacity " << capacity;
    }
  }
};

TEST_F(Splits, OfDecodingFollowTheLongestInUse) {
  expect_same(1, {500}, 500, false);
  expect_same(1, {5000}, 5000, false);
  expect_same(1, {3000, 17, 2048}, 3000, false);
}

TEST_F(Splits, OfFewQueriesFollowTheLongestInUse) {
  expect_same(20, {5000}, 5000, false);
  expect_same(1, {5000, 70}, 5000, false, true);
}

TEST_F(Splits, AreNoneForBatchInvariance) { expect_same(1, {5000, 300}, 5000, true); }

}  // namespace
}  // namespace tessera::test
