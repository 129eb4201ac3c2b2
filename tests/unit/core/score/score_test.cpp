// The language of score programs: the meaning of texts, refusals, printing, gradients, and bounds of blocks.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "core/score/builder.hpp"
#include "core/score/definitions.hpp"
#include "core/score/derivative.hpp"
#include "core/score/drawn.hpp"
#include "core/score/evaluate.hpp"
#include "core/score/parse.hpp"
#include "core/score/print.hpp"
#include "core/score/slopes.hpp"

namespace tessera::core::score {
namespace {

using testing::Definition;
using testing::definitions;
using testing::drawn_pair;
using testing::expression;
using testing::World;

Program parsed(const char* score, const char* mask, const std::vector<Name>& names) {
  Program program;
  const tessera_status status = parse(score, mask, names, program);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return program;
}

std::string refusal(std::string_view score, std::string_view mask = "",
                    const std::vector<Name>& names = World(1).names()) {
  Program program;
  const tessera_status status = parse(score, mask, names, program);
  return status.code == TESSERA_OK ? "accepted" : status.message;
}

bool alike(double a, double b, double tolerance) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b || std::fabs(a - b) <= tolerance * std::max(1.0, std::fabs(b));
}

class OfTable : public ::testing::TestWithParam<size_t> {
 protected:
  const Definition& definition = definitions()[GetParam()];
  World world{GetParam() + 1};
  Program program = parsed(definition.score, definition.mask, world.names());
  Bindings bindings = world.bindings(program);
  std::mt19937_64 random{GetParam()};
};

TEST_P(OfTable, MeansWhatItsDefinitionSays) {
  Evaluator evaluator(program, bindings);
  for (int n = 0; n < 500; ++n) {
    const Inputs pair = drawn_pair(world, random);
    evaluator.begin(pair);
    const double score = program.score < 0 ? pair.s : evaluator.value(program.score);
    const bool visible = program.mask < 0 || evaluator.value(program.mask) != 0;
    ASSERT_PRED3(alike, score, definition.new_score(pair, world), 1e-12) << definition.name;
    ASSERT_EQ(visible, definition.visible(pair, world)) << definition.name << " i " << pair.i << " j " << pair.j;
    ASSERT_FALSE(evaluator.read_outside()) << definition.name;
  }
}

TEST_P(OfTable, ItsTextReadsBackAsTheSameProgram) {
  const std::string score = program.score < 0 ? "" : to_text(program, program.score);
  const std::string mask = program.mask < 0 ? "" : to_text(program, program.mask);
  const Program again = parsed(score.c_str(), mask.c_str(), world.names());
  EXPECT_EQ(key(again), key(program));
  EXPECT_EQ(again.operations(), program.operations());
}

TEST(CanonicalText, OfLongChainsIsNotNestedTooDeeply) {
  for (const std::string_view step : {"tanh(s0)", "-(1 - s0)", "(s0 - 1) / (2 - s0)"}) {
    std::string text = "x0 = s; ";
    for (int n = 1; n <= 40; ++n) {
      std::string next(step);
      for (size_t at = next.find("s0"); at != std::string::npos; at = next.find("s0")) {
        next.replace(at, 2, "x" + std::to_string(n - 1));
      }
      text += "x" + std::to_string(n) + " = " + next + "; ";
    }
    const Program program = parsed((text + "x40").c_str(), "", {});
    const Program again = parsed(to_text(program, program.score).c_str(), "", {});
    EXPECT_EQ(key(again), key(program));
    EXPECT_EQ(again.values.size(), program.values.size());
  }
}

TEST_P(OfTable, ItsGradientIsTheSlopeOfTheScore) {
  if (!definition.smooth) GTEST_SKIP() << "not smooth";
  EXPECT_EQ(testing::wrong_gradient(world, program, random, 100), "") << definition.name;
}

// Bounds of a block of pairs, by its corners.
Bounds bounds_of(const World& world, const Program& program, int64_t b, int64_t h, int64_t i0, int64_t i1, int64_t j0,
                 int64_t j1) {
  const auto range = [](int64_t low, int64_t high) {
    return Interval{static_cast<double>(low), static_cast<double>(high)};
  };
  Bounds bounds;
  const Inputs first = world.pair(b, h, i0, j0, 0), last = world.pair(b, h, i1, j1, 0);
  bounds.s = {-6, 6};
  bounds.b = range(b, b), bounds.h = range(h, h), bounds.h_kv = range(first.h_kv, first.h_kv);
  bounds.i = range(i0, i1), bounds.j = range(j0, j1), bounds.q_pos = range(first.q_pos, last.q_pos);
  bounds.len_q = range(world.len_q, world.len_q), bounds.len_k = range(world.len_k, world.len_k);
  bounds.element = [&world, &program](int tensor, const Interval* index) {
    const testing::WorldTensor& t = world.tensors.at(program.tensors[static_cast<size_t>(tensor)].text);
    Interval all{0, 0};  // an index that is outside reads 0
    bool none = true;
    for (int64_t at = 0; at < static_cast<int64_t>(t.data.size()); ++at) {
      bool inside = true;
      int64_t rest = at;
      for (size_t axis = t.shape.size(); axis-- > 0; rest /= t.shape[axis]) {
        const double place = static_cast<double>(rest % t.shape[axis]);
        inside = inside && index[axis].low <= place && place <= index[axis].high;
      }
      if (!inside) continue;
      const double x = t.data[static_cast<size_t>(at)];
      all = none ? Interval{x, x} : Interval{std::min(all.low, x), std::max(all.high, x)};
      none = false;
    }
    for (size_t axis = 0; axis < t.shape.size(); ++axis) {
      if (index[axis].low < 0 || index[axis].high >= static_cast<double>(t.shape[axis])) {
        all = {std::min(all.low, 0.0), std::max(all.high, 0.0)};
      }
    }
    return all;
  };
  bounds.scalar = [&world, &program](int scalar) {
    return Interval::exactly(world.scalars.at(program.scalars[static_cast<size_t>(scalar)].text));
  };
  return bounds;
}

// Every pair of a drawn block is within the bounds of the block; returns what the mask's bounds say of it.
Visible expect_bounded(const World& world, const Program& program, std::mt19937_64& random, const std::string& what) {
  const Bindings bindings = world.bindings(program);
  Evaluator evaluator(program, bindings);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  const int64_t i0 = below(world.len_q), i1 = std::min(world.len_q - 1, i0 + below(12));
  const int64_t j0 = below(world.len_k), j1 = std::min(world.len_k - 1, j0 + below(12));
  const int64_t b = below(world.batch), h = below(world.heads);
  const Bounds bounds = bounds_of(world, program, b, h, i0, i1, j0, j1);
  const Visible seen = visible(program, bounds);
  const Interval score = program.score < 0 ? bounds.s : bound(program, program.score, bounds);
  std::uniform_real_distribution<double> uniform(-6, 6);
  for (int64_t i = i0; i <= i1; ++i) {
    for (int64_t j = j0; j <= j1; ++j) {
      evaluator.begin(world.pair(b, h, i, j, uniform(random)));
      if (program.mask >= 0 && seen != Visible::kSome) {
        EXPECT_EQ(evaluator.value(program.mask) != 0, seen == Visible::kAll) << what;
      }
      if (program.score < 0) continue;
      const double x = evaluator.value(program.score);
      const bool inside = std::isnan(x) ? score.nan : score.low <= x && x <= score.high;
      EXPECT_TRUE(inside) << what << ": " << x << " outside " << score.low << " .. " << score.high;
      if (!inside) return seen;
    }
  }
  return seen;
}

TEST_P(OfTable, BoundsHoldEveryPairOfABlock) {
  for (int n = 0; n < 200; ++n) expect_bounded(world, program, random, definition.name);
}

INSTANTIATE_TEST_SUITE_P(Score, OfTable, ::testing::Range(size_t{0}, definitions().size()));

// What bounds are for: blocks far from a mask's edge are decided without looking at a pair.
TEST(ScoreBounds, DecideBlocksFarFromTheEdge) {
  World world(1);
  const auto seen = [&](const char* mask, int64_t i0, int64_t j0) {
    const Program program = parsed("", mask, world.names());
    return visible(program, bounds_of(world, program, 0, 0, i0, i0 + 7, j0, j0 + 7));
  };
  EXPECT_EQ(seen("j <= q_pos", 16, 0), Visible::kAll);
  EXPECT_EQ(seen("j <= q_pos", 0, 48), Visible::kNone);
  EXPECT_EQ(seen("j <= q_pos", 16, 32), Visible::kSome);
  EXPECT_EQ(seen("j <= q_pos && q_pos - j < 16", 32, 0), Visible::kNone);
  EXPECT_EQ(seen("i // 8 == j // 8", 8, 8), Visible::kAll);
  EXPECT_EQ(seen("i // 8 == j // 8", 8, 16), Visible::kNone);
  EXPECT_EQ(seen("abs(i // width - j // width) <= 1", 8, 40), Visible::kNone);
  EXPECT_EQ(seen("q_pos - i == len_k - len_q", 3, 5), Visible::kAll);
}

TEST(ScoreText, IsPrintedInOneForm) {
  const auto canonical = [](const char* text) {
    const Program program = parsed(text, "", World(1).names());
    return program.score < 0 ? std::string("s") : to_text(program, program.score);
  };
  EXPECT_EQ(canonical("50*tanh( s/50 )  # a comment"), "50.0 * tanh(s / 50.0)");
  EXPECT_EQ(canonical("((s)) + 0.5 - (1 - 0.5)"), "s + 0.5 - 0.5");
  EXPECT_EQ(canonical("s - (s - 1)"), "s - (s - 1.0)");
  EXPECT_EQ(canonical("x = s * s; y = x * x; y + x"), "v0 = s * s; v0 * v0 + v0");
  EXPECT_EQ(canonical("i > j ? s : -s"), "where(j < i, s, -s)");
  EXPECT_EQ(canonical("s * -2"), "s * -2.0");
  EXPECT_EQ(canonical("-(-s)"), "s");
}

TEST(ScoreText, IsRefusedAtItsColumn) {
  EXPECT_EQ(refusal("s + bia"),
            "score, column 5: 'bia' is no name here, accepted s, b, h, h_kv, i, j, q_pos, len_q, len_k, "
            "block, bucket, cap, decay, dense, doc, embedding, gain, id, keep, key_bias, place, query_bias, "
            "relative, slope, span, temperature, used, prefix, radius, t, width, and the functions of the language");
  EXPECT_EQ(refusal("", "j"), "mask, column 1: is int, accepted bool: a mask is a truth value");
  EXPECT_EQ(refusal("j < i"), "score, column 1: is bool, accepted float: a score is a float");
  EXPECT_EQ(refusal("s +"), "score, column 4: the text ends, accepted a value");
  EXPECT_EQ(refusal("s $ 2"), "score, column 3: unexpected '$'");
  EXPECT_EQ(refusal("s % 2"), "score, column 3: '%' of float and int, accepted int and int");
  EXPECT_EQ(refusal("i % 0 + s"), "score, column 5: divides by 0");
  EXPECT_EQ(refusal("relative[h]"), "score, column 1: 'relative' has 1 indices, accepted 2");
  EXPECT_EQ(refusal("slope[s]"), "score, column 7: is float, accepted int: an index of 'slope'");
  EXPECT_EQ(refusal("a < b < c", "", {}),
            "score, column 1: 'a' is no name here, accepted s, b, h, h_kv, i, j, q_pos, len_q, len_k, "
            "and the functions of the language");
  EXPECT_EQ(refusal("", "i < j < 3"), "mask, column 7: comparisons do not chain: join them by &&");
  EXPECT_EQ(refusal("s = 2; s"), "score, column 1: 's' is a name already");
  EXPECT_EQ(refusal("x = 2"), "score, column 6: the text ends, accepted ';' and an expression after it");
  EXPECT_EQ(refusal("3000000000 + s"),
            "score, column 1: '3000000000' is beyond 32 bits, accepted as a float: 3000000000.0");
  EXPECT_EQ(refusal("exp(j < i)"), "score, column 1: 'exp' of bool, accepted float");
  EXPECT_EQ(refusal("s s"), "score, column 3: unexpected 's'");
  EXPECT_EQ(refusal("where(i, s, s)"),
            "score, column 1: 'where' of int and float and float, accepted bool and float and float; "
            "bool and int and int; bool and bool and bool");
  EXPECT_EQ(refusal(std::string(100, '(') + "s"), "score, column 65: nested more than 64 deep");
  EXPECT_EQ(refusal("s * 1e400"), "score, column 5: '1e400' is beyond float64");
  EXPECT_EQ(refusal("1.5.2"), "score, column 4: unexpected '.' in a number");
  EXPECT_EQ(refusal(std::string(20000, ' ')), "score: a text of 20000 bytes, accepted at most 16384");
  EXPECT_EQ(refusal("s", "", {{"tanh", Type::kFloat, 0, false}}), "name 'tanh': it means something in every program");
  EXPECT_EQ(refusal("s", "", {{"2x", Type::kFloat, 0, false}}).substr(0, 10), "name '2x':");
}

TEST(ScoreText, HasLimits) {
  std::string sum = "s";
  for (int n = 0; n < kMaxOperations; ++n) sum = "sin(" + std::string("s * ") + std::to_string(n + 2) + ") + " + sum;
  EXPECT_EQ(refusal(sum), "score program: 384 operations, accepted at most 128");
  std::vector<Name> many;
  std::string all = "s";
  for (int n = 0; n <= kMaxTensors; ++n) {
    many.push_back({"x" + std::to_string(n), Type::kFloat, 0, true});
    all += " + x" + std::to_string(n) + "[]";
  }
  EXPECT_EQ(refusal(all, "", many), "score program: 9 tensors, accepted at most 8");
}

TEST(ScoreText, SharesNoMeaningWithTheLocale) { EXPECT_EQ(refusal("s * 1,5"), "score, column 6: unexpected ','"); }

TEST(ScoreValues, ToAnIntegerRoundsTowardsZeroAndSaturates) {
  World world(1);
  const Program program = parsed("float(int(sqrt(s) - 2.5)) + float(int(s))", "", world.names());
  const Bindings bindings = world.bindings(program);
  Evaluator evaluator(program, bindings);
  const auto value = [&](double s) {
    evaluator.begin(world.pair(0, 0, 0, 0, s));
    return evaluator.value(program.score);
  };
  EXPECT_EQ(value(1.75), -1 + 1);
  EXPECT_EQ(value(16.5), 1 + 16);
  EXPECT_EQ(value(-3.5), 0 - 3) << "the square root is NaN";
  EXPECT_EQ(value(1e18), 999999997 + 2147483647.0);
}

// where selects: a side that is not taken adds nothing, whatever its slope is.
TEST(ScoreGradient, IsSelectedNeverMultipliedByZero) {
  World world(1);
  for (const char* text :
       {"s > 0.0 ? log(s) : 2.0 * s", "where(s > 0.0, sqrt(s), 2.0 * s)", "max(2.0 * s, rsqrt(s) - 1e30)"}) {
    const Gradient by_reverse = gradient(parsed(text, "", world.names()));
    const Bindings bindings = world.bindings(by_reverse.program);
    Evaluator reverse(by_reverse.program, bindings);
    Inputs pair = world.pair(0, 0, 0, 0, text[0] == 'm' ? 4.0 : 0.0);
    pair.g = 1;
    reverse.begin(pair);
    EXPECT_EQ(reverse.value(by_reverse.d_s), 2) << text;
  }
}

TEST(ScoreGradient, AtACornerIsPyTorchs) {
  World world(1);
  const auto slope = [&](const char* text, double s) {
    const Gradient by_reverse = gradient(parsed(text, "", world.names()));
    const Bindings bindings = world.bindings(by_reverse.program);
    Evaluator reverse(by_reverse.program, bindings);
    Inputs pair = world.pair(0, 0, 0, 0, s);
    pair.g = 1;
    reverse.begin(pair);
    return by_reverse.d_s < 0 ? 0 : reverse.value(by_reverse.d_s);
  };
  EXPECT_EQ(slope("abs(s)", 0), 0);
  EXPECT_EQ(slope("max(s, 0.0)", 0), 0.5);
  EXPECT_EQ(slope("min(2.0 * s, 1.0)", 0.5), 1);
  EXPECT_EQ(slope("floor(s)", 0.5), 0);
  EXPECT_EQ(slope("sqrt(s)", 0), INFINITY);
}

// ---- drawn programs -------------------------------------------------------------------------------------------------

TEST(ScoreFuzz, DrawnProgramsReadBackAndStayWithinTheirBounds) {
  World world(3);
  std::mt19937_64 random(3);
  int tried = 0;
  for (int n = 0; n < 1500; ++n) {
    const std::string score = expression(Type::kFloat, 1 + n % 4, random),
                      mask = expression(Type::kBool, 1 + n % 3, random);
    Program program;
    const tessera_status status = parse(score, mask, world.names(), program);
    if (status.code != TESSERA_OK) {  // too long, a divisor that folds to 0
      EXPECT_TRUE(std::string(status.message).find("divides by 0") != std::string::npos ||
                  std::string(status.message).find("operations") != std::string::npos)
          << status.message << "\n"
          << score << "\n"
          << mask;
      continue;
    }
    ++tried;
    const std::string score_text = program.score < 0 ? "" : to_text(program, program.score);
    const std::string mask_text = program.mask < 0 ? "" : to_text(program, program.mask);
    const Program again = parsed(score_text.c_str(), mask_text.c_str(), world.names());
    ASSERT_EQ(key(again), key(program)) << score << "\n" << mask;
    for (int block = 0; block < 3; ++block) expect_bounded(world, program, random, score + "\n" + mask);
    if (HasFailure()) return;
    gradient(program);
  }
  EXPECT_GT(tried, 1000);
}

TEST(ScoreFuzz, GradientsOfDrawnProgramsAreSlopes) {
  World world(5);
  std::mt19937_64 random(5);
  for (int n = 0; n < 600; ++n) {
    const std::string text = testing::smooth_expression(1 + n % 4, random);
    const Program program = parsed(text.c_str(), "", world.names());
    ASSERT_EQ(testing::wrong_gradient(world, program, random, 5), "") << text;
  }
}

TEST(ScoreFuzz, AnyBytesAreRefusedOrRead) {
  const std::vector<Name> names = World(1).names();
  std::mt19937_64 random(4);
  for (int n = 0; n < 20000; ++n) {
    const std::string text = testing::bytes(random);
    Program program;
    const tessera_status status = parse(text, "", names, program);
    if (status.code != TESSERA_OK) {
      EXPECT_EQ(std::string(status.message).rfind("score", 0), 0u) << status.message;
    }
  }
}

}  // namespace
}  // namespace tessera::core::score
