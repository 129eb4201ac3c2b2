// Facts that follow from a program.
#include "core/score/facts.hpp"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/score/affine.hpp"
#include "core/score/capped.hpp"
#include "core/score/definitions.hpp"
#include "core/score/evaluate.hpp"
#include "core/score/parse.hpp"

namespace tessera::core::score {
namespace {

std::shared_ptr<const Checked> checked(const char* score, const char* mask) {
  Program program;
  const tessera_status status = parse(score, mask, testing::World(1).names(), program);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  std::shared_ptr<const Checked> result;
  EXPECT_EQ(check(program, result).code, TESSERA_OK);
  return result;
}

Facts facts(const char* score, const char* mask = "") { return facts_of(*checked(score, mask)); }

TEST(ScoreFacts, OfScores) {
  const Facts none = facts("s");
  EXPECT_FALSE(none.changes_score || none.has_mask || none.reads_tensors || none.may_hide || none.slope_needs_s);
  EXPECT_TRUE(none.score_needs_s && none.passes_gradient);

  const Facts softcap = facts("50 * tanh(s / 50)");
  EXPECT_TRUE(softcap.changes_score && softcap.score_needs_s && softcap.slope_needs_s);
  EXPECT_FALSE(softcap.passes_gradient || softcap.may_hide || softcap.reads_tensors);
  EXPECT_EQ(softcap.score_inputs, input_bit(Op::kS));
  EXPECT_EQ(softcap.gradient_inputs, input_bit(Op::kS));

  const Facts bias = facts("s + key_bias[b, j]");
  EXPECT_TRUE(bias.reads_tensors && bias.may_hide && bias.passes_gradient);
  EXPECT_FALSE(bias.slope_needs_s);
  EXPECT_TRUE(bias.affine && facts("(s - 1.0) * temperature[h] + key_bias[b, j]").affine);
  EXPECT_FALSE(softcap.affine || facts("s + key_bias[b, j]", "j <= i").affine);
  EXPECT_EQ(bias.gradient_loads, 1);
  EXPECT_EQ(bias.score_inputs, input_bit(Op::kS) | input_bit(Op::kB) | input_bit(Op::kJ));
  EXPECT_EQ(bias.gradient_inputs, input_bit(Op::kB) | input_bit(Op::kJ));

  const Facts temperature = facts("s * temperature[h]");
  EXPECT_EQ(temperature.gradient_inputs, input_bit(Op::kS) | input_bit(Op::kH));  // of the temperature's own gradient
  EXPECT_FALSE(temperature.passes_gradient || temperature.slope_needs_s);
  EXPECT_FALSE(temperature.sums_by_head);  // made of products
  EXPECT_TRUE(facts("where(i > j, s * temperature[h], s)").sums_by_head);
  EXPECT_FALSE(bias.sums_by_head || softcap.sums_by_head);
  EXPECT_FALSE(facts("tanh(s * temperature[h])").sums_by_head);
  EXPECT_FALSE(facts("s * temperature[h] + key_bias[b, j]").sums_by_head);
  EXPECT_TRUE(facts("abs(s)").slope_needs_s);
  EXPECT_FALSE(facts("where(s > 0.0, temperature[h], 1.0)").slope_needs_s);  // it is 0

  const Facts without = facts("0.5 * sin(float(i))");
  EXPECT_TRUE(without.changes_score);
  EXPECT_FALSE(without.score_needs_s || without.passes_gradient || without.may_hide);
}

// Which scores are functions of one tanh, whose value is not the same for all pairs of a head.
TEST(ScoreFacts, Capped) {
  const auto inner = [](const char* text) {
    const std::shared_ptr<const Checked> program = checked(text, "");
    const std::optional<Capped> capped = capped_of(program->program);
    return capped ? inputs_of(program->program, capped->inner) : 0;
  };
  constexpr InputSet kS = input_bit(Op::kS), kH = input_bit(Op::kH), kJ = input_bit(Op::kJ), kB = input_bit(Op::kB);
  EXPECT_EQ(inner("t * tanh(s / t)"), kS);
  EXPECT_EQ(inner("tanh(s)"), kS);
  EXPECT_EQ(inner("50 * tanh((s + key_bias[b, j]) / 50)"), kS | kB | kJ);
  EXPECT_EQ(inner("temperature[h] * tanh(s * temperature[h]) + t * float(b)"), kS | kH);
  EXPECT_EQ(inner("t * tanh(s + tanh(s))"), kS);
  EXPECT_EQ(inner("x = tanh(s); x * x + abs(x)"), kS);
  for (const char* text : {"s", "s * t", "tanh(s) + s", "tanh(s) * j", "tanh(s) + key_bias[b, j]", "tanh(t) * s",
                           "tanh(s) + tanh(s * t)", "i * 2.0 + tanh(float(i))", "sigmoid(s)"}) {
    EXPECT_EQ(inner(text), 0u) << text;
  }
}

// Of what the gradients of loads are made.
TEST(ScoreFacts, LoadSums) {
  const auto sums = [](const char* score, const char* mask = "") { return load_sums(*checked(score, mask)); };
  using Sums = std::vector<LoadSum>;
  EXPECT_EQ(sums("s * temperature[h]"), Sums{LoadSum::kProducts});
  EXPECT_EQ(sums("-s / exp(temperature[h])", "s < 1.0"), Sums{LoadSum::kProducts});
  EXPECT_EQ(sums("s * temperature[h] + 0.5 * j"), Sums{LoadSum::kProducts});
  EXPECT_EQ(sums("s * temperature[h] + relative[h, i - j + len_k]"), (Sums{LoadSum::kProducts, LoadSum::kDiagonals}));
  EXPECT_EQ(sums("(s + relative[h, i - j + len_k]) * 2.0"), Sums{LoadSum::kDiagonals});
  EXPECT_EQ(sums("s + slope[h] * (j - i)"), Sums{LoadSum::kDiagonals});
  EXPECT_EQ(sums("s * place[i] + relative[h, i - j + len_k]"), (Sums{LoadSum::kPairs, LoadSum::kDiagonals}));
  EXPECT_EQ(sums("(s + 1.0) * temperature[h]"), Sums{LoadSum::kPairs});  // needs the sum of dScore, too
  EXPECT_EQ(sums("(s + place[j]) * temperature[h]"), (Sums{LoadSum::kPairs, LoadSum::kPairs}));
  EXPECT_EQ(sums("50 * tanh((s + relative[h, i - j + len_k]) / 50)"), Sums{LoadSum::kPairs});
  EXPECT_EQ(sums("where(i > j, s * temperature[h], s)"), Sums{LoadSum::kPairs});
}

// Which scores are affine in the one before, and their factors and terms at one pair.
TEST(ScoreFacts, Affine) {
  struct Expected {
    const char* text;
    double factor, term;
  };
  for (const auto& [text, factor, term] : {Expected{"s + t", 1, 1.75},
                                           {"s * t", 1.75, 0},
                                           {"s / t - i", 1 / 1.75, -3},
                                           {"t - s", -1, 1.75},
                                           {"-(s - j) * t", -1.75, 1.75 * 5},
                                           {"(s + i) * 2.0 - s", 1, 6},
                                           {"t * (3.0 - (t + s * i))", -1.75 * 3, 1.75 * (3 - 1.75)},
                                           {"s + (i < j ? t : -inf)", 1, 1.75},
                                           {"j < 3 ? 1.0 : s + s", 0, 0},
                                           {"s * s", 0, 0},
                                           {"t / s", 0, 0},
                                           {"abs(s)", 0, 0},
                                           {"s", 0, 0},
                                           {"t * i", 0, 0}}) {
    const std::shared_ptr<const Checked> program = checked(text, "");
    const std::optional<Affine> affine = affine_of(program->program);
    ASSERT_EQ(affine.has_value(), factor != 0) << text;
    if (!affine) continue;
    testing::World world(1);
    const Bindings bindings = world.bindings(affine->program);
    Evaluator evaluator(affine->program, bindings);
    evaluator.begin(world.pair(0, 0, 3, 5, 0.5));
    EXPECT_DOUBLE_EQ(evaluator.value(affine->factor), factor) << text;
    EXPECT_EQ(affine->term < 0, term == 0) << text;
    if (affine->term >= 0) {
      EXPECT_DOUBLE_EQ(evaluator.value(affine->term), term) << text;
    }
    EXPECT_FALSE(inputs_of(affine->program, affine->factor) & input_bit(Op::kS)) << text;
  }
  // A form for each value: sums of sums do not grow by powers of two.
  std::string sums = "x0 = s + 1.0; ";
  for (int n = 1; n <= 40; ++n) {
    const std::string before = "x" + std::to_string(n - 1);
    sums += "x" + std::to_string(n) + " = 0.25 * (" + before + " + " + before + "); ";
  }
  EXPECT_TRUE(affine_of(checked((sums + "x40").c_str(), "")->program));
}

TEST(ScoreFacts, MayHide) {
  for (const char* text : {"where(j <= q_pos, s, -inf)", "where(s > 0.0, s, -inf)", "where(s < 0.0, s, -inf)", "s + t",
                           "log(s)", "sqrt(s)", "s / (i - j)", "-exp(s)"}) {
    EXPECT_TRUE(facts(text).may_hide) << text;
  }
  for (const char* text : {"s + 0.25 * j", "where(i < 0, -inf, s)", "sigmoid(s)", "min(max(s, -2.0), 2.0)",
                           "doc[b, i] == doc[b, j] ? s : s - 10.0"}) {
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
  EXPECT_FALSE(facts("s", "s > 0.0").changes_score);
  for (const char* score : {"-s", "s + 0.0 * t", "where(j <= q_pos, s, -inf)"}) {
    EXPECT_TRUE(facts(score, "j <= q_pos").changes_score) << score;
  }
}

// Beside any score, a mask is the program that it is by itself.
TEST(ScoreFacts, TheMaskAlone) {
  EXPECT_EQ(checked("s * t", "")->mask_alone, nullptr);
  EXPECT_EQ(checked("s", "keep[b, j]")->mask_alone, nullptr);
  for (const testing::Definition& definition : testing::definitions()) {
    if (*definition.mask == 0) continue;
    const std::shared_ptr<const Checked> mask = checked("", definition.mask);
    for (const char* score : {"2.0 * s", "s * t + key_bias[b, j] * embedding[id[b, i]]"}) {
      const std::shared_ptr<const Checked> alone = checked(score, definition.mask)->mask_alone;
      ASSERT_NE(alone, nullptr) << definition.mask;
      EXPECT_EQ(alone->text, mask->text) << score;
      EXPECT_EQ(alone->hash, mask->hash) << score;
    }
  }
}

TEST(ScoreFacts, PatternsOfGradients) {
  const auto pattern = [](const char* score) {
    Program program;
    const tessera_status status = parse(score, "", testing::World(1).names(), program);
    EXPECT_EQ(status.code, TESSERA_OK) << status.message;
    const Gradient made = gradient(program);
    EXPECT_EQ(made.loads.size(), 1u);
    return pattern_of(made.program, made.loads[0]);
  };
  EXPECT_EQ(pattern("s * gain[]"), GradientPattern::kHead);
  EXPECT_EQ(pattern("s * temperature[h]"), GradientPattern::kHead);
  EXPECT_EQ(pattern("s + query_bias[b, i]"), GradientPattern::kRow);
  EXPECT_EQ(pattern("s + place[q_pos // 2]"), GradientPattern::kRow);
  EXPECT_EQ(pattern("s + embedding[id[b, j]]"), GradientPattern::kColumn);
  EXPECT_EQ(pattern("s + relative[h, i - j + 56]"), GradientPattern::kDiagonal);
  EXPECT_EQ(pattern("s + relative[h, 3 - (j - q_pos) + prefix]"), GradientPattern::kDiagonal);
  EXPECT_EQ(pattern("s + bucket[h, min(abs(i - j), 31)]"), GradientPattern::kDiagonal);
  EXPECT_EQ(pattern("s + place[2 * i - 2 * j]"), GradientPattern::kGather);
  EXPECT_EQ(pattern("s + place[i + j]"), GradientPattern::kGather);
  EXPECT_EQ(pattern("s + dense[b, h, i, j]"), GradientPattern::kElement);
  EXPECT_EQ(pattern("s + dense[b, h, len_q - 1 - i, j + 2]"), GradientPattern::kElement);
  EXPECT_EQ(pattern("s + block[i >> 4, j >> 4]"), GradientPattern::kGather);
  EXPECT_EQ(pattern("s + place[int(s)]"), GradientPattern::kGather);
}

// Pairs of the table's programs share elements as their pattern says.
TEST(ScoreFacts, PatternsHold) {
  const testing::World world(1);
  for (const testing::Definition& definition : testing::definitions()) {
    Program program;
    ASSERT_EQ(parse(definition.score, definition.mask, world.names(), program).code, TESSERA_OK);
    const Gradient made = gradient(program);
    const Bindings bindings = world.bindings(made.program);
    Evaluator evaluator(made.program, bindings);
    for (const LoadGradient& load : made.loads) {
      const GradientPattern pattern = pattern_of(made.program, load);
      std::map<int64_t, std::vector<double>> shared;  // by what the pattern has in common
      std::set<std::vector<double>> all;
      for (int64_t i = 0; i < world.len_q; ++i) {
        for (int64_t j = 0; j < world.len_k; ++j) {
          evaluator.begin(world.pair(1, 2, i, j, 0.5));
          std::vector<double> index;
          for (const int place : load.indices) index.push_back(evaluator.value(place));
          const bool is_new = all.insert(index).second;
          if (pattern == GradientPattern::kGather) continue;
          if (pattern == GradientPattern::kElement) {
            ASSERT_TRUE(is_new) << definition.name;
            continue;
          }
          const int64_t common = pattern == GradientPattern::kHead     ? 0
                                 : pattern == GradientPattern::kRow    ? i
                                 : pattern == GradientPattern::kColumn ? j
                                                                       : i - j;
          ASSERT_EQ(shared.try_emplace(common, index).first->second, index) << definition.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::core::score
