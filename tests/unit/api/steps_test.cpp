// A plan made for upper bounds serves every step below them: other lengths, other numbers of queries, empty sequences
// that pad the batch. Each sequence gets the result that it gets alone, bit for bit with batch_invariant.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kHeadsQ = 4, kHeadsKv = 2, kD = 32, kPageSize = 16;
constexpr std::int64_t kBatch = 6, kTokens = 150, kLongestQ = 80, kMaxPages = 90, kPages = kBatch * kMaxPages;

// Keys and values in pages, and one step's queries.
struct Step {
  std::vector<std::int32_t> cu_seqlens_q, seqused_k, page_table;
  std::vector<float> q, o, lse;
};

class Steps : public testing::Test {
 protected:
  Steps() : k_(kPages * kPageSize * kHeadsKv * kD), v_(k_.size()) {
    for (float& x : k_) x = normal_(random_);
    for (float& x : v_) x = normal_(random_);
  }

  static Problem problem(std::int64_t batch, std::int64_t tokens, std::int64_t longest_q) {
    Problem problem;
    problem.q = problem.o = layout(float32, {tokens, kHeadsQ, kD});
    problem.k = problem.v = layout(float32, {kPages, kPageSize, kHeadsKv, kD});
    problem.cu_seqlens_q = layout(int32, {batch + 1});
    problem.page_table = layout(int32, {batch, kMaxPages});
    problem.seqused_k = layout(int32, {batch});
    problem.lse = lse_layout(problem);
    problem.causal = true;
    problem.max_seqlen_q = longest_q;
    return problem;
  }

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }

  // One to six sequences: some have one query, some a few and some a chunk; the others pad the batch.
  Step draw() {
    Step step;
    step.cu_seqlens_q = {0};
    std::vector<std::int32_t> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0);
    std::ranges::shuffle(pages, random_);
    step.page_table.assign(kBatch * kMaxPages, -1);
    const std::int64_t used = between(1, kBatch);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      const std::int64_t left = kTokens - step.cu_seqlens_q.back();
      const std::int64_t most = b >= used ? 0 : std::vector<std::int64_t>{1, 1, 8, kLongestQ}[between(0, 3)];
      const std::int64_t sq = std::min({most, left, most > 1 ? between(0, most) : most});
      step.cu_seqlens_q.push_back(step.cu_seqlens_q.back() + static_cast<std::int32_t>(sq));
      step.seqused_k.push_back(b >= used ? 0 : static_cast<std::int32_t>(between(sq, kMaxPages * kPageSize)));
      for (std::int64_t page = 0; page * kPageSize < step.seqused_k[b]; ++page) {
        step.page_table[b * kMaxPages + page] = pages.back();
        pages.pop_back();
      }
    }
    step.q.resize(kTokens * kHeadsQ * kD);
    for (float& x : step.q) x = normal_(random_);
    // What the tokens past the last sequence hold does not count.
    std::fill(step.q.begin() + step.cu_seqlens_q.back() * kHeadsQ * kD, step.q.end(), static_cast<float>(kNaN));
    return step;
  }

  void run(const Plan& plan, Step& step, std::vector<std::byte>& workspace) const {
    run(plan, step, workspace, k_, v_);
  }
  static void run(const Plan& plan, Step& step, std::vector<std::byte>& workspace, const std::vector<float>& k,
                  const std::vector<float>& v) {
    step.o.assign(span_elements(plan.problem.o), static_cast<float>(kNaN));
    step.lse.assign(span_elements(plan.problem.lse), static_cast<float>(kNaN));
    Buffers b = {.q = step.q.data(), .k = k.data(), .v = v.data(), .o = step.o.data(), .lse = step.lse.data()};
    b.cu_seqlens_q = step.cu_seqlens_q.data(), b.seqused_k = step.seqused_k.data();
    b.page_table = step.page_table.data();
    forward(plan, b, workspace);
  }

  // Sequence b of a step as a batch of its own.
  static Step alone(const Step& step, std::int64_t b) {
    Step one;
    const std::int64_t begin = step.cu_seqlens_q[b], end = step.cu_seqlens_q[b + 1];
    one.cu_seqlens_q = {0, static_cast<std::int32_t>(end - begin)};
    one.seqused_k = {step.seqused_k[b]};
    one.page_table.assign(step.page_table.begin() + b * kMaxPages, step.page_table.begin() + (b + 1) * kMaxPages);
    one.q.assign(step.q.begin() + begin * kHeadsQ * kD, step.q.begin() + end * kHeadsQ * kD);
    return one;
  }

  std::mt19937_64 random_{3};
  std::normal_distribution<float> normal_;
  std::vector<float> k_, v_;
};

TEST_F(Steps, OnePlanServesAHundredWithTheBitsOfEachAlone) {
  Problem bounds = problem(kBatch, kTokens, kLongestQ);
  bounds.batch_invariant = true;
  Device device = cpu();
  device.cores = 6;
  const Plan plan = tessera::plan(bounds, device);
  ASSERT_EQ(plan.kernel, TESSERA_KERNEL_TILED);
  ASSERT_GT(plan.decode_queries, 0);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  for (int n = 0; n < 100; ++n) {
    Step step = draw();
    run(plan, step, workspace);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      Step one = alone(step, b);
      const std::int64_t sq = one.cu_seqlens_q[1], begin = step.cu_seqlens_q[b];
      if (sq == 0) continue;
      Problem own = problem(1, sq, sq);
      own.batch_invariant = true;
      const Plan own_plan = tessera::plan(own, device);
      EXPECT_EQ(own_plan.kernel, sq <= plan.decode_queries ? TESSERA_KERNEL_DECODE : TESSERA_KERNEL_TILED);
      std::vector<std::byte> own_workspace(own_plan.workspace_bytes);
      run(own_plan, one, own_workspace);
      ASSERT_EQ(std::memcmp(one.o.data(), &step.o[begin * kHeadsQ * kD], one.o.size() * sizeof(float)), 0)
          << "step " << n << ", sequence " << b << " of " << sq << " queries, " << step.seqused_k[b] << " keys";
    }
    for (std::size_t at = static_cast<std::size_t>(step.cu_seqlens_q.back() * kHeadsQ * kD); at < step.o.size(); ++at) {
      ASSERT_EQ(step.o[at], 0) << "step " << n << ": a token of no sequence";
    }
  }
}

TEST_F(Steps, OnePlanServesAHundredAsTheOracle) {
  const Problem bounds = problem(kBatch, kTokens, kLongestQ);
  Device device = cpu();
  device.cores = 6;
  const Plan plan = tessera::plan(bounds, device), reference = tessera::plan(bounds, reference_device());
  std::vector<std::byte> workspace(std::max(plan.workspace_bytes, reference.workspace_bytes));
  // Sums of up to 1440 rounded products: far below the effect of a wrong key or weight.
  constexpr float kRoundings = 64 * std::numeric_limits<float>::epsilon();
  for (int n = 0; n < 100; ++n) {
    Step step = draw(), expected = step;
    run(plan, step, workspace);
    run(reference, expected, workspace);
    for (std::size_t at = 0; at < step.o.size(); ++at)
      ASSERT_NEAR(step.o[at], expected.o[at], kRoundings) << "step " << n;
    for (std::size_t at = 0; at < step.lse.size(); ++at) {
      if (std::isinf(expected.lse[at])) {
        ASSERT_EQ(step.lse[at], expected.lse[at]) << "step " << n;
      } else {
        ASSERT_NEAR(step.lse[at], expected.lse[at], 8 * kRoundings) << "step " << n;
      }
    }
  }
}

// HND pages with a gap after each, as a cache that holds keys and values side by side has them, are read as NHD ones
// are.
TEST_F(Steps, PagesMayLieInAnyOrder) {
  Problem nhd = problem(kBatch, kTokens, kLongestQ);
  nhd.batch_invariant = true;
  Problem hnd = nhd;
  constexpr std::int64_t kPage = 2 * kPageSize * kHeadsKv * kD;
  for (Layout* cache : {&hnd.k, &hnd.v}) {
    cache->strides[0] = kPage, cache->strides[1] = kD, cache->strides[2] = kPageSize * kD;
  }
  std::vector<float> k(static_cast<std::size_t>(kPages * kPage), static_cast<float>(kNaN)), v = k;
  for (std::int64_t page = 0; page < kPages; ++page)
    for (std::int64_t key = 0; key < kPageSize; ++key)
      for (std::int64_t h = 0; h < kHeadsKv; ++h)
        for (std::int64_t d = 0; d < kD; ++d) {
          const std::int64_t from = ((page * kPageSize + key) * kHeadsKv + h) * kD + d;
          const std::int64_t to = page * kPage + (h * kPageSize + key) * kD + d;
          k[to] = k_[from], v[to] = v_[from];
        }
  const Plan plans[] = {tessera::plan(nhd), tessera::plan(hnd)};
  std::vector<std::byte> workspace(std::max(plans[0].workspace_bytes, plans[1].workspace_bytes));
  for (int n = 0; n < 10; ++n) {
    Step expected = draw(), step = expected;
    run(plans[0], expected, workspace);
    run(plans[1], step, workspace, k, v);
    ASSERT_EQ(std::memcmp(step.o.data(), expected.o.data(), step.o.size() * sizeof(float)), 0) << "step " << n;
  }
}

// As in multi-head latent attention: the values are the first columns of the keys, in the same memory.
TEST_F(Steps, ValuesMayBeColumnsOfTheKeys) {
  constexpr std::int64_t kDv = 20;
  Problem copied = problem(kBatch, kTokens, kLongestQ);
  copied.o = layout(float32, {kTokens, kHeadsQ, kDv});
  copied.v = layout(float32, {kPages, kPageSize, kHeadsKv, kDv});
  Problem shared = copied;
  for (int axis = 0; axis < 4; ++axis) shared.v.strides[axis] = shared.k.strides[axis];
  std::vector<float> v(static_cast<std::size_t>(elements(copied.v)));
  for (std::size_t n = 0; n < v.size(); ++n) v[n] = k_[n / kDv * kD + n % kDv];
  const Plan plans[] = {tessera::plan(copied), tessera::plan(shared)};
  std::vector<std::byte> workspace(std::max(plans[0].workspace_bytes, plans[1].workspace_bytes));
  for (int n = 0; n < 10; ++n) {
    Step expected = draw(), step = expected;
    run(plans[0], expected, workspace, k_, v);
    run(plans[1], step, workspace, k_, k_);
    ASSERT_EQ(std::memcmp(step.o.data(), expected.o.data(), step.o.size() * sizeof(float)), 0) << "step " << n;
  }
}

// A sequence beyond the plan's bounds is refused where the lengths can be read, before anything is written.
TEST_F(Steps, BeyondTheBoundsAreRefused) {
  const Plan plan = tessera::plan(problem(kBatch, kTokens, 20));
  std::vector<std::byte> workspace(plan.workspace_bytes);
  Step step = draw();
  step.cu_seqlens_q = {0, 21, 21, 21, 21, 21, 21};
  try {
    run(plan, step, workspace);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("max_seqlen_q = 20"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(std::ranges::all_of(step.o, [](float x) { return std::isnan(x); }));
}

}  // namespace
}  // namespace tessera::test
