// Refusals of the execution calls, by name, with outputs unchanged.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

void expect_refused(Attention& a, std::int32_t direction, const char* begins, const char* contains = "") {
  const Status status = a.try_run(direction);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  const std::string message(status.message());
  EXPECT_TRUE(message.starts_with(begins)) << message;
  EXPECT_NE(message.find(contains), std::string::npos) << message;
  for (const auto* output : {&a.o, &a.d_q, &a.d_k, &a.d_v}) {
    for (const double x : *output) ASSERT_TRUE(std::isnan(x)) << "an output was written: " << message;
  }
}

Attention dense() {
  std::mt19937_64 random(1);
  Attention a;
  a.problem = gradient_of(dense_problem(float64));
  a.allocate(random);
  return a;
}
Attention packed() {
  std::mt19937_64 random(1);
  Attention a;
  a.problem = gradient_of(packed_problem(float64));
  a.allocate(random);
  a.cu_seqlens_q = {0, 5, 5, 16};
  a.cu_seqlens_k = {0, 10, 14, 24};
  return a;
}
Attention paged() {
  std::mt19937_64 random(1);
  Attention a;
  a.problem = paged_problem(float64);
  a.allocate(random);
  a.page_table = {0, 1, 2, 3, 4, 7};
  a.seqused_k = {24, 16};
  return a;
}

// Of the pages before page_indices[1] and after [5] no sequence has any.
Attention csr() {
  Attention a = paged();
  a.problem.page_table = {};
  a.problem.page_indptr = layout(int32, {3});
  a.problem.page_indices = layout(int32, {7});
  a.page_indptr = {1, 4, 6};
  a.page_indices = {99, 0, 1, 2, 3, 4, 7};
  return a;
}

TEST(Execute, TakesWhatIsRight) {
  for (Attention a : {dense(), packed()}) {
    EXPECT_TRUE(a.try_run(TESSERA_FORWARD).ok());
    EXPECT_TRUE(a.try_run(TESSERA_BACKWARD).ok());
  }
  EXPECT_TRUE(paged().try_run(TESSERA_FORWARD).ok());
  EXPECT_TRUE(csr().try_run(TESSERA_FORWARD).ok());
}

TEST(Execute, RefusesNullPointers) {
  const struct {
    const char* begins;
    void (*drop)(Buffers&);
    bool backward = true;
  } rows[] = {
      {"q: NULL", [](Buffers& of) { of.q = nullptr; }, false}, {"k: NULL", [](Buffers& of) { of.k = nullptr; }, false},
      {"v: NULL", [](Buffers& of) { of.v = nullptr; }, false}, {"o: NULL", [](Buffers& of) { of.o = nullptr; }, false},
      {"lse: NULL", [](Buffers& of) { of.lse = nullptr; }},    {"d_o: NULL", [](Buffers& of) { of.d_o = nullptr; }},
      {"d_q: NULL", [](Buffers& of) { of.d_q = nullptr; }},    {"d_k: NULL", [](Buffers& of) { of.d_k = nullptr; }},
      {"d_v: NULL", [](Buffers& of) { of.d_v = nullptr; }},
  };
  Attention a = dense();
  for (const auto& row : rows) {
    a.problem.direction = row.backward ? TESSERA_BACKWARD : TESSERA_FORWARD;
    const Plan plan = tessera::plan(a.problem, reference_device());
    std::vector<std::byte> workspace(plan.workspace_bytes);
    Buffers buffers = a.buffers();
    row.drop(buffers);
    const Status status = row.backward ? try_backward(plan, buffers, workspace) : try_forward(plan, buffers, workspace);
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_TRUE(status.message().starts_with(row.begins)) << status.message();
    EXPECT_NE(status.message().find("shape [2, "), std::string_view::npos) << status.message();
    for (const double x : a.o) ASSERT_TRUE(std::isnan(x));
  }
}

TEST(Execute, RefusesMisalignedPointers) {
  Attention a = dense();
  const Plan plan = tessera::plan(dense_problem(float64), reference_device());
  std::vector<std::byte> workspace(plan.workspace_bytes);
  Buffers buffers = a.buffers();
  buffers.k = reinterpret_cast<const char*>(buffers.k) + 4;
  const Status status = try_forward(plan, buffers, workspace);
  EXPECT_EQ(status.message().substr(0, 3), "k: ");
  EXPECT_NE(status.message().find("8 bytes"), std::string_view::npos) << status.message();
}

TEST(Execute, RefusesWrongPlansAndWorkspaces) {
  Attention a = dense();
  const Plan plan = tessera::plan(dense_problem(float64), reference_device());
  std::vector<std::byte> workspace(plan.workspace_bytes);
  EXPECT_EQ(workspace_bytes(plan), workspace.size());
  EXPECT_TRUE(try_backward(plan, a.buffers(), workspace).message().starts_with("plan: made for direction forward"));
  EXPECT_TRUE(try_forward(plan, a.buffers(), std::span(workspace).first(workspace.size() - 1))
                  .message()
                  .starts_with("workspace_bytes: "));
  const tessera_buffers buffers = a.buffers();
  const auto message = [](const tessera_status& status) { return std::string(status.message); };
  EXPECT_TRUE(
      message(tessera_forward(&plan, &buffers, nullptr, workspace.size(), nullptr)).starts_with("workspace: NULL"));
  EXPECT_TRUE(message(tessera_forward(nullptr, &buffers, nullptr, 0, nullptr)).starts_with("plan: NULL"));
  EXPECT_TRUE(message(tessera_forward(&plan, nullptr, workspace.data(), workspace.size(), nullptr))
                  .starts_with("buffers: NULL"));
  for (const double x : a.o) ASSERT_TRUE(std::isnan(x));
}

TEST(Execute, TakesAWorkspaceOfAnyAlignment) {
  Attention a = dense(), b = dense();
  const Plan plan = tessera::plan(dense_problem(float64), reference_device());
  std::vector<std::byte> workspace(plan.workspace_bytes + 1);
  forward(plan, a.buffers(), std::span(workspace).first(plan.workspace_bytes));
  forward(plan, b.buffers(), std::span(workspace).subspan(1));
  EXPECT_EQ(a.o, b.o);
}

TEST(Execute, RefusesOffsets) {
  const struct {
    std::vector<std::int32_t> q, k;
    const char *begins, *contains;
  } rows[] = {
      {{-1, 5, 5, 16}, {0, 10, 14, 24}, "cu_seqlens_q[0]: -1", "accepted 0 .. 16, the rows of q"},
      {{0, 5, 5, 16}, {25, 25, 25, 25}, "cu_seqlens_k[0]: 25", "accepted 0 .. 24, the rows of k"},
      {{0, 5, 4, 16}, {0, 10, 14, 24}, "cu_seqlens_q[2]: 4 after 5", "must not decrease"},
      {{0, 5, 5, 17}, {0, 10, 14, 24}, "cu_seqlens_q[3]: 17", "at most 16"},
      {{0, 5, 5, 16}, {0, -1, 14, 24}, "cu_seqlens_k[1]: -1 after 0", "must not decrease"},
      {{0, 5, 5, 16}, {0, 10, 25, 25}, "cu_seqlens_k[2]: 25", "at most 24"},
  };
  for (const auto& row : rows) {
    for (const int direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
      Attention a = packed();
      a.cu_seqlens_q = row.q;
      a.cu_seqlens_k = row.k;
      expect_refused(a, direction, row.begins, row.contains);
    }
  }
  Attention a = packed();
  a.problem.max_seqlen_q = 10;
  expect_refused(a, TESSERA_FORWARD, "cu_seqlens_q[3]: sequence 2 has 11 rows", "max_seqlen_q = 10");
}

TEST(Execute, ClearsRowsThatBelongToNoSequence) {
  Attention a = packed();
  a.cu_seqlens_q = {2, 5, 5, 12};
  a.forward();
  constexpr std::size_t kRow = 4 * 6;
  for (std::size_t n = 0; n < a.o.size(); ++n) EXPECT_EQ(a.o[n] == 0, n < 2 * kRow || n >= 12 * kRow) << n;
}

TEST(Execute, RefusesKeyLengths) {
  Attention a = dense();
  a.problem.seqused_k = layout(int32, {2});
  a.seqused_k = {24, 25};
  expect_refused(a, TESSERA_FORWARD, "seqused_k[1]: 25", "0 .. 24");
  a.seqused_k = {-1, 3};
  expect_refused(a, TESSERA_BACKWARD, "seqused_k[0]: -1", "0 .. 24");
  Attention b = packed();
  b.problem.seqused_k = layout(int32, {3});
  b.seqused_k = {10, 5, 10};
  expect_refused(b, TESSERA_FORWARD, "seqused_k[1]: 5", "0 .. 4");
  Attention c = paged();
  c.seqused_k = {24, 25};
  expect_refused(c, TESSERA_FORWARD, "seqused_k[1]: 25", "0 .. 24");
}

TEST(Execute, RefusesPagesInUseOnly) {
  Attention a = paged();
  a.seqused_k = {24, 17};
  expect_refused(a, TESSERA_FORWARD, "page_table[1, 2]: 7", "0 .. 4");
  a.page_table[1] = -1;
  expect_refused(a, TESSERA_FORWARD, "page_table[0, 1]: -1", "0 .. 4");
}

TEST(Execute, RefusesACsrTableThatIsNone) {
  Attention a = csr();
  a.page_indices[2] = 5;
  expect_refused(a, TESSERA_FORWARD, "page_indices[2]: 5", "0 .. 4");
  a.page_indices[2] = -1;
  expect_refused(a, TESSERA_FORWARD, "page_indices[2]: -1", "0 .. 4");
  a = csr();
  a.seqused_k = {24, 17};
  expect_refused(a, TESSERA_FORWARD, "seqused_k[1]: 17", "0 .. 16");
  a = csr();
  a.page_indptr = {-1, 4, 6};
  expect_refused(a, TESSERA_FORWARD, "page_indptr[0]: -1", "0 .. 7, the rows of page_indices");
  a.page_indptr = {1, 4, 3};
  expect_refused(a, TESSERA_FORWARD, "page_indptr[2]: 3 after 4", "must not decrease");
  a.page_indptr = {1, 4, 8};
  expect_refused(a, TESSERA_FORWARD, "page_indptr[2]: 8", "at most 7");
}

// 16 queries a sequence, 24 and 16 keys in pages of 8.
Attention prefixed() {
  Attention a = paged();
  share_prefixes(a.problem);
  a.prefix_groups = {0, 2};
  a.prefix_lens = {16};
  return a;
}

TEST(Execute, RefusesPrefixesThatAreNone) {
  Attention a = prefixed();
  EXPECT_TRUE(Attention(a).try_run(TESSERA_FORWARD).ok());
  a.prefix_lens = {17};
  expect_refused(a, TESSERA_FORWARD, "prefix_lens[0]: 17", "0 .. 16, the keys of sequence 1 of that group");
  a.prefix_groups = {0, 1};
  EXPECT_TRUE(Attention(a).try_run(TESSERA_FORWARD).ok());
  a.prefix_lens = {-1};
  expect_refused(a, TESSERA_FORWARD, "prefix_lens[0]: -1", "accepted from 0 on");
  a = prefixed();
  a.prefix_groups = {-1, 2};
  expect_refused(a, TESSERA_FORWARD, "prefix_groups[0]: -1", "0 .. 2, the sequences of the batch");
  a.prefix_groups = {1, 0};
  expect_refused(a, TESSERA_FORWARD, "prefix_groups[1]: 0 after 1", "must not decrease");
  a.prefix_groups = {0, 3};
  expect_refused(a, TESSERA_FORWARD, "prefix_groups[1]: 3", "at most 2");
}

TEST(Execute, RefusesMoreKeysThanTheBoundOfASuffix) {
  Attention a = prefixed();
  a.problem.max_suffix_k = 8;
  EXPECT_TRUE(Attention(a).try_run(TESSERA_FORWARD).ok());
  a.prefix_lens = {15};  // only its full pages are read once
  expect_refused(a, TESSERA_FORWARD, "max_suffix_k: 8", "of sequence 0 16 keys");
  a.prefix_lens = {16};
  a.problem.max_prefix_k = 8;
  expect_refused(a, TESSERA_FORWARD, "max_suffix_k: 8", "of sequence 0 16 keys");
  a = prefixed();
  a.problem.max_suffix_k = 8;
  a.problem.causal = 1;  // 16 queries a sequence: the first of sequence 1 sees one key
  expect_refused(a, TESSERA_FORWARD, "max_suffix_k: 8", "of sequence 0 24 keys");
}

}  // namespace
}  // namespace tessera::test
