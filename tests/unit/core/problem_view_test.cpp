// The tensors of score options as both back ends read them: strides by the roles of their axes.
#include "core/problem_view.hpp"

#include <gtest/gtest.h>

#include "support.hpp"

namespace tessera::test {
namespace {

struct Strides {
  std::int64_t batch, head, row, col;
  bool operator==(const Strides&) const = default;
};

Strides strides_of(core::TensorName name, const Problem& problem) {
  const core::ScoreView view = core::score_view(name, problem, {});
  return {view.stride.batch, view.stride.head, view.stride.row, view.stride.col};
}

Problem dense() {
  Problem problem;
  problem.q = problem.o = layout(float32, {2, 16, 4, 32});
  problem.k = problem.v = layout(float32, {2, 24, 4, 32});
  return problem;
}

TEST(ProblemView, BroadcastAxesHaveNoStride) {
  Problem problem = dense();
  problem.bias = layout(float32, {2, 4, 16, 24});
  EXPECT_EQ(strides_of("bias", problem), (Strides{4 * 16 * 24, 16 * 24, 24, 1}));
  problem.bias = layout(float32, {1, 4, 1, 24});
  EXPECT_EQ(strides_of("bias", problem), (Strides{0, 24, 0, 1}));
  problem.block_mask = layout(boolean, {2, 1, 4, 3});
  EXPECT_EQ(strides_of("block_mask", problem), (Strides{12, 0, 3, 1}));
}

TEST(ProblemView, AxesByTheirRole) {
  Problem problem = dense();
  problem.alibi_slopes = layout(float32, {4});
  EXPECT_EQ(strides_of("alibi_slopes", problem), (Strides{0, 1, 0, 0}));
  problem.alibi_slopes = layout(float32, {2, 4});
  EXPECT_EQ(strides_of("alibi_slopes", problem), (Strides{4, 1, 0, 0}));
  problem.tree_mask = layout(int32, {2, 16, 3});
  EXPECT_EQ(strides_of("tree_mask", problem), (Strides{48, 0, 3, 1}));
  EXPECT_EQ(core::score_view("tree_mask", problem, {}).cols, 3);
  problem.q = layout(float32, {32, 4, 32}), problem.cu_seqlens_q = layout(int32, {3});
  problem.tree_mask = layout(int32, {32, 3});
  EXPECT_EQ(strides_of("tree_mask", problem), (Strides{0, 0, 3, 1}));
}

TEST(ProblemView, WhatChangesScores) {
  for (const core::TensorField& field : core::kTensorFields) {
    const std::string_view name = field.name;
    const bool expected =
        name == "bias" || name == "mask" || name == "block_mask" || name == "alibi_slopes" || name == "tree_mask";
    EXPECT_EQ(core::changes_scores(field), expected) << name;
  }
}

}  // namespace
}  // namespace tessera::test
