// The CUDA text of score programs, compiled for the host, against the evaluation in float64: new score, mask,
// gradients, and which loads are taken.
#include "core/score/cuda_text.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>

#include "core/convert.hpp"
#include "core/score/bound.hpp"
#include "core/score/cuda_programs.hpp"
#include "core/score/cuda_text_table.hpp"
#include "core/score/definitions.hpp"
#include "core/score/facts.hpp"
#include "core/score/storage.hpp"
#include "cuda/score_program.hpp"

namespace tessera::core::score {
namespace {

using tessera::testing::CudaProgram;
using testing::CudaTextEntry;
using testing::Received;
using testing::Storage;
using testing::World;

constexpr double kEpsilon = 0x1p-24;  // half of the distance between 1 and the next float32

double ulp(double x) {
  const float at = static_cast<float>(std::fabs(x));
  if (!std::isfinite(at)) return 0;
  return static_cast<double>(std::nextafter(at, std::numeric_limits<float>::infinity())) - at;
}

// How far an operation of floats may be from the exact value for its operands: what is one correctly rounded operation
// half an ulp, what only chooses or changes a sign nothing, functions 4 ulp. Quotients by a value of all pairs: 1.5.
double ulps_of(Op op) {
  switch (op) {
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kDiv:
    case Op::kIntToFloat:
      return 0.5;
    case Op::kExp:
    case Op::kExp2:
    case Op::kLog:
    case Op::kSqrt:
    case Op::kRsqrt:
    case Op::kTanh:
    case Op::kSigmoid:
    case Op::kSin:
    case Op::kCos:
      return 4;
    default:
      return 0;
  }
}

// A value in float64, by how much one in float32 may differ, and whether it may differ by any amount: what a comparison
// of nearly equal floats decides, a floor beside an integer, a float32 that may overflow.
struct Approximate {
  double x = 0, error = 0;
  bool unsure = false;
};

// Evaluates as Evaluator does, with running errors.
class ErrorEvaluator {
 public:
  ErrorEvaluator(const Program& program, const Bindings& bindings, const Inputs& inputs)
      : program_(program),
        bindings_(bindings),
        inputs_(inputs),
        values_(program.values.size()),
        made_(program.values.size()),
        checked_(program.values.size()) {}

  const Approximate& value(int place) {
    const size_t at = static_cast<size_t>(place);
    if (!made_[at]) values_[at] = make(program_.values[at]), made_[at] = true;
    return values_[at];
  }

  // Visits the loads below `root` that a check counts.
  void check(int root) {
    if (root < 0 || checked_[static_cast<size_t>(root)]) return;
    checked_[static_cast<size_t>(root)] = true;
    const Value& v = program_.values[static_cast<size_t>(root)];
    const int count = operand_count(v);
    const bool chooses = v.op == Op::kWhere || v.op == Op::kWhereInt || v.op == Op::kWhereBool;
    if (chooses || v.op == Op::kAnd || v.op == Op::kOr) {
      check(v.operands[0]);
      if (depends_on_s(v.operands[0])) return;
      const Approximate condition = value(v.operands[0]);
      unsure_loads_ = unsure_loads_ || condition.unsure;
      if (chooses) return check(v.operands[condition.x != 0 ? 1 : 2]);
      if ((v.op == Op::kAnd) == (condition.x != 0)) check(v.operands[1]);
      return;
    }
    bool known = v.op == Op::kLoad;
    int64_t index[kMaxOperands] = {};
    for (int n = 0; n < count; ++n) {
      check(v.operands[n]);
      known = known && !depends_on_s(v.operands[n]);
      if (!known) continue;
      const Approximate at = value(v.operands[n]);
      unsure_loads_ = unsure_loads_ || at.unsure;
      index[n] = static_cast<int64_t>(at.x);
    }
    if (!known) return;
    bool read = true;
    bindings_.element(v.name, index, read);
    read_outside_ = read_outside_ || !read;
  }
  bool depends_on_s(int place) const { return (inputs_of(program_, place) & input_bit(Op::kS)) != 0; }
  bool read_outside() const { return read_outside_; }
  bool unsure_loads() const { return unsure_loads_; }

 private:
  double input(Op op) const {
    const double all[] = {inputs_.s,
                          static_cast<double>(inputs_.b),
                          static_cast<double>(inputs_.h),
                          static_cast<double>(inputs_.h_kv),
                          static_cast<double>(inputs_.i),
                          static_cast<double>(inputs_.j),
                          static_cast<double>(inputs_.q_pos),
                          static_cast<double>(inputs_.len_q),
                          static_cast<double>(inputs_.len_k),
                          inputs_.g};
    return all[static_cast<size_t>(op)];
  }

  Approximate make(const Value& v) {
    if (v.op <= Op::kG) return {input(v.op)};
    if (v.op == Op::kConstant) return {v.type == Type::kFloat ? static_cast<float>(v.constant) : v.constant};
    if (v.op == Op::kScalar) return {bindings_.scalar(v.name)};
    if (v.op == Op::kLoad) return load(v);
    const Approximate first = value(v.operands[0]);
    const bool chooses = v.op == Op::kWhere || v.op == Op::kWhereInt || v.op == Op::kWhereBool;
    if (chooses || v.op == Op::kAnd || v.op == Op::kOr) {
      if (first.unsure) return {0, 0, true};
      if (chooses) return value(v.operands[first.x != 0 ? 1 : 2]);
      if ((v.op == Op::kAnd) == (first.x == 0)) return first;
    }
    Approximate x[3] = {first};
    const int count = operation(v.op).operands;
    bool unsure = first.unsure;
    for (int n = 1; n < count; ++n) {
      x[n] = value(v.operands[n]);
      unsure = unsure || x[n].unsure;
    }
    if (unsure) return {0, 0, true};
    return of_operands(v, x, count);
  }

  Approximate load(const Value& v) {
    int64_t index[kMaxOperands] = {};
    for (int n = 0; n < operand_count(v); ++n) {
      const Approximate& at = value(v.operands[n]);
      if (at.unsure) return {0, 0, true};
      index[n] = static_cast<int64_t>(at.x);
    }
    bool read = true;
    const double x = bindings_.element(v.name, index, read);
    return {read ? x : 0};
  }

  // The function at the corners of what its operands may be: exact to first order, and a jump between them is unsure.
  Approximate of_operands(const Value& v, const Approximate* x, int count) {
    const Operation& row = operation(v.op);
    double exact[3] = {x[0].x, x[1].x, x[2].x};
    Approximate result{row.evaluate(exact)};
    const bool is_wave = v.op == Op::kSin || v.op == Op::kCos;
    if (is_wave && x[0].error > 0.1) return {0, 0, true};
    for (int corner = 0; corner < 1 << count; ++corner) {
      double at[3] = {};
      for (int n = 0; n < count; ++n) at[n] = exact[n] + (corner >> n & 1 ? x[n].error : -x[n].error);
      const double y = row.evaluate(at);
      if (y == result.x || (std::isnan(y) && std::isnan(result.x))) continue;
      if (row.result != Type::kFloat || v.op == Op::kFloor || v.op == Op::kSign || !std::isfinite(y - result.x)) {
        return {0, 0, true};
      }
      result.error = std::max(result.error, std::fabs(y - result.x));
    }
    if (row.result != Type::kFloat || !std::isfinite(result.x)) return result;
    // By the reciprocal of a value of all pairs.
    const Op divisor = v.op == Op::kDiv ? program_.values[static_cast<size_t>(v.operands[1])].op : Op::kS;
    const bool by_uniform = divisor == Op::kConstant || divisor == Op::kScalar;
    result.error += ((by_uniform ? 1.5 : ulps_of(v.op)) + 0x1p-10) * ulp(result.x);
    constexpr double kLargest = std::numeric_limits<float>::max();
    if (std::fabs(result.x) - result.error > kLargest * (1 + kEpsilon)) {
      return {std::copysign(std::numeric_limits<double>::infinity(), result.x)};
    }
    result.unsure = std::fabs(result.x) + result.error > kLargest;
    return result;
  }

  const Program& program_;
  const Bindings& bindings_;
  const Inputs inputs_;
  std::vector<Approximate> values_;
  std::vector<bool> made_, checked_;
  bool read_outside_ = false, unsure_loads_ = false;
};

bool agrees(float got, const Approximate& expected) {
  if (expected.unsure) return true;
  if (std::isnan(expected.x) || std::isnan(got)) return std::isnan(expected.x) && std::isnan(got);
  return got == expected.x || std::fabs(got - expected.x) <= expected.error + 0x1p-149;
}

class ScoreCudaText : public ::testing::TestWithParam<size_t> {
 protected:
  static const std::vector<CudaProgram>& programs() {
    static const std::vector<CudaProgram> all = testing::cuda_programs(testing::kDrawnForHost);
    return all;
  }
  const CudaProgram& program = programs()[GetParam()];
  const CudaTextEntry& text = testing::kCudaTexts[GetParam()];
};

TEST_P(ScoreCudaText, IsTheProgram) {
  World world(GetParam() + 1);
  const Storage storage(program, world);
  int read_outside = 0;
  const ScoreProgramParams params = cuda::program_params(storage.bound, &read_outside);
  const Program& score = program.checked->program;
  const Gradient& gradient = program.checked->gradient;
  const Bindings bindings = bindings_of(storage.bound);
  std::mt19937_64 random(GetParam());
  std::normal_distribution<float> normal(0, 2);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  constexpr int kPairs = 400;
  int sure = 0, outside = 0, stepped = 0;
  for (int n = 0; n < kPairs; ++n) {
    Inputs pair = world.pair(below(world.batch), below(world.heads), below(world.len_q), below(world.len_k),
                             n == 0 ? 0.0f : normal(random));
    pair.g = normal(random);
    // The results do not depend on which parts of i and j the compiler knows.
    const ProgramPlace at{static_cast<int>(pair.b),
                          static_cast<int>(pair.h),
                          static_cast<int>(pair.h_kv),
                          static_cast<int>(pair.i),
                          static_cast<int>(pair.j),
                          static_cast<int>(pair.q_pos),
                          static_cast<int>(pair.len_q),
                          static_cast<int>(pair.len_k),
                          n % 3 * 8,
                          n % 5 * 9};
    const float s = static_cast<float>(pair.s), g = static_cast<float>(pair.g);

    ErrorEvaluator expected(score, bindings, pair);
    const Approximate visible = score.mask < 0 ? Approximate{1} : expected.value(score.mask);
    if (!visible.unsure) {
      ASSERT_EQ(text.visible(params, at, s), visible.x != 0) << program.what;
      ++sure;
    }
    ErrorEvaluator of_score(score, bindings, pair);
    const Approximate changed = score.score < 0 ? Approximate{pair.s} : of_score.value(score.score);
    const float got = text.score(params, at, s);
    ASSERT_TRUE(agrees(got, changed)) << program.what << ": " << got << ", expected " << changed.x << " +- "
                                      << changed.error;
    sure += !changed.unsure;
    if (text.capped) {
      const float capped = text.capped(params, at, s);
      ASSERT_TRUE(agrees(capped, changed))
          << program.what << ": " << capped << ", expected " << changed.x << " +- " << changed.error;
    }
    if (text.affine) {
      const float affine = text.affine(params, at, s);
      ASSERT_TRUE(agrees(affine, changed))
          << program.what << ": " << affine << ", expected " << changed.x << " +- " << changed.error;
    }
    if (bool inside = false; text.stepped) {
      const float by_steps = text.stepped(params, at, s, inside);
      if (inside) {
        ASSERT_TRUE(by_steps == got || (std::isnan(by_steps) && std::isnan(got))) << program.what << ": " << by_steps;
        ++stepped;
      }
    }

    // The mask, and the score of what it shows.
    ErrorEvaluator checks(score, bindings, pair);
    checks.check(score.mask);
    if (score.mask < 0 || (!checks.depends_on_s(score.mask) && visible.x != 0)) checks.check(score.score);
    if (!visible.unsure && !checks.unsure_loads()) {
      read_outside = 0;
      text.check(params, at);
      ASSERT_EQ(read_outside != 0, checks.read_outside()) << program.what;
      outside += read_outside;
    }

    ErrorEvaluator reverse(gradient.program, bindings, pair);
    testing::Sink sink;
    const float d_s = text.gradient(params, at, g, s, sink);
    const Approximate expected_d_s = gradient.d_s < 0 ? Approximate{} : reverse.value(gradient.d_s);
    ASSERT_TRUE(agrees(d_s, expected_d_s))
        << program.what << ": d_s " << d_s << ", expected " << expected_d_s.x << " +- " << expected_d_s.error;
    const Facts facts = facts_of(*program.checked);
    ASSERT_EQ(text.score_and_slope != nullptr, facts.slope_needs_s || facts.sums_by_head);
    if (text.score_and_slope) {
      Inputs unit = pair;
      unit.g = 1;
      ErrorEvaluator of_unit(gradient.program, bindings, unit);
      const Approximate expected_slope = of_unit.value(facts.sums_by_head ? gradient.loads[0].adjoint : gradient.d_s);
      float slope = 0;
      const float with_slope = text.score_and_slope(params, at, s, slope);
      ASSERT_TRUE(agrees(slope, expected_slope))
          << program.what << ": slope " << slope << ", expected " << expected_slope.x << " +- " << expected_slope.error;
      if (!text.mask_needs_s) {
        ASSERT_TRUE(agrees(with_slope, changed)) << program.what << ": " << with_slope << ", expected " << changed.x;
      } else if (!visible.unsure) {
        ASSERT_TRUE(visible.x == 0 ? with_slope == -INFINITY : agrees(with_slope, changed)) << program.what;
      }
    }
    ASSERT_EQ(sink.all.size(), gradient.loads.size());
    for (size_t load = 0; load < sink.all.size(); ++load) {
      const LoadGradient& of = gradient.loads[load];
      const Received& received = sink.all[load];
      ASSERT_EQ(received.tensor, of.tensor);
      ASSERT_EQ(received.index.size(), of.indices.size());
      const Approximate& adjoint = reverse.value(of.adjoint);
      ASSERT_TRUE(agrees(received.adjoint, adjoint))
          << program.what << ": load " << load << " receives " << received.adjoint << ", expected " << adjoint.x
          << " +- " << adjoint.error;
      int64_t index[kMaxRank] = {};
      bool known = !adjoint.unsure && adjoint.x != 0;  // a load that is not taken has no index to speak of
      for (size_t axis = 0; axis < of.indices.size(); ++axis) {
        const Approximate& place = reverse.value(of.indices[axis]);
        known = known && !place.unsure;
        index[axis] = static_cast<int64_t>(place.x);
        if (known) {
          ASSERT_EQ(received.index[axis], index[axis]) << program.what;
        }
      }
      if (known) {
        ASSERT_EQ(received.inside, storage.bound.tensors[static_cast<size_t>(of.tensor)].holds(index)) << program.what;
      }
    }
  }
  if (text.stepped) {
    EXPECT_GT(stepped, 0) << program.what;
    EXPECT_LT(stepped, kPairs) << program.what;
  }
  if (program.what.starts_with(testing::kOutside)) {
    EXPECT_GT(outside, 0) << program.what;
    EXPECT_LT(outside, kPairs) << program.what;
  }
  if (GetParam() < testing::definitions().size()) {
    EXPECT_GT(sure, kPairs * 7 / 4) << program.what << ": " << sure;
  }
}

TEST_P(ScoreCudaText, HasNoNameOfItsUser) {
  const std::string source = cuda_text(*program.checked, program.dtypes, {});
  EXPECT_EQ(source, cuda_text(*program.checked, program.dtypes, {}));
  for (const Name& tensor : program.checked->program.tensors) {
    if (tensor.text == "place" || tensor.text == "slope") continue;  // names of the text's own parameters begin so
    EXPECT_EQ(source.find(" " + tensor.text), std::string::npos) << source;
    EXPECT_EQ(source.find(tensor.text + "["), std::string::npos) << source;
  }
}

INSTANTIATE_TEST_SUITE_P(Score, ScoreCudaText,
                         ::testing::Range(size_t{0}, testing::cuda_programs(testing::kDrawnForHost).size()));

// Sine and cosine at angles of all sizes, also beside multiples of pi / 2.
TEST(ScoreCudaFunctions, WavesAreWithinFourUlp) {
  std::mt19937 random(1);
  const auto expect = [](float x) {
    const double sine = std::sin(static_cast<double>(x)), cosine = std::cos(static_cast<double>(x));
    ASSERT_LE(std::fabs(program::sin_(x) - sine), 4 * ulp(sine)) << x;
    ASSERT_LE(std::fabs(program::cos_(x) - cosine), 4 * ulp(cosine)) << x;
  };
  for (int n = 0; n < 400000; ++n) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) expect(x);
  }
  for (int n = 1; n < 100000; ++n) {
    const float x = static_cast<float>(n * 1.5707963267948966);
    expect(x), expect(-x), expect(std::nextafter(x, 0.0f)), expect(x * 4096);
  }
  for (const float x : {0.0f, -0.0f, 105614.99f, 105615.0f, -105615.0f, 16367173.0f * 0x1p+72f}) expect(x);
  EXPECT_TRUE(std::isnan(program::sin_(INFINITY)) && std::isnan(program::cos_(-INFINITY)));
}

TEST(ScoreCudaFunctions, SigmoidIsWithinFourUlp) {
  for (float x = -104; x < 90; x += 0x1p-8f) {
    const double expected = 1 / (1 + std::exp(-static_cast<double>(x)));
    ASSERT_LE(std::fabs(program::sigmoid_(x) - expected), 4 * ulp(expected)) << x;
  }
}

// Any two floats, also subnormal, infinite and not numbers.
TEST(ScoreCudaFunctions, QuotientsByOneValueAreCorrectlyRoundedButForTheSmallest) {
  std::mt19937 random(2);
  const auto drawn = [&] { return std::bit_cast<float>(static_cast<uint32_t>(random())); };
  const auto expect = [](float a, float b) {
    const float correct = a / b, found = program::divide_by(a, program::SharedDivisor(b));
    if (!std::isfinite(correct) || std::fabs(correct) > 0x1.fffffcp127f) {
      ASSERT_TRUE(std::isnan(correct) ? std::isnan(found) : !(std::fabs(found) < 0x1.fffffp127f)) << a << " / " << b;
      return;
    }
    const double exact = static_cast<double>(a) / b;
    constexpr float kSmallest = 0x1p-100f;  // below, a remainder loses digits
    const bool rounds_correctly = std::fabs(a) >= kSmallest && std::fabs(correct) >= kSmallest;
    ASSERT_LE(std::fabs(found - exact), (rounds_correctly ? 0.5 : 1.5) * ulp(exact)) << a << " / " << b;
    ASSERT_EQ(std::signbit(found), std::signbit(correct)) << a << " / " << b;
  };
  for (int n = 0; n < 400000; ++n) expect(drawn(), drawn());
  for (int n = 0; n < 100000; ++n) {
    const int quotient = static_cast<int>(random() % 2001) - 1000, divisor = static_cast<int>(random() % 16384) + 1;
    const auto by = static_cast<float>(divisor);
    ASSERT_EQ(program::divide_by(static_cast<float>(quotient * divisor), program::SharedDivisor(by)), quotient) << by;
  }
  const float ends[] = {0.0f,     -0.0f,           1e-45f, 0x1p-126f, 0x1.fffffep-127f, 1.0f, -3.0f,
                        0x1p126f, 0x1.000002p126f, 3e38f,  INFINITY,  -INFINITY,        NAN};
  for (const float a : ends) {
    for (const float b : ends) expect(a, b);
  }
}

CudaProgram find(const char* what) {
  const std::vector<CudaProgram> all = testing::cuda_programs(0);
  return *std::find_if(all.begin(), all.end(), [&](const CudaProgram& program) { return program.what == what; });
}

TEST(ScoreCudaText, SaysWhichScoresDependOnTheKeyByTheScoreAlone) {
  const auto is_steady = [](const char* what) {
    const CudaProgram program = find(what);
    const std::string text = cuda_text(*program.checked, program.dtypes, {});
    const bool steady = text.find("kSteady = true;") != std::string::npos;
    EXPECT_EQ(steady, text.find("kSteady = false;") == std::string::npos);
    return steady;
  };
  for (const char* what : {"softcap", "a learned temperature a head", "bias of a query", "documents", "lengths"}) {
    EXPECT_TRUE(is_steady(what)) << what;
  }
  for (const char* what : {"ALiBi", "relative position bias", "bias of a key", "score and mask", "dense bias"}) {
    EXPECT_FALSE(is_steady(what)) << what;
  }
}

// What depends on the head, a query, a key or i - j alone is in the struct of that.
TEST(ScoreCudaText, ComputesOnceWhatPairsShare) {
  const auto expect = [](const char* what, const std::string& part) {
    const CudaProgram program = find(what);
    const std::string text = cuda_text(*program.checked, program.dtypes, {});
    for (const char* name : {"Head", "Row", "Column", "Diagonal"}) {
      const bool is_empty = text.find(std::string("  struct ") + name + " {\n  };\n") != std::string::npos;
      EXPECT_EQ(is_empty, name != part) << what << ": " << name;
    }
  };
  expect("a learned temperature a head", "Head");
  expect("bias of a query", "Row");
  expect("bias of a key", "Column");
  expect("relative position bias", "Diagonal");
  expect("dilated window", "Diagonal");
  expect("logarithm of the distance", "Diagonal");
}

// Where every element that belongs to i - j is at an index that is i - j or j - i and a value of the head.
TEST(ScoreCudaText, StepsAlongTheDiagonal) {
  const auto steps = [](const char* what) {
    const CudaProgram program = find(what);
    const std::string text = cuda_text(*program.checked, program.dtypes, {});
    return text.find("kStepsAlongDiagonal = true;") != std::string::npos;
  };
  EXPECT_TRUE(steps("relative position bias"));
  EXPECT_TRUE(steps("three together"));
  EXPECT_TRUE(steps("outside: s + relative[h, 40 + j - i] * place[i - j]\n"));
  EXPECT_FALSE(steps("outside: s + (i - j > 3 ? place[i - j - 5] : 0.0)\n"));
  for (const char* what : {"ALiBi", "dense bias", "bias of a key", "logarithm of the distance"}) {
    EXPECT_FALSE(steps(what)) << what;
  }
  const CudaProgram relative = find("relative position bias");
  EXPECT_NE(cuda_text(*relative.checked, relative.dtypes, {true, 0}),
            cuda_text(*relative.checked, relative.dtypes, {true, 1}));
}

TEST(ScoreCudaText, DividesByPowersOfTwoByBits) {
  const CudaProgram dilated = find("dilated window");
  EXPECT_NE(cuda_text(*dilated.checked, dilated.dtypes, {}).find(" & 3;"), std::string::npos);
  const CudaProgram diagonal = find("blocks on the diagonal");
  EXPECT_NE(cuda_text(*diagonal.checked, diagonal.dtypes, {}).find(" >> 4;"), std::string::npos);
}

TEST(ScoreCudaText, IsHashedWithWhatItFollowsFrom) {
  const CudaProgram dense = find("dense bias"), softcap = find("softcap");
  const int32_t half[] = {TESSERA_FLOAT16};
  const uint64_t hash = cuda_text_hash(*dense.checked, dense.dtypes, {});
  EXPECT_NE(hash, cuda_text_hash(*dense.checked, half, {}));
  EXPECT_NE(hash, cuda_text_hash(*dense.checked, dense.dtypes, {false, 0}));
  EXPECT_NE(hash, cuda_text_hash(*dense.checked, dense.dtypes, {true, 1}));
  EXPECT_NE(hash, cuda_text_hash(*softcap.checked, softcap.dtypes, {}));
}

}  // namespace
}  // namespace tessera::core::score
