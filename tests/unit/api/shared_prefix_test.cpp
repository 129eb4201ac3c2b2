// Prefixes that are read once: that they are, the plan's description, and refused layouts. The case table checks
// results.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kBatch = 4, kKeys = 96, kHeads = 2, kDim = 16, kRow = kHeads * kDim;
constexpr std::int32_t kPrefix = 80;

// One query each for four sequences; the second to the fourth share a prefix.
Problem decoding() {
  Problem problem;
  problem.q = problem.o = layout(float32, {kBatch, 1, kHeads, kDim});
  problem.k = problem.v = layout(float32, {kBatch, kKeys, kHeads, kDim});
  problem.causal = 1;
  share_prefixes(problem);
  return problem;
}

struct Data {
  std::vector<float> q = std::vector<float>(kBatch * kRow), k = std::vector<float>(kBatch * kKeys * kRow), v = k, o = q;
  std::vector<std::int32_t> groups = {1, 4}, lens = {kPrefix};

  explicit Data(std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    for (auto* values : {&q, &k, &v})
      for (float& x : *values) x = normal(random);
  }
  // The prefixes of the third sequence and the fourth become `value`, or, without one, that of the second.
  void set_copies(const float* value) {
    for (const std::int64_t b : {2, 3}) {
      for (std::int64_t n = 0; n < kPrefix * kRow; ++n) {
        for (auto* keys : {&k, &v}) (*keys)[b * kKeys * kRow + n] = value ? *value : (*keys)[kKeys * kRow + n];
      }
    }
  }
  const std::vector<float>& forward(const Plan& plan) {
    std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xFF});
    o.assign(o.size(), std::numeric_limits<float>::quiet_NaN());
    tessera::forward(plan,
                     {.q = q.data(),
                      .k = k.data(),
                      .v = v.data(),
                      .o = o.data(),
                      .prefix_groups = groups.data(),
                      .prefix_lens = lens.data()},
                     workspace);
    return o;
  }
};

TEST(SharedPrefix, ReadsOneOfItsCopies) {
  std::mt19937_64 random(7);
  Data data(random);
  data.set_copies(nullptr);
  Problem apart = decoding();
  apart.prefix_groups = apart.prefix_lens = {};
  const std::vector<float> expected = data.forward(tessera::plan(apart));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  data.set_copies(&nan);
  const std::vector<float>& o = data.forward(tessera::plan(decoding()));
  for (std::size_t n = 0; n < o.size(); ++n) ASSERT_NEAR(o[n], expected[n], 1e-5) << n;
}

TEST(SharedPrefix, ThePlanSaysHowItsPartsAreDone) {
  const Plan plan = tessera::plan(decoding());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_SHARED_PREFIX);
  ASSERT_EQ(plan.num_steps, 2);
  EXPECT_EQ(plan.steps[0].keys, TESSERA_STEP_PREFIXES);
  EXPECT_EQ(plan.steps[1].keys, TESSERA_STEP_OTHER_KEYS);
  const std::string words = describe(plan), text = json(plan);
  for (const char* part : {"shared prefixes", "prefixes, by decode: ", "other keys, by decode: "}) {
    EXPECT_NE(words.find(part), std::string::npos) << part << "\n" << words;
  }
  EXPECT_NE(text.find("\"steps\": [{\"kernel\": \"decode\", \"keys\": \"prefixes\""), std::string::npos) << text;
}

// On a GPU: the index tensors; the parts, each of which may merge its own splits; and the merge of both.
TEST(SharedPrefix, ThePlanSaysWhatItLaunches) {
  Problem problem = decoding();
  for (Layout* rows : {&problem.q, &problem.k, &problem.v, &problem.o}) rows->dtype = TESSERA_BFLOAT16;
  for (const std::int32_t arch : {80, 90, 120}) {
    tessera_device device;
    throw_if_error(tessera_device_cuda_arch(arch, &device));
    const Plan plan = tessera::plan(problem, device);
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_SHARED_PREFIX);
    const auto all = launches(plan);
    ASSERT_GE(all.size(), 4u);
    EXPECT_STREQ(all.front().kernel, "prefix_indices");
    EXPECT_STREQ(all.back().kernel, "combine");
    for (const std::size_t n : {1u, 2u}) {
      EXPECT_TRUE(std::string(all[n].kernel).starts_with("fwd_sm80")) << arch << " " << all[n].kernel;
    }
    // o and lse of both parts, of 4 queries and 2 heads.
    EXPECT_GE(plan.workspace_bytes, 2 * kBatch * kHeads * (kDim * 2 + 4));
  }
}

// One query each of `batch` sequences in pages of 64, on an H100.
Plan served(std::int64_t batch, std::int64_t prefix, std::int64_t own, std::int64_t heads, std::int64_t heads_kv) {
  Problem problem;
  const std::int64_t keys = prefix + own, pages = keys / 64;
  problem.q = problem.o = layout(bfloat16, {batch, heads, 128});
  problem.k = problem.v = layout(bfloat16, {batch * pages, 64, heads_kv, 128});
  problem.cu_seqlens_q = layout(int32, {batch + 1}), problem.seqused_k = layout(int32, {batch});
  problem.page_table = layout(int32, {batch, pages});
  problem.causal = 1, problem.max_seqlen_q = 1, problem.max_seqlen_k = keys;
  share_prefixes(problem);
  problem.prefix_groups = layout(int32, {2}), problem.prefix_lens = layout(int32, {1});
  problem.max_prefix_k = prefix, problem.max_suffix_k = own;
  tessera_device device;
  throw_if_error(tessera_device_cuda_arch(90, &device));
  device.cores = 132;
  return tessera::plan(problem, device);
}

// A prefix's keys come in as many chunks as give each multiprocessor a tile of 128 rows, where its keys are enough.
TEST(SharedPrefix, ChunksFillTheGpu) {
  const struct {
    std::int64_t batch, prefix, heads, heads_kv;
    int chunks;
  } rows[] = {
      {64, 8192, 32, 8, 8}, {64, 8192, 8, 8, 16}, {256, 2048, 32, 8, 2}, {16, 32768, 32, 8, 16}, {16, 1024, 32, 8, 4}};
  for (const auto& row : rows) {
    const Plan plan = served(row.batch, row.prefix, 256, row.heads, row.heads_kv);
    const tessera_plan_step& prefix = plan.steps[0];
    EXPECT_STREQ(prefix.family, "fwd_sm90") << row.batch;
    EXPECT_EQ(prefix.num_splits, row.chunks) << row.batch;
    EXPECT_EQ(prefix.block_m, 128) << row.batch;
    EXPECT_LE(prefix.num_items, 132) << row.batch;  // at most one a multiprocessor, and so no counter
    EXPECT_EQ(prefix.workspace_bytes, 0) << row.batch;
    const auto all = launches(plan);
    EXPECT_TRUE(std::string(all[1].kernel).starts_with("fwd_sm90")) << all[1].kernel;
    EXPECT_STREQ(all.back().kernel, "combine");
    EXPECT_EQ(all.size(), 4) << row.batch;
    const auto unaligned = launches(plan, false);  // every sequence reads all of its keys
    ASSERT_EQ(unaligned.size(), 1) << row.batch;
    EXPECT_TRUE(std::string(unaligned[0].kernel).starts_with("fwd_sm80")) << unaligned[0].kernel;
  }
  EXPECT_STREQ(served(4, 8192, 256, 32, 8).steps[0].family, "decode_sm90");  // 16 rows a KV head
  EXPECT_EQ(served(2048, 8192, 256, 32, 8).steps[0].num_splits, 1);          // the tiles are enough
}

// Own keys of the cells measured at dbf9cac and c7a09d5: 256 after a prefix are sooner fwd_sm80's, and 512 of 16
// sequences decode_sm90's.
TEST(SharedPrefix, FewOwnKeysAreFwdSm80s) {
  for (const std::int64_t heads : {32, 8}) {
    EXPECT_STREQ(served(64, 8192, 256, heads, 8).steps[1].family, "fwd_sm80") << heads;
  }
  EXPECT_STREQ(served(256, 2048, 256, 32, 8).steps[1].family, "fwd_sm80");
  EXPECT_STREQ(served(16, 32768, 512, 32, 8).steps[1].family, "decode_sm90");
}

// Of the bytes of K and V, those of a prefix and of four suffixes.
TEST(SharedPrefix, TheBoundsSayWhatIsRead) {
  Problem problem = decoding();
  const double unknown = tessera::plan(problem).bytes_moved;
  problem.max_prefix_k = 80, problem.max_suffix_k = 16;
  const double all_keys = 2 * 4.0 * kBatch * kKeys * kRow;
  EXPECT_EQ(unknown - tessera::plan(problem).bytes_moved, all_keys * (1 - (80 + kBatch * 16.0) / (kBatch * kKeys)));
}

void expect_refused(const Problem& problem, const char* reason) {
  Plan plan;
  const Status status = try_plan(problem, cpu(), plan);
  EXPECT_EQ(status.code(), Code::unsupported);
  EXPECT_NE(std::string(status.message()).find(reason), std::string::npos) << status.message();
}

TEST(SharedPrefix, RefusesRowsThatAreNotThoseOfOneSequence) {
  Problem heads_first = decoding();
  heads_first.q = heads_first.o = layout(float32, {kBatch, 4, kHeads, kDim});
  heads_first.q.strides[1] = kDim, heads_first.q.strides[2] = 4 * kDim;
  expect_refused(heads_first, "shared_prefix: q: strides");
  Problem one_cache = decoding();
  one_cache.k.strides[0] = 0;
  expect_refused(one_cache, "shared_prefix: k: strides");
  Problem other_values = decoding();
  other_values.v.strides[0] *= 2;
  expect_refused(other_values, "shared_prefix: v: strides");
  Problem one_row = decoding();
  one_row.k = one_row.v = layout(float32, {8, 16, kHeads, kDim});
  one_row.page_table = layout(int32, {kBatch, 6}), one_row.seqused_k = layout(int32, {kBatch});
  one_row.page_table.strides[0] = 0;
  expect_refused(one_row, "shared_prefix: page_table: strides");
}

}  // namespace
}  // namespace tessera::test
