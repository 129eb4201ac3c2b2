// An output shares no element with any other buffer; buffers that only appear to overlap are accepted.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/overlap.hpp"
#include "support.hpp"

namespace tessera::test {
namespace {

// Against every byte of both, over small tensors of any strides.
TEST(Overlap, IsThatOfTheirBytes) {
  std::mt19937 random(3);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int shared = 0, interleaved = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<char> memory(4096);
    tessera_layout layouts[2] = {};
    const char* data[2];
    std::set<const char*> bytes[2];
    for (int t = 0; t < 2; ++t) {
      tessera_layout& l = layouts[t];
      constexpr std::int32_t kDtypes[] = {TESSERA_BOOL, TESSERA_BFLOAT16, TESSERA_FLOAT32, TESSERA_FLOAT64};
      l.dtype = kDtypes[draw(0, 3)];
      l.rank = draw(1, 3);
      const auto size = static_cast<std::int64_t>(tessera_dtype_bytes(l.dtype));
      data[t] = memory.data() + 2048 + draw(-60, 60) * (draw(0, 1) ? size : 1);
      std::vector<const char*> elements = {data[t]};
      for (int axis = 0; axis < l.rank; ++axis) {
        l.shape[axis] = draw(1, 4);
        l.strides[axis] = draw(0, 3) ? draw(-12, 12) : 4 * draw(1, 6);
        std::vector<const char*> more;
        for (std::int64_t n = 0; n < l.shape[axis]; ++n) {
          for (const char* element : elements) more.push_back(element + n * l.strides[axis] * size);
        }
        elements = more;
      }
      for (const char* element : elements) {
        for (std::int64_t byte = 0; byte < size; ++byte) bytes[t].insert(element + byte);
      }
      const core::Extent extent = core::extent_of(l, data[t]);
      ASSERT_EQ(extent.begin, *bytes[t].begin());
      ASSERT_EQ(extent.end, *bytes[t].rbegin() + 1);
    }
    bool expected = false;
    for (const char* byte : bytes[0]) expected = expected || bytes[1].contains(byte);
    ASSERT_EQ(core::overlap(layouts[0], data[0], layouts[1], data[1]), expected) << "trial " << trial;
    shared += expected;
    interleaved += !expected && *bytes[0].rbegin() >= *bytes[1].begin() && *bytes[1].rbegin() >= *bytes[0].begin();
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(interleaved, 1000);
}

// One tensor [B, S, parts, H, D], each part a view, as packed projections are.
struct Packed {
  static constexpr std::int64_t kB = 2, kS = 40, kH = 3, kD = 16;
  std::int64_t parts;
  std::vector<float> data = std::vector<float>(static_cast<std::size_t>(kB * kS * parts * kH * kD), 0.25f);

  Layout view() const {
    const std::int64_t row = parts * kH * kD;
    return layout(float32, {kB, kS, kH, kD}, {kS * row, row, kD, 1});
  }
  float* at(std::int64_t part) { return data.data() + part * kH * kD; }
};

std::string refusal(const Problem& problem, const Buffers& buffers, std::int32_t direction = TESSERA_FORWARD) {
  const Plan plan = tessera::plan(problem);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  const Status status =
      direction == TESSERA_BACKWARD ? try_backward(plan, buffers, workspace) : try_forward(plan, buffers, workspace);
  EXPECT_EQ(status.code(), status.ok() ? Code::ok : Code::invalid_argument);
  return std::string(status.message());
}

TEST(Sharing, ViewsOfOneTensorAreTheirOwn) {
  Packed x{4}, g{4};
  Problem problem;
  problem.q = problem.k = problem.v = problem.o = x.view();
  problem.lse = lse_layout(problem);
  std::vector<float> lse(elements(problem.lse));
  EXPECT_EQ(refusal(problem, {.q = x.at(0), .k = x.at(1), .v = x.at(2), .o = x.at(3), .lse = lse.data()}), "");
  EXPECT_EQ(refusal(problem, {.q = x.at(0), .k = x.at(0), .v = x.at(0), .o = x.at(3), .lse = lse.data()}), "")
      << "inputs may be one";
  const Problem backward = gradient_of(problem);
  EXPECT_EQ(refusal(backward,
                    {.q = x.at(0),
                     .k = x.at(1),
                     .v = x.at(2),
                     .o = x.at(3),
                     .lse = lse.data(),
                     .d_o = g.at(3),
                     .d_q = g.at(0),
                     .d_k = g.at(1),
                     .d_v = g.at(2)},
                    TESSERA_BACKWARD),
            "");
}

TEST(Sharing, OfAnOutputIsRefused) {
  Packed x{5}, g{5};
  Problem problem;
  problem.q = problem.k = problem.v = problem.o = x.view();
  problem.lse = lse_layout(problem);
  std::vector<float> lse(elements(problem.lse));
  const Buffers good = {.q = x.at(0), .k = x.at(1), .v = x.at(2), .o = x.at(3), .lse = lse.data()};
  const auto with = [&good](auto change) {
    Buffers buffers = good;
    change(buffers);
    return buffers;
  };
  const std::string accepted = ", accepted memory of its own: it is written";
  EXPECT_EQ(refusal(problem, with([&](Buffers& b) { b.o = x.at(0); })), "o: shares memory with q" + accepted);
  EXPECT_EQ(refusal(problem, with([&](Buffers& b) { b.o = x.at(2) + 1; })), "o: shares memory with v" + accepted);
  EXPECT_EQ(refusal(problem, with([&](Buffers& b) { b.k = g.at(0), b.lse = g.at(0) + 4; })),
            "lse: shares memory with k" + accepted);
  const Problem backward = gradient_of(problem);
  Buffers b = good;
  b.d_o = g.at(3), b.d_q = g.at(0), b.d_k = g.at(1), b.d_v = g.at(1) + 8;
  EXPECT_EQ(refusal(backward, b, TESSERA_BACKWARD), "d_k: shares memory with d_v" + accepted);
  b.d_v = g.at(2), b.d_q = g.at(3);
  EXPECT_EQ(refusal(backward, b, TESSERA_BACKWARD), "d_q: shares memory with d_o" + accepted);

  const Plan plan = tessera::plan(problem);
  std::vector<float> memory(plan.workspace_bytes / 4 + 1);
  const Buffers inside = with([&](Buffers& of) { of.lse = memory.data(); });
  const Status status = try_forward(plan, inside, std::as_writable_bytes(std::span(memory)));
  EXPECT_EQ(status.message(), "lse: shares memory with workspace" + accepted);
}

TEST(Sharing, OfACombinedOutputIsRefused) {
  std::vector<float> o_parts(2 * 3 * 8, 1.0f), lse_parts(2 * 3), o(3 * 8), lse(3);
  const Layout o_parts_layout = layout(float32, {2, 1, 3, 1, 8}), lse_parts_layout = layout(float32, {2, 1, 1, 3});
  const Layout o_layout = layout(float32, {1, 3, 1, 8}), lse_layout = layout(float32, {1, 1, 3});
  const auto combine = [&](float* to, float* lse_to) {
    CombineCall call;
    call.o_parts = tensor(o_parts_layout, o_parts.data()), call.lse_parts = tensor(lse_parts_layout, lse_parts.data());
    call.o = tensor(o_layout, to), call.lse = tensor(lse_layout, lse_to);
    return std::string(try_combine(call).message());
  };
  EXPECT_EQ(combine(o.data(), lse.data()), "");
  EXPECT_TRUE(combine(o_parts.data(), lse.data()).starts_with("o: shares memory with o_parts"));
  EXPECT_TRUE(combine(o.data(), o.data() + 5).starts_with("o: shares memory with lse"));
}

}  // namespace
}  // namespace tessera::test
