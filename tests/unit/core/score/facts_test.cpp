// Facts that follow from a program.
#include "core/score/facts.hpp"

#include <gtest/gtest.h>

#include <memory>

#include "core/score/definitions.hpp"
#include "core/score/parse.hpp"

namespace tessera::core::score {
namespace {

Facts facts(const char* score, const char* mask = "") {
  Program program;
  const tessera_status status = parse(score, mask, testing::World(1).names(), program);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  std::shared_ptr<const Checked> checked;
  EXPECT_EQ(check(program, checked).code, TESSERA_OK);
  return facts_of(*checked);
}

TEST(ScoreFacts, OfScores) {
  const Facts none = facts("s");
  EXPECT_FALSE(none.changes_score || none.has_mask || none.reads_tensors || none.may_hide || none.gradient_needs_s);
  EXPECT_TRUE(none.score_needs_s && none.passes_gradient);

  const Facts softcap = facts("50 * tanh(s / 50)");
  EXPECT_TRUE(softcap.changes_score && softcap.score_needs_s && softcap.gradient_needs_s);
  EXPECT_FALSE(softcap.passes_gradient || softcap.may_hide || softcap.reads_tensors);
  EXPECT_EQ(softcap.score_inputs, input_bit(Op::kS));
  EXPECT_EQ(softcap.gradient_inputs, input_bit(Op::kS));

  const Facts bias = facts("s + key_bias[b, j]");
  EXPECT_TRUE(bias.reads_tensors && bias.may_hide && bias.passes_gradient);
  EXPECT_FALSE(bias.gradient_needs_s);
  EXPECT_EQ(bias.gradient_loads, 1);
  EXPECT_EQ(bias.score_inputs, input_bit(Op::kS) | input_bit(Op::kB) | input_bit(Op::kJ));
  EXPECT_EQ(bias.gradient_inputs, input_bit(Op::kB) | input_bit(Op::kJ));

  const Facts temperature = facts("s * temperature[h]");
  EXPECT_TRUE(temperature.gradient_needs_s);  // of the temperature's own gradient
  EXPECT_FALSE(temperature.passes_gradient);

  const Facts without = facts("0.5 * sin(float(i))");
  EXPECT_TRUE(without.changes_score);
  EXPECT_FALSE(without.score_needs_s || without.passes_gradient || without.may_hide);
}

TEST(ScoreFacts, MayHide) {
  for (const char* text : {"where(j <= q_pos, s, -inf)", "s + t", "log(s)", "s / (i - j)", "-exp(s)"}) {
    EXPECT_TRUE(facts(text).may_hide) << text;
  }
  for (const char* text :
       {"s + 0.25 * j", "sigmoid(s)", "min(max(s, -2.0), 2.0)", "doc[b, i] == doc[b, j] ? s : s - 10.0"}) {
    EXPECT_FALSE(facts(text).may_hide) << text;
  }
}

TEST(ScoreFacts, OfMasks) {
  const Facts documents = facts("", "j <= q_pos && doc[b, i] == doc[b, j]");
  EXPECT_TRUE(documents.has_mask && documents.reads_tensors && documents.passes_gradient);
  EXPECT_FALSE(documents.changes_score || documents.mask_needs_s || documents.may_hide);
  EXPECT_EQ(documents.gradient_loads, 0);
  EXPECT_EQ(documents.mask_inputs, input_bit(Op::kB) | input_bit(Op::kI) | input_bit(Op::kJ) | input_bit(Op::kQPos));
  EXPECT_TRUE(facts("", "s > 0.0").mask_needs_s);
}

}  // namespace
}  // namespace tessera::core::score
