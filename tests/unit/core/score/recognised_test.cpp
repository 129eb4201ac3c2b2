// What of a program is recognised as an option, and what stays.
#include "core/score/recognised.hpp"

#include <gtest/gtest.h>

#include <charconv>
#include <cmath>
#include <random>
#include <string>

#include "core/score/definitions.hpp"
#include "core/score/drawn.hpp"
#include "core/score/parse.hpp"
#include "core/score/print.hpp"

namespace tessera::core::score {
namespace {

using testing::Definition;
using testing::definitions;
using testing::World;

const Surroundings kShort{.longest = 1 << 20};

Program parsed(const char* score, const char* mask) {
  Program program;
  const tessera_status status = parse(score, mask, World(1).names(), program);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return program;
}

// "the range -15 <= j - q_pos <= 0, softcap 50, ALiBi by slope"; "" if nothing was recognised.
std::string recognised_text(const Program& program, const Recognised& recognised) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  const PositionRange& range = recognised.range;
  if (range.any()) {
    std::string bounds = std::string("j - ") + (range.from_q_pos ? "q_pos" : "i");
    if (range.low != PositionRange::kNoLow) bounds = std::to_string(range.low) + " <= " + bounds;
    if (range.high != PositionRange::kNoHigh) bounds += " <= " + std::to_string(range.high);
    add("the range " + bounds);
  }
  if (recognised.softcap != 0) {
    char cap[40];
    add("softcap " + std::string(cap, std::to_chars(cap, cap + sizeof cap, recognised.softcap).ptr));
  }
  if (recognised.slopes >= 0) add("ALiBi by " + program.tensors[static_cast<size_t>(recognised.slopes)].text);
  return text;
}

// What is recognised, "; score: " and what stays of the score, "; mask: " and of the mask.
std::string recognised(const char* score, const char* mask, const Surroundings& surroundings = kShort) {
  const Program program = parsed(score, mask);
  const Recognised result = recognise(program, surroundings);
  std::string text = recognised_text(program, result);
  if (result.rest.score >= 0) text += "; score: " + to_text(result.rest, result.rest.score);
  if (result.rest.mask >= 0) text += "; mask: " + to_text(result.rest, result.rest.mask);
  return text;
}

TEST(ScoreRecognise, RangesOfPositions) {
  const auto mask = [](const char* text) { return recognised("", text); };
  EXPECT_EQ(mask("j <= q_pos"), "the range j - q_pos <= 0");
  EXPECT_EQ(mask("!(j > q_pos)"), "the range j - q_pos <= 0");
  EXPECT_EQ(mask("q_pos >= j"), "the range j - q_pos <= 0");
  EXPECT_EQ(mask("j < i"), "the range j - i <= -1");
  EXPECT_EQ(mask("j <= i + len_k - len_q"), "the range j - q_pos <= 0");
  EXPECT_EQ(mask("j <= q_pos + len_q - len_k"), "the range j - i <= 0");
  EXPECT_EQ(mask("j <= i + 3"), "the range j - i <= 3");
  EXPECT_EQ(mask("i - j < 16"), "the range -15 <= j - i");
  EXPECT_EQ(mask("j <= q_pos && q_pos - j < 16"), "the range -15 <= j - q_pos <= 0");
  EXPECT_EQ(mask("abs(q_pos - j) <= 8"), "the range -8 <= j - q_pos <= 8");
  EXPECT_EQ(mask("abs(j - i) < 8"), "the range -7 <= j - i <= 7");
  EXPECT_EQ(mask("i == j"), "the range 0 <= j - i <= 0");
  EXPECT_EQ(mask("j <= q_pos && doc[b, i] == doc[b, j] && j >= q_pos - 4"),
            "the range -4 <= j - q_pos <= 0; mask: doc[b, i] == doc[b, j]");
  // Of one position; equal lengths make them one.
  EXPECT_EQ(mask("i - j < 16 && j <= q_pos"), "the range j - q_pos <= 0; mask: i - j < 16");
  EXPECT_EQ(recognised("", "i - j < 16 && j <= q_pos", {.longest = 4096, .equal_lengths = true}),
            "the range -15 <= j - q_pos <= 0");
}

TEST(ScoreRecognise, NoRangesOfAnythingElse) {
  for (const char* text :
       {"j < 4", "j < prefix + i", "2 * j <= q_pos", "j + j <= q_pos", "j <= q_pos || j < 4", "i - j < width",
        "abs(i - j) > 8", "i != j", "j <= q_pos + len_k", "h < 2", "q_pos < len_k"}) {
    EXPECT_EQ(recognised("", text).substr(0, 2), "; ") << text;
  }
  // It may wrap: of the longest sequences, or by a constant.
  EXPECT_EQ(recognised("", "j <= q_pos", {}), "the range j - q_pos <= 0");
  EXPECT_EQ(recognised("", "q_pos - j < 16", {}), "; mask: q_pos - j < 16");
  EXPECT_EQ(recognised("", "j <= i + 2147483647"), "; mask: j <= i + 2147483647");
}

TEST(ScoreRecognise, Softcap) {
  const auto score = [](const char* text) { return recognised(text, ""); };
  EXPECT_EQ(score("50 * tanh(s / 50)"), "softcap 50");
  EXPECT_EQ(score("tanh(s / 30.0) * 30"), "softcap 30");
  EXPECT_EQ(score("5 * tanh(s / 5) + key_bias[b, j]"), "softcap 5; score: s + key_bias[b, j]");
  for (const char* text : {"50 * tanh(s / 40)", "-50 * tanh(s / -50)", "tanh(s)", "50 * tanh(s * 0.02)",
                           "50 * tanh(s / 50) + s", "t * tanh(s / t)", "0.1 * tanh(s / 0.1)"}) {
    EXPECT_EQ(score(text).substr(0, 2), "; ") << text;
  }
  EXPECT_EQ(recognised("5 * tanh(s / 5)", "s > 0.0").substr(0, 2), "; ");  // the mask is of the score before
  for (const Surroundings& taken :
       {Surroundings{.softcap = true}, Surroundings{.bias = true}, Surroundings{.alibi = true}}) {
    EXPECT_EQ(recognised("50 * tanh(s / 50)", "", taken), "; score: 50.0 * tanh(s / 50.0)");
  }
}

TEST(ScoreRecognise, Alibi) {
  for (const char* text :
       {"s - slope[h] * abs(q_pos - j)", "s - abs(j - q_pos) * slope[h]", "s + slope[h] * -abs(q_pos - j)",
        "-slope[h] * abs(float(q_pos - j)) + s", "s + -(slope[h] * abs(i + len_k - len_q - j))"}) {
    EXPECT_EQ(recognised(text, ""), "ALiBi by slope") << text;
  }
  // With a sign where it is known.
  for (const char* text : {"s + slope[h] * (j - q_pos)", "s - slope[h] * (q_pos - j)", "s - slope[h] * -(j - q_pos)"}) {
    EXPECT_EQ(recognised(text, "").substr(0, 2), "; ") << text;
    EXPECT_EQ(recognised(text, "j <= q_pos"), "the range j - q_pos <= 0, ALiBi by slope") << text;
    EXPECT_EQ(recognised(text, "", {.longest = 4096, .causal = true}), "ALiBi by slope") << text;
  }
  EXPECT_EQ(recognised("s + slope[h] * (j - i)", "j <= i", {.longest = 4096, .equal_lengths = true}),
            "the range j - q_pos <= 0, ALiBi by slope");
  for (const char* text :
       {"s + slope[h] * abs(q_pos - j)", "s - slope[h_kv] * abs(q_pos - j)", "s - slope[h] * abs(i - j)",
        "s - slope[h] * abs(i + len_k - j)", "s - t * abs(q_pos - j)", "2 * s - slope[h] * abs(q_pos - j)",
        "s - slope[h] * abs(q_pos - j + 1)", "s - slope[h] * abs(q_pos - j) * s"}) {
    const std::string found = recognised(text, "j <= q_pos");
    EXPECT_EQ(found.find("ALiBi"), std::string::npos) << text << ": " << found;
  }
  EXPECT_EQ(recognised("s - slope[h] * abs(q_pos - j)", "", {.longest = 4096, .alibi = true}).substr(0, 2), "; ");
  EXPECT_EQ(recognised("s - slope[h] * abs(q_pos - j)", "", {.longest = 4096, .no_slopes = 1}).substr(0, 2), "; ");
  EXPECT_EQ(recognised("c = 5 * tanh(s / 5); c - slope[h] * abs(q_pos - j) + relative[h, i - j + len_k]", ""),
            "softcap 5, ALiBi by slope; score: s + relative[h, i - j + len_k]");
}

// A program of doubled values is no more work than its operations.
TEST(ScoreRecognise, IsLinear) {
  std::string sum = "i", mask = "j <= i";
  std::string text;
  for (int n = 0; n < 50; ++n)
    text += "x" + std::to_string(n) + " = " + sum + " + " + sum + "; ", sum = "x" + std::to_string(n);
  text += "y0 = j <= " + sum + "; ";
  for (int n = 0; n < 50; ++n)
    text += "y" + std::to_string(n + 1) + " = y" + std::to_string(n) + " && y" + std::to_string(n) + "; ";
  recognise(parsed("", (text + "y50").c_str()), kShort);
}

// The range, softcap, ALiBi and what stays are together the program, for every pair.
void expect_same(const std::string& what, const Program& program, const World& world, const Surroundings& surroundings,
                 std::mt19937_64& random) {
  const Recognised result = recognise(program, surroundings);
  const Bindings bindings = world.bindings(program), of_rest = world.bindings(result.rest);
  Evaluator whole(program, bindings), rest(result.rest, of_rest);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  std::normal_distribution<double> normal(0, 2);
  for (int n = 0; n < 200; ++n) {
    Inputs pair =
        world.pair(below(world.batch), below(world.heads), below(world.len_q), below(world.len_k), normal(random));
    whole.begin(pair);
    const int64_t distance = pair.j - (result.range.from_q_pos ? pair.q_pos : pair.i);
    const bool inside = distance >= result.range.low && distance <= result.range.high;
    const bool visible = program.mask < 0 || whole.value(program.mask) != 0;
    Inputs after = pair;
    if (result.softcap != 0) after.s = result.softcap * std::tanh(after.s / result.softcap);
    if (result.slopes >= 0) {
      const std::string& slopes = program.tensors[static_cast<size_t>(result.slopes)].text;
      after.s -= world(slopes.c_str(), {pair.h}) * static_cast<double>(std::abs(pair.q_pos - pair.j));
    }
    rest.begin(after);
    ASSERT_EQ(visible, inside && (result.rest.mask < 0 || rest.value(result.rest.mask) != 0)) << what;
    if (!visible) continue;
    const double expected = program.score < 0 ? pair.s : whole.value(program.score);
    const double got = result.rest.score < 0 ? after.s : rest.value(result.rest.score);
    ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
        << what << ": " << got << ", " << expected;
  }
}

TEST(ScoreRecognise, IsTheProgram) {
  World world(2);
  std::mt19937_64 random(2);
  for (const Definition& definition : definitions()) {
    expect_same(definition.name, parsed(definition.score, definition.mask), world, kShort, random);
  }
  world.len_k = world.len_q;
  const Surroundings kEqual{.longest = 1 << 20, .equal_lengths = true};
  for (int n = 0; n < 600; ++n) {
    const std::string score = testing::expression(Type::kFloat, 1 + n % 3, random);
    std::string mask = testing::expression(Type::kBool, 1 + n % 3, random);
    if (n % 2) mask = "j - 3 <= i && (" + mask + ") && abs(q_pos - j) < 20";
    Program program;
    if (parse(score, mask, world.names(), program).code != TESSERA_OK) continue;
    expect_same(score + "\n" + mask, program, world, n % 3 ? kEqual : kShort, random);
    if (HasFatalFailure()) return;
  }
}

// Of the table of definitions.
TEST(ScoreRecognise, Definitions) {
  std::string names;
  for (const Definition& definition : definitions()) {
    if (recognise(parsed(definition.score, definition.mask), kShort).any())
      names += std::string(definition.name) + "; ";
  }
  EXPECT_EQ(names, "softcap; ALiBi; three together; causal; window; documents; dilated window; not; score and mask; ");
}

}  // namespace
}  // namespace tessera::core::score
