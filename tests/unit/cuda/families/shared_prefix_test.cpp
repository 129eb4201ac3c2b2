// The GPU's kernel of shared prefixes' index tensors, kernels/tessera/shared_prefix, on the host (tests/emulated_warp):
// equal to the CPU's own for valid input, and within range for invalid input.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "support.hpp"
#include "warp.hpp"

struct uint4 {
  unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#include "core/problem_view.hpp"
#include "cuda/families/shared_prefix.hpp"
#include "tessera/shared_prefix/kernel.cuh"

namespace tessera::test {
namespace {

enum class Keys { kDense, kPacked, kTable, kCsr };

constexpr std::int64_t kKeys = 48, kPage = 4, kPages = kKeys / kPage, kQueries = 5;

// A random batch that the CPU's checks accept.
struct Drawn {
  Problem problem;
  std::int64_t batch = 0;
  std::vector<std::int32_t> cu_q{0}, cu_k{0}, indptr{0}, indices, table, used, groups, lens;
  std::vector<std::uint8_t> causal;

  Drawn(std::mt19937& random, Keys keys) {
    const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    batch = draw(1, 9);
    const bool packed = draw(0, 1) != 0;
    for (std::int64_t b = 0; b < batch; ++b) {
      cu_q.push_back(cu_q.back() + (packed ? draw(0, 5) : static_cast<int>(kQueries)));
      used.push_back(draw(0, kKeys));
      cu_k.push_back(cu_k.back() + used.back());
      indptr.push_back(indptr.back() + (used.back() + static_cast<int>(kPage) - 1) / static_cast<int>(kPage));
      causal.push_back(static_cast<std::uint8_t>(draw(0, 1)));
    }
    problem.q = problem.o =
        packed ? layout(float16, {cu_q.back() + 2, 2, 16}) : layout(float16, {batch, kQueries, 2, 16});
    if (packed) problem.cu_seqlens_q = layout(int32, {batch + 1});
    indices.assign(static_cast<std::size_t>(indptr.back()) + 1, 0), table.assign(batch * kPages, 0);
    if (keys == Keys::kPacked) {
      problem.k = problem.v = layout(float16, {cu_k.back() + 1, 2, 16}),
      problem.cu_seqlens_k = layout(int32, {batch + 1});
    } else if (keys == Keys::kDense) {
      problem.k = problem.v = layout(float16, {batch, kKeys, 2, 16});
    } else {
      problem.k = problem.v = layout(float16, {9, kPage, 2, 16});
      if (keys == Keys::kTable) problem.page_table = layout(int32, {batch, kPages});
      if (keys == Keys::kCsr) problem.page_indptr = layout(int32, {batch + 1});
      if (keys == Keys::kCsr) problem.page_indices = layout(int32, {static_cast<std::int64_t>(indices.size())});
    }
    if (keys != Keys::kPacked) problem.seqused_k = layout(int32, {batch});
    const int masks = draw(0, 3);
    problem.causal = masks == 1;
    if (masks == 2) problem.causal_seqs = layout(boolean, {batch});
    if (masks == 3)
      problem.tree_mask = packed ? layout(int32, {cu_q.back() + 2, 1}) : layout(int32, {batch, kQueries, 1});
    if (draw(0, 2) == 0) problem.max_prefix_k = draw(1, kKeys);
    for (groups = {draw(0, static_cast<int>(batch))}; groups.back() < batch && draw(0, 4) > 0;) {
      const int begin = groups.back(), end = draw(begin, static_cast<int>(batch));
      int most = kKeys;
      for (int b = begin; b < end; ++b)
        if (cu_q[b + 1] > cu_q[b]) most = std::min(most, used[b]);
      groups.push_back(end), lens.push_back(draw(0, most));
    }
    problem.prefix_groups = layout(int32, {static_cast<std::int64_t>(groups.size())});
    problem.prefix_lens = layout(int32, {static_cast<std::int64_t>(lens.size())});
  }

  Buffers buffers() const {
    Buffers b;
    b.cu_seqlens_q = cu_q.data(), b.cu_seqlens_k = cu_k.data(), b.seqused_k = used.data();
    b.page_table = table.data(), b.page_indptr = indptr.data(), b.page_indices = indices.data();
    b.causal_seqs = causal.data(), b.prefix_groups = groups.data(), b.prefix_lens = lens.data();
    return b;
  }
};

struct Indices {
  std::vector<std::int32_t> group_queries, group_keys, group_lens, suffix_keys, suffix_lens;

  explicit Indices(const Drawn& drawn)
      : group_queries(drawn.groups.size(), -7),
        group_keys(group_queries),
        group_lens(drawn.lens.size(), -7),
        suffix_keys(static_cast<std::size_t>(drawn.batch) + 1, -7),
        suffix_lens(static_cast<std::size_t>(drawn.batch), -7) {}
  core::PrefixMemory memory() {
    core::PrefixMemory m{};
    m.group_queries = group_queries.data(), m.group_keys = group_keys.data(), m.group_lens = group_lens.data();
    m.suffix_keys = suffix_keys.data(), m.suffix_lens = suffix_lens.data();
    return m;
  }
  bool operator==(const Indices&) const = default;
};

Plan plan_of(const Problem& problem) {
  tessera_device device;
  throw_if_error(tessera_device_cuda_arch(90, &device));
  return tessera::plan(problem, device);
}

void emulate(const Plan& plan, const Drawn& drawn, Indices& indices, const PrefixChunks& chunks = {}) {
  int counters[2] = {5, 5};
  PrefixIndicesParams p = prefix_index_params(plan, drawn.buffers(), indices.memory());
  p.counters[0] = &counters[0], p.counters[1] = &counters[1];
  p.chunks = chunks;
  emulated::Warp::run([&](int lane) {
    for (int warp = 0; warp < p.groups + 2; ++warp) {
      emulated::Warp::gather(0.0f);  // all lanes see the same block
      if (lane == 0) blockIdx.x = static_cast<unsigned>(warp / kPrefixIndicesWarps);
      emulated::Warp::gather(0.0f);
      threadIdx.x = static_cast<unsigned>(warp % kPrefixIndicesWarps * 32 + lane);
      if (core::paged(plan.problem)) {
        prefix_indices<PrefixIndicesConfig{true}>(p);
      } else {
        prefix_indices<PrefixIndicesConfig{false}>(p);
      }
    }
  });
  EXPECT_EQ(counters[0], 0);
  EXPECT_EQ(counters[1], 0);
}

TEST(DevicePrefixIndices, AreThoseOfTheHost) {
  std::mt19937 random(3);
  for (int n = 0; n < 40; ++n) {
    for (const Keys keys : {Keys::kDense, Keys::kPacked, Keys::kTable, Keys::kCsr}) {
      const Drawn drawn(random, keys);
      const Plan plan = plan_of(drawn.problem);
      Indices found(drawn), expected(drawn);
      emulate(plan, drawn, found);
      core::fill_prefix_indices(plan, drawn.buffers(), expected.memory());
      EXPECT_EQ(found, expected) << n << " " << static_cast<int>(keys);
      if (HasFailure()) return;
    }
  }
}

// The chunks of a group's prefix are its keys, cut at multiples of a unit, each with all of the group's rows.
TEST(DevicePrefixIndices, ChunksAreThePrefixes) {
  constexpr int kCount = 3, kUnit = 2;
  std::mt19937 random(5);
  for (int n = 0; n < 40; ++n) {
    for (const Keys keys : {Keys::kDense, Keys::kPacked, Keys::kTable, Keys::kCsr}) {
      const Drawn drawn(random, keys);
      const Plan plan = plan_of(drawn.problem);
      Indices found(drawn);
      const std::size_t groups = drawn.lens.size(), sequences = 2 * kCount * groups;
      std::vector<std::int32_t> rows(sequences + 1, -7), firsts(sequences + 1, -7), lens(sequences, -7);
      PrefixChunks chunks{};
      chunks.count = kCount, chunks.unit = kUnit;
      chunks.rows = rows.data(), chunks.keys = firsts.data(), chunks.lens = lens.data();
      emulate(plan, drawn, found, chunks);
      const int total = static_cast<int>(core::rows_total(plan.problem)), page = core::paged(plan.problem) ? kPage : 1;
      for (std::size_t g = 0; g < groups; ++g) {
        int covered = 0;
        for (int c = 0; c < kCount; ++c) {
          const std::size_t at = 2 * (c * groups + g);
          EXPECT_EQ(rows[at], c * total + found.group_queries[g]);
          EXPECT_EQ(rows[at + 1], c * total + found.group_queries[g + 1]);
          EXPECT_EQ(firsts[at], found.group_keys[g] + covered / page);
          EXPECT_EQ((firsts[at + 1] - firsts[at]) * page, lens[at]);
          EXPECT_TRUE(lens[at] % (kUnit * page) == 0 || covered + lens[at] == found.group_lens[g]);
          EXPECT_LE(lens[at], (found.group_lens[g] / page / kCount + kUnit) * page);
          EXPECT_EQ(lens[at + 1], 0);
          covered += lens[at];
        }
        EXPECT_EQ(covered, found.group_lens[g]);
      }
      EXPECT_EQ(rows[sequences], kCount * total);
      EXPECT_TRUE(std::ranges::is_sorted(rows));
      if (groups == 1) {  // one sequence per chunk; each ends where the next begins
        std::vector<std::int32_t> one_firsts(kCount + 1, -7), one_lens(kCount, -7);
        chunks.rows = nullptr, chunks.keys = one_firsts.data(), chunks.lens = one_lens.data();
        emulate(plan, drawn, found, chunks);
        for (int c = 0; c < kCount; ++c) {
          EXPECT_EQ(one_firsts[c], firsts[2 * c]);
          EXPECT_EQ(one_firsts[c + 1], firsts[2 * c + 1]);
          EXPECT_EQ(one_lens[c], lens[2 * c]);
        }
      }
      if (HasFailure()) return;
    }
  }
}

// Offsets that fall, negative lengths, lengths past the keys: nothing is read past a sequence's keys, and all is
// written.
TEST(DevicePrefixIndices, StayWithinRange) {
  std::mt19937 random(4);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int n = 0; n < 40; ++n) {
    Drawn drawn(random, Keys::kTable);
    for (std::int32_t& group : drawn.groups) group = draw(-3, static_cast<int>(drawn.batch) + 3);
    for (std::int32_t& length : drawn.lens) length = draw(-9, 2 * kKeys);
    const Plan plan = plan_of(drawn.problem);
    Indices found(drawn);
    emulate(plan, drawn, found);
    for (std::int64_t b = 0; b < drawn.batch; ++b) {
      const std::int64_t before = (found.suffix_keys[b] - b * kPages) * kPage;
      EXPECT_GE(before, 0);
      EXPECT_GE(found.suffix_lens[b], 0);
      const bool reads = drawn.cu_q[b + 1] > drawn.cu_q[b];
      EXPECT_EQ(before + found.suffix_lens[b], reads ? drawn.used[b] : 0);
    }
    EXPECT_TRUE(std::ranges::is_sorted(found.group_queries));
    EXPECT_TRUE(std::ranges::is_sorted(found.group_keys));
    for (std::size_t g = 0; g < found.group_lens.size(); ++g) {
      EXPECT_GE(found.group_lens[g], 0);
      const std::int64_t reader = found.group_keys[g] / kPages;
      EXPECT_LE(found.group_lens[g], found.group_lens[g] > 0 ? drawn.used[reader] : 0);
    }
  }
}

}  // namespace
}  // namespace tessera::test
