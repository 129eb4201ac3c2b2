// Score programs through the C interface: made from text, bound in a problem, kept by a plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

struct Release {
  void operator()(tessera_program* program) const { tessera_program_release(program); }
};
using Handle = std::unique_ptr<tessera_program, Release>;

constexpr tessera_program_name kNames[] = {{"bias", TESSERA_VALUE_FLOAT, 2},
                                           {"c", TESSERA_VALUE_FLOAT, TESSERA_SCALAR_RANK},
                                           {"doc", TESSERA_VALUE_INT, 2},
                                           {"gain", TESSERA_VALUE_FLOAT, 0},
                                           {"n", TESSERA_VALUE_INT, TESSERA_SCALAR_RANK}};

tessera_status create(const char* score, const char* mask, Handle& handle) {
  tessera_program* program = nullptr;
  const tessera_status status = tessera_program_create(score, mask, kNames, std::size(kNames), &program);
  handle.reset(program);
  return status;
}

Handle created(const char* score, const char* mask) {
  Handle handle;
  const tessera_status status = create(score, mask, handle);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return handle;
}

std::string text(const Handle& handle, tessera_program_text which) {
  std::string all(tessera_program_describe(handle.get(), which, nullptr, 0), '\0');
  tessera_program_describe(handle.get(), which, all.data(), all.size() + 1);
  return all;
}

std::string refusal(const tessera_problem& problem, const Device& device = reference_device()) {
  Plan plan;
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  return status.code == TESSERA_OK ? "accepted" : status.message;
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

TEST(Program, HasACanonicalTextAndAHashOfIt) {
  const Handle one = created("c*tanh( s/c ) + bias[h, (i - j) + 8]", "j<=q_pos");
  const Handle other = created("x = c * tanh(s / c); x + bias[h, i - j + 8]", "(j <= q_pos)");
  EXPECT_EQ(text(one, TESSERA_PROGRAM_SCORE), "c * tanh(s / c) + bias[h, i - j + 8]");
  EXPECT_EQ(text(one, TESSERA_PROGRAM_MASK), "j <= q_pos");
  EXPECT_EQ(tessera_program_hash(one.get()), tessera_program_hash(other.get()));
  EXPECT_NE(tessera_program_hash(one.get()), tessera_program_hash(created("s", "j <= q_pos").get()));
  EXPECT_EQ(text(created("", ""), TESSERA_PROGRAM_SCORE), "");
}

TEST(Program, SaysItsDerivative) {
  EXPECT_EQ(text(created("s * gain + bias[h, j]", ""), TESSERA_PROGRAM_GRADIENT),
            "d_s = g * gain[]\nd_gain[] += g * s\nd_bias[h, j] += g\n");
  EXPECT_EQ(text(created("1.0 * h", ""), TESSERA_PROGRAM_GRADIENT), "d_s = 0.0\n");
}

TEST(Program, IsRefusedWithItsColumn) {
  Handle handle;
  EXPECT_CONTAINS(create("s + bais[h, j]", "", handle).message, "score, column 5: 'bais' is no name here");
  EXPECT_CONTAINS(create("s", "j <= ", handle).message, "mask, column 6: ");
  EXPECT_EQ(handle, nullptr);
  tessera_program* program = nullptr;
  const tessera_program_name bad_type{"x", 7, 1}, bad_rank{"x", TESSERA_VALUE_INT, 5};
  EXPECT_CONTAINS(tessera_program_create("s", "", &bad_type, 1, &program).message, "names[0] (x): type 7");
  EXPECT_CONTAINS(tessera_program_create("s", "", &bad_rank, 1, &program).message, "names[0] (x): rank 5");
  EXPECT_CONTAINS(tessera_program_create("s", "", nullptr, 1, &program).message, "names: NULL");
  std::vector<std::string> names;
  std::vector<tessera_program_name> many;
  for (int n = 0; n < 9; ++n) names.push_back("t" + std::to_string(n));
  for (const std::string& name : names) many.push_back({name.c_str(), TESSERA_VALUE_FLOAT, 1});
  EXPECT_CONTAINS(tessera_program_create("s", "", many.data(), 9, &program).message, "9 tensors, accepted at most 8");
  EXPECT_EQ(program, nullptr);
}

TEST(Program, MayBeTooLongForAPlan) {
  const std::string name(31, 'x');
  const tessera_program_name names[] = {{name.c_str(), TESSERA_VALUE_FLOAT, 4}};
  const auto sum_of = [&](int loads) {
    std::string score = "s";
    for (int n = 0; n < loads; ++n) {
      score += " + " + name + "[1000000000, 1000000000, 1000000000, " + std::to_string(1000000000 + n) + "]";
    }
    return score;
  };
  tessera_program* program = nullptr;
  EXPECT_CONTAINS(tessera_program_create(sum_of(60).c_str(), "", names, 1, &program).message,
                  "bytes in its canonical form, accepted at most 4047");
  EXPECT_EQ(program, nullptr);
  EXPECT_EQ(tessera_program_create(sum_of(40).c_str(), "", names, 1, &program).code, TESSERA_OK);
  tessera_program_release(program);
}

Problem bound(const Handle& handle) {
  Problem problem = dense_problem(float64);
  problem.program = handle.get();
  problem.captured[0] = layout(float32, {4, 64});
  problem.captured[1] = layout(int32, {2, 24});
  problem.captured[2] = layout(bfloat16, {1});
  return problem;
}

TEST(ProblemWithAProgram, IsCheckedByName) {
  const Handle handle = created("s * gain + bias[h, i - j + 32]", "doc[b, i] == doc[b, j]");
  Problem problem = bound(handle);
  problem.captured[0] = layout(float32, {64});
  EXPECT_CONTAINS(refusal(problem), "captured[0] (bias): shape [64], accepted rank 2");
  problem = bound(handle);
  problem.captured[0] = layout(int32, {4, 64});
  EXPECT_CONTAINS(refusal(problem), "captured[0] (bias): dtype int32, accepted float32, float16, bfloat16 and float64");
  problem = bound(handle);
  problem.captured[1] = {};
  EXPECT_CONTAINS(refusal(problem), "captured[1] (doc): ");
  problem = bound(handle);
  problem.captured[2] = layout(float32, {2});
  EXPECT_CONTAINS(refusal(problem), "captured[2] (gain): shape [2], accepted [1]");
  problem = bound(handle);
  problem.captured[3] = layout(float32, {2});
  EXPECT_CONTAINS(refusal(problem), "captured[3]: given, accepted what the program declares, 3 tensors");
  problem.program = nullptr;
  EXPECT_CONTAINS(refusal(problem), "captured[0]: given without a program");
}

TEST(ProblemWithAProgram, ChecksTheGradientsOfWhatItNames) {
  const Handle handle = created("s * gain + bias[h, i - j + 32]", "doc[b, i] == doc[b, j]");
  const auto backward = [&] {
    Problem problem = gradient_of(bound(handle));
    problem.d_captured[0] = layout(float32, {4, 64});
    return problem;
  };
  Problem problem = backward();
  problem.d_captured[0] = layout(float16, {4, 64});
  EXPECT_CONTAINS(refusal(problem), "d_captured[0] (bias): dtype float16, accepted float32 and that of captured[0]");
  problem = backward();
  problem.d_captured[0] = layout(float32, {4, 63});
  EXPECT_CONTAINS(refusal(problem), "d_captured[0] (bias): shape [4, 63], must be that of captured[0] (bias)");
  problem = backward();
  problem.d_captured[1] = layout(float32, {2, 24});
  EXPECT_CONTAINS(refusal(problem), "d_captured[1] (doc): given, but the program declares int");
}

TEST(ProblemWithAProgram, MovesItsTensorsAndTheirGradients) {
  const Handle plain = created("s * 2", ""),
               handle = created("s * gain + bias[h, i - j + 32]", "doc[b, i] == doc[b, j]");
  Problem problem = bound(handle), without = dense_problem(float64);
  without.program = plain.get();
  constexpr double kTensors = 4 * 64 * 4 + 2 * 24 * 4 + 2, kGradient = 4 * 64 * 4;
  EXPECT_EQ(plan(problem).bytes_moved - plan(without).bytes_moved, kTensors);
  problem = gradient_of(problem), without = gradient_of(without);
  EXPECT_EQ(plan(problem).bytes_moved - plan(without).bytes_moved, kTensors);
  problem.d_captured[0] = layout(float32, {4, 64});
  EXPECT_EQ(plan(problem).bytes_moved - plan(without).bytes_moved, kTensors + kGradient);
}

TEST(ProblemWithAProgram, IsRefusedByEveryKernelThatLacksThem) {
  const Handle handle = created("s + 1", "");
  Problem problem = dense_problem(bfloat16);
  problem.program = handle.get();
  EXPECT_EQ(plan(problem, cpu()).kernel, TESSERA_KERNEL_TILED);
  EXPECT_EQ(plan(problem, cuda_arch(90)).kernel, TESSERA_KERNEL_FWD_SM80);
  Device compared = cuda_arch(90);
  compared.kernel = TESSERA_KERNEL_FWD_FA1;
  EXPECT_CONTAINS(refusal(problem, compared), "score programs: not supported");
}

TEST(ProblemWithAProgram, IsRefusedOnAGpuIfItReadsFloat64) {
  const Handle handle = created("s * gain + bias[h, i - j + 32]", "doc[b, i] == doc[b, j]");
  Problem problem = bound(handle);
  for (Layout* rows : {&problem.q, &problem.k, &problem.v, &problem.o})
    rows->dtype = static_cast<std::int32_t>(bfloat16);
  EXPECT_EQ(plan(problem, cuda_arch(80)).kernel, TESSERA_KERNEL_FWD_SM80);
  problem.captured[0].dtype = static_cast<std::int32_t>(float64);
  EXPECT_CONTAINS(refusal(problem, cuda_arch(80)), "bias: float64, must be of at most 32 bits or int64 on a GPU");
}

// Bytes of the workspace that have lists of the blocks which the mask shows.
std::int64_t lists_bytes(const Problem& problem, std::int32_t arch) {
  const std::string text = json(plan(problem, cuda_arch(arch))), name = "\"program_lists_bytes\":";
  const size_t at = text.find(name);
  EXPECT_NE(at, std::string::npos) << text;
  return std::stoll(text.substr(at + name.size()));
}

TEST(ProblemWithAProgram, SaysHowManyEntriesItsListsHave) {
  constexpr std::int64_t kBatch = 2, kTokens = 1 << 14, kEntryBytes = 4, kMostBytes = 64 << 20;
  const Handle handle = created("", "doc[b, i] == doc[b, j]");
  Problem problem;
  problem.q = problem.k = problem.v = problem.o = layout(bfloat16, {kBatch, kTokens, 4, 64});
  problem.program = handle.get();
  problem.captured[1] = layout(int32, {kBatch, kTokens});
  Problem packed = problem;
  packed.q = packed.k = packed.v = packed.o = layout(bfloat16, {kBatch * kTokens, 4, 64});
  packed.cu_seqlens_q = packed.cu_seqlens_k = layout(int32, {kBatch + 1});
  packed.max_seqlen_q = packed.max_seqlen_k = kTokens;
  for (const Problem& of : {problem, gradient_of(problem), packed, gradient_of(packed)}) {
    for (const std::int32_t arch : {80, 90}) {
      Problem given = of;
      const std::int64_t by_default = lists_bytes(given, arch);
      EXPECT_GT(by_default, 0);
      EXPECT_LT(by_default, kMostBytes);
      given.list_capacity = 1;
      const std::int64_t least = lists_bytes(given, arch);
      given.list_capacity = 1001;
      EXPECT_EQ(lists_bytes(given, arch), least + 1000 * kEntryBytes);
      given.list_capacity = std::numeric_limits<std::int32_t>::max();  // no more than there are blocks
      EXPECT_EQ(lists_bytes(given, arch), by_default);
    }
  }
  // A deterministic entry has a place in the order of additions beside it.
  for (const std::int32_t arch : {80, 90}) {
    Problem given = gradient_of(problem);
    given.deterministic = 1, given.list_capacity = 1;
    const std::int64_t least = lists_bytes(given, arch);
    given.list_capacity = 1001;
    EXPECT_EQ(lists_bytes(given, arch), least + 2 * 1000 * kEntryBytes);
  }
  // Without a capacity, lists of 2^20 tokens are a part of what the visible blocks would take.
  problem.q = problem.k = problem.v = problem.o = layout(bfloat16, {1, 1 << 20, 4, 64});
  problem.captured[1] = layout(int32, {1, 1 << 20});
  EXPECT_LT(lists_bytes(problem, 90), kMostBytes + (4 << 20));
  problem.list_capacity = 1 << 25;
  EXPECT_GT(lists_bytes(problem, 90), (1 << 25) * kEntryBytes);
  for (const std::int64_t capacity : {std::int64_t{-1}, std::int64_t{1} << 31}) {
    problem.list_capacity = capacity;
    EXPECT_CONTAINS(refusal(problem, cuda_arch(90)),
                    "list_capacity: " + std::to_string(capacity) + ", accepted 0 .. 2147483647");
  }
}

TEST(ProblemWithAProgram, SharesAPrefixOnlyWhereNoPlaceMatters) {
  Problem problem = csr_problem();
  share_prefixes(problem);
  const char* const places[][2] = {{"j <= q_pos", "j"}, {"s > b", "b"}, {"s > len_k", "len_k"}};
  for (const auto& [mask, place] : places) {
    const Handle program = created("", mask);
    problem.program = program.get();
    EXPECT_CONTAINS(refusal(problem), std::string("prefix_groups: given with a program that uses ") + place +
                                          ", accepted without b, i, j, q_pos, len_q and len_k");
  }
  const Handle scores = created("s * (1.0 + h)", "s > 0.5");
  problem.program = scores.get();
  EXPECT_EQ(refusal(problem), "accepted");
}

// ---- what the oracle makes of it -------------------------------------------------------------------------------------

// The same attention by options and by a program that means the same.
struct Twice {
  Attention options, program;
  std::vector<float> bias, d_bias;

  void run(const Handle& handle, std::int32_t direction) {
    for (Attention* attention : {&options, &program}) {
      std::mt19937_64 random(7);
      attention->allocate(random);
    }
    program.d_o = options.d_o, program.alibi_slopes = options.alibi_slopes;
    program.problem.program = handle.get();
    const auto run_one = [&](Attention& attention) {
      Problem problem = attention.problem;
      problem.direction = direction;
      const Plan plan = tessera::plan(problem, reference_device());
      std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xFF});
      Buffers buffers = attention.buffers();
      buffers.bias = bias.data(), buffers.d_bias = d_bias.data();
      buffers.captured[0] = program_bias.data(), buffers.d_captured[0] = d_program_bias.data();
      buffers.scalars[0] = 2.5;
      direction == TESSERA_BACKWARD ? backward(plan, buffers, workspace) : forward(plan, buffers, workspace);
    };
    run_one(options), run_one(program);
  }
  std::vector<float> program_bias, d_program_bias;
};

void expect_equal(const std::vector<double>& one, const std::vector<double>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t n = 0; n < one.size(); ++n) ASSERT_NEAR(one[n], other[n], 1e-12 * std::max(1.0, std::fabs(one[n]))) << n;
}

TEST(OracleOfAProgram, IsThatOfTheOptionThatItMeans) {
  for (const bool packed : {false, true}) {
    for (const std::int32_t direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
      Twice twice;
      for (Attention* attention : {&twice.options, &twice.program}) {
        attention->problem = gradient_of(packed ? packed_problem(float64) : dense_problem(float64));
        attention->cu_seqlens_q = {0, 5, 5, 16}, attention->cu_seqlens_k = {0, 9, 14, 24};
      }
      twice.options.problem.softcap = 2.5;
      twice.options.problem.causal = 1, twice.options.problem.window_left = 7;
      twice.run(created("c * tanh(s / c)", "j <= q_pos && q_pos - j <= 7"), direction);
      if (direction == TESSERA_FORWARD) {
        expect_equal(twice.options.o, twice.program.o);
        EXPECT_EQ(twice.options.lse, twice.program.lse);
      } else {
        expect_equal(twice.options.d_q, twice.program.d_q);
        expect_equal(twice.options.d_k, twice.program.d_k);
        expect_equal(twice.options.d_v, twice.program.d_v);
      }
    }
  }
}

TEST(OracleOfAProgram, ComposesWithTheOptionsBeforeIt) {
  Twice twice;
  for (Attention* attention : {&twice.options, &twice.program}) {
    attention->problem = gradient_of(dense_problem(float64));
    attention->problem.softcap = 2.5, attention->problem.causal = 1;
    attention->problem.set_dropout(0.25, 5);
    attention->problem.alibi_slopes = layout(float32, {4});
  }
  // By a bias of the heads and keys: after the soft cap and, as it adds, on either side of ALiBi.
  twice.options.problem.bias = layout(float32, {1, 4, 1, 24});
  twice.options.problem.d_bias = twice.options.problem.bias;
  twice.program.problem.captured[0] = layout(float32, {4, 24});
  twice.program.problem.d_captured[0] = twice.program.problem.captured[0];
  std::mt19937_64 random(3);
  for (int n = 0; n < 4 * 24; ++n) twice.bias.push_back(std::normal_distribution<float>()(random));
  twice.program_bias = twice.bias;
  twice.d_bias.assign(twice.bias.size(), NAN), twice.d_program_bias = twice.d_bias;
  twice.run(created("s + bias[h, j]", ""), TESSERA_BACKWARD);
  expect_equal(twice.options.d_q, twice.program.d_q);
  expect_equal(twice.options.d_k, twice.program.d_k);
  for (size_t n = 0; n < twice.d_bias.size(); ++n) ASSERT_NEAR(twice.d_bias[n], twice.d_program_bias[n], 1e-6);
}

TEST(OracleOfAProgram, WritesZerosWhereNothingWasRead) {
  Attention attention;
  attention.problem = gradient_of(dense_problem(float64));
  std::mt19937_64 random(1);
  attention.allocate(random);
  std::vector<float> bias(4 * 64, 1), d_bias(4 * 64, NAN), d_gain(1, NAN);
  attention.problem.captured[0] = attention.problem.d_captured[0] = layout(float32, {4, 64});
  attention.problem.d_captured[2] = layout(float32, {1});  // declared, and not used
  const Handle handle = created("s + bias[h, j + 40]", "");
  attention.problem.program = handle.get();
  const Plan plan = tessera::plan(attention.problem, reference_device());
  std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xFF});
  Buffers buffers = attention.buffers();
  buffers.captured[0] = bias.data(), buffers.d_captured[0] = d_bias.data(), buffers.d_captured[2] = d_gain.data();
  backward(plan, buffers, workspace);
  EXPECT_EQ(d_gain[0], 0);
  for (int n = 0; n < 4 * 64; ++n) ASSERT_EQ(d_bias[static_cast<size_t>(n)] != 0, n % 64 >= 40) << n;
  buffers.d_captured[0] = bias.data();
  const Status shared = try_backward(plan, buffers, workspace);
  EXPECT_CONTAINS(shared.message(), "d_bias: shares memory with bias");
  buffers.captured[0] = nullptr;
  EXPECT_CONTAINS(try_backward(plan, buffers, workspace).message(), "bias: NULL");
}

TEST(OracleOfAProgram, RefusesAScalarThatIsNoneOfItsType) {
  Attention attention;
  attention.problem = dense_problem(float64);
  std::mt19937_64 random(1);
  attention.allocate(random);
  const Handle handle = created("s", "j < n");
  attention.problem.program = handle.get();
  const Plan plan = tessera::plan(attention.problem, reference_device());
  std::vector<std::byte> workspace(plan.workspace_bytes);
  Buffers buffers = attention.buffers();
  buffers.scalars[1] = 0.5;
  EXPECT_CONTAINS(try_forward(plan, buffers, workspace).message(),
                  "scalars[1] (n): 0.5, accepted an integer of 32 bits");
}

// ---- indices --------------------------------------------------------------------------------------------------------

TEST(IndicesOfAProgram, AreRefusedByThePlanWhereEveryOneIsOutside) {
  const auto planned = [](const char* score) {
    const Handle handle = created(score, "");
    return refusal(bound(handle));
  };
  EXPECT_CONTAINS(planned("s + bias[h, i + 100]"), "bias: index 1 of bias[h, i + 100] is 100 .. 115, accepted 0 .. 63");
  EXPECT_EQ(planned("s + bias[h, i + 60]"), "accepted");
  EXPECT_EQ(planned("h < 4 ? s + bias[h, j] : s + bias[h - 4, j]"), "accepted");
  EXPECT_EQ(planned("s + (n > 0 ? bias[h, j + 100] : 0.0)"), "accepted");
}

// What a forward call with float64 q [2, 16, 4, 8] over 24 keys answers; bias is [4, 64], doc [2, 24] of 0 .. 23, but
// one is 64.
std::string called(const char* score, const char* mask, bool causal = false) {
  const Handle handle = created(score, mask);
  Attention attention;
  attention.problem = bound(handle);
  attention.problem.causal = causal;
  std::mt19937_64 random(1);
  attention.allocate(random);
  const Plan plan = tessera::plan(attention.problem, reference_device());
  std::vector<std::byte> workspace(plan.workspace_bytes);
  std::vector<float> bias(4 * 64, 1.0f);
  std::vector<std::int32_t> doc(2 * 24);
  for (size_t n = 0; n < doc.size(); ++n) doc[n] = static_cast<std::int32_t>(n % 24);
  doc[24 + 5] = 64;
  const std::uint16_t gain = 0x3F80;
  Buffers buffers = attention.buffers();
  buffers.captured[0] = bias.data(), buffers.captured[1] = doc.data(), buffers.captured[2] = &gain;
  const Status status = try_forward(plan, buffers, workspace);
  if (!status.ok()) EXPECT_TRUE(std::isnan(attention.o[0])) << "an output was written";
  return std::string(status.message());
}

TEST(IndicesOfAProgram, AreRefusedByACallBeforeAnythingIsWritten) {
  EXPECT_CONTAINS(called("s + bias[h, i - j + 8]", ""),
                  "bias: index 1 of bias[h, i - j + 8] is -1 for b 0, h 0, i 0, j 9");
  EXPECT_EQ(called("s + bias[h, i - j + 8]", "j <= i + 8"), "");
  EXPECT_EQ(called("s + (j <= i + 8 ? bias[h, i - j + 8] : 0.0)", ""), "");
  EXPECT_CONTAINS(called("s + bias[h, q_pos - j]", ""), "bias: index 1");
  EXPECT_EQ(called("s + bias[h, q_pos - j]", "", true), "");
  EXPECT_CONTAINS(called("s + bias[h, doc[b, j]]", ""), "is 64 for b 1, h 0, i 0, j 5, accepted 0 .. 63");
  EXPECT_EQ(called("s + bias[h, doc[b, j]]", "j != 5"), "");
  EXPECT_EQ(called("s + bias[h, int(s * 1000)]", ""), "");  // never read outside, and not checked
  EXPECT_CONTAINS(called("s", "bias[h, j + 60] > 0.0"),
                  "bias: index 1 of bias[h, j + 60] is 64 for b 0, h 0, i 0, j 4");
}

// ---- what options can say -------------------------------------------------------------------------------------------

struct Said {
  std::int32_t causal, alignment;
  std::int64_t left, right;
  double softcap;
  std::string rest;  // of the program

  bool operator==(const Said&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Said& said) {
  return out << said.causal << " " << said.alignment << " " << said.left << " " << said.right << " " << said.softcap
             << " '" << said.rest << "'";
}

// Over 24 keys of 16 queries, or of as many.
Said recognised(
    const char* score, const char* mask, bool square = false, void (*set)(Problem& problem) = [](Problem&) {}) {
  const Handle handle = created(score, mask);
  Problem problem = bound(handle);
  if (square) problem.q = layout(float64, {2, 24, 4, 8}), problem.o = layout(float64, {2, 24, 4, 6});
  set(problem);
  const Plan made = plan(problem, reference_device());
  const tessera_problem& p = made.problem;
  std::string rest(made.program.text, static_cast<size_t>(made.program.text_bytes));
  rest = rest.substr(0, rest.find('\n', rest.find('\n', rest.find('\n') + 1) + 1));
  return {p.causal, p.alignment, p.window_left, p.window_right, p.softcap, rest.empty() ? "" : rest.substr(2)};
}

TEST(OptionsOfAProgram, AreRecognised) {
  EXPECT_EQ(recognised("", "j <= q_pos"), (Said{1, 0, -1, 0, 0, ""}));
  EXPECT_EQ(recognised("", "q_pos - j < 8 && q_pos >= j"), (Said{1, 0, 7, 0, 0, ""}));
  EXPECT_EQ(recognised("", "abs(j - q_pos) <= 5"), (Said{0, 0, 5, 5, 0, ""}));
  EXPECT_EQ(recognised("", "j <= i"), (Said{1, 1, -1, 0, 0, ""}));
  EXPECT_EQ(recognised("", "j <= i", true), (Said{1, 0, -1, 0, 0, ""}));
  EXPECT_EQ(recognised("", "j - 3 < q_pos + 4 && 2 + j >= q_pos"), (Said{0, 0, 2, 6, 0, ""}));
  EXPECT_EQ(recognised("5.0 * tanh(s / 5)", "j <= q_pos"), (Said{1, 0, -1, 0, 5, ""}));
  EXPECT_EQ(recognised("", "j <= q_pos && doc[b, i] == doc[b, j]"), (Said{1, 0, -1, 0, 0, "\ndoc[b, i] == doc[b, j]"}));
  EXPECT_EQ(recognised("", "!(j > q_pos) && (q_pos - j) - 8 < 0"), (Said{1, 0, 7, 0, 0, ""}));
  EXPECT_EQ(recognised("5.0 * tanh(s / 5)", "j != 2"), (Said{0, 0, -1, -1, 5, "\nj != 2"}));
  EXPECT_EQ(recognised("5.0 * tanh(s / 5) + bias[h, j]", ""), (Said{0, 0, -1, -1, 5, "s + bias[h, j]\n"}));
  EXPECT_EQ(recognised("s + 1.0", "doc[b, i] == 1 && j <= q_pos && j != 2"),
            (Said{1, 0, -1, 0, 0, "s + 1.0\ndoc[b, i] == 1 && j != 2"}));
  EXPECT_EQ(recognised("", "j <= q_pos + 3", false, [](Problem& p) { p.causal = 1; }), (Said{1, 0, -1, 3, 0, ""}));
}

TEST(OptionsOfAProgram, AreOnlyWhatMeansTheSame) {
  EXPECT_EQ(recognised("", "j < q_pos").rest, "\nj < q_pos");  // a query does not see its own key: no window says so
  EXPECT_EQ(recognised("", "j <= q_pos || j < 4").rest, "\nj <= q_pos || j < 4");
  EXPECT_EQ(recognised("", "j < n").rest, "\nj < n");
  EXPECT_EQ(recognised("", "j <= i && j <= q_pos").rest, "\nj <= i");
  EXPECT_EQ(recognised("", "j <= i", false, [](Problem& p) { p.causal = 1; }).rest, "\nj <= i");
  EXPECT_EQ(recognised("5.0 * tanh(s / 4)", "").softcap, 0);
  EXPECT_EQ(recognised("5.0 * tanh(s / 5)", "", false, [](Problem& p) { p.softcap = 3; }).softcap, 3);
  EXPECT_EQ(recognised("c * tanh(s / c)", "").softcap, 0);
}

// ALiBi with slopes of both signs: as an option, or as a program whose slopes are of this type.
std::vector<double> with_slopes(bool as_program, DType type, bool& is_option) {
  const tessera_program_name name = {"slope", TESSERA_VALUE_FLOAT, 1};
  tessera_program* program = nullptr;
  EXPECT_EQ(tessera_program_create("s - slope[h] * abs(q_pos - j)", "", &name, 1, &program).code, TESSERA_OK);
  const Handle handle(program);
  const std::vector<float> slopes = {0.5f, -0.25f, 0.125f, -1.0f};
  const std::vector<double> wide(slopes.begin(), slopes.end());
  Attention attention;
  attention.problem = dense_problem(float64);
  if (as_program) {
    attention.problem.program = handle.get();
    attention.problem.captured[0] = layout(type, {4});
  } else {
    attention.problem.alibi_slopes = layout(float32, {4});
  }
  std::mt19937_64 random(7);
  attention.allocate(random);
  const Plan plan = tessera::plan(attention.problem, reference_device());
  is_option = plan.problem.program == nullptr && plan.problem.alibi_slopes.rank == 1;
  std::vector<std::byte> workspace(plan.workspace_bytes);
  Buffers buffers = attention.buffers();
  buffers.alibi_slopes = as_program ? nullptr : slopes.data();
  buffers.captured[0] = type == float64 ? static_cast<const void*>(wide.data()) : slopes.data();
  forward(plan, buffers, workspace);
  return attention.o;
}

TEST(OptionsOfAProgram, AreSlopesThatTheOptionCanHave) {
  bool is_option = false;
  const std::vector<double> expected = with_slopes(false, float32, is_option);
  EXPECT_TRUE(is_option);
  EXPECT_EQ(with_slopes(true, float32, is_option), expected);
  EXPECT_TRUE(is_option);
  const std::vector<double> evaluated = with_slopes(true, float64, is_option);
  EXPECT_FALSE(is_option);
  for (size_t n = 0; n < expected.size(); ++n) EXPECT_NEAR(evaluated[n], expected[n], 1e-13);
}

TEST(OptionsOfAProgram, StayWhenThePlansProblemIsPlannedAgain) {
  const Handle handle = created("5.0 * tanh(s / 5)", "j <= q_pos");
  Problem problem = bound(handle);
  const Plan once = plan(problem, reference_device()), again = plan(once.problem, reference_device());
  EXPECT_EQ(once.problem.program, nullptr);
  EXPECT_EQ(again.problem.softcap, 5);
  EXPECT_EQ(again.program.text_bytes, 0);
}

// ---- C++ ------------------------------------------------------------------------------------------------------------

TEST(ProgramOfExpressions, IsThatOfItsText) {
  using namespace score;
  const Tensor table("bias", 2), document("doc", 2, ValueType::integer);
  const Scalar c("c"), width("n", ValueType::integer);
  const Program made(c * tanh(s / c) + where(h < 2, table(h, i - j + 8), -0.5 * abs(s)),
                     j <= q_pos && (q_pos - j < width || document(b, i) == document(b, j)));
  const Program read(
      "c * tanh(s / c) + where(h < 2, bias[h, i - j + 8], -0.5 * abs(s))",
      "j <= q_pos && (q_pos - j < n || doc[b, i] == doc[b, j])",
      {{"c"}, {"bias", ValueType::floating, 2}, {"n", ValueType::integer}, {"doc", ValueType::integer, 2}});
  EXPECT_EQ(made.score(), read.score());
  EXPECT_EQ(made.mask(), read.mask());
  EXPECT_EQ(made.hash(), read.hash());
  EXPECT_EQ(made.tensor("bias"), 0U);
  EXPECT_EQ(made.tensor("doc"), 1U);
  EXPECT_EQ(made.scalar("n"), 1U);
  EXPECT_THROW(made.tensor("n"), Error);
  EXPECT_EQ(Program(min(s, -2) + floor_div(i, 4) + to_float(!(i == j))).score(),
            "min(s, -2.0) + float(i // 4) + float(!(i == j))");
  EXPECT_THROW(Program("s +", ""), Error);
  Program copy = made, moved = std::move(copy);
  copy = moved;
  EXPECT_EQ(copy.hash(), made.hash());
}

}  // namespace
}  // namespace tessera::test
