// Score programs through the C interface: made from text, bound in a problem, kept by a plan.
#include <gtest/gtest.h>

#include <memory>
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

TEST(ProblemWithAProgram, IsRefusedByEveryKernelThatLacksThem) {
  const Handle handle = created("s + 1", "");
  Problem problem = dense_problem(bfloat16);
  problem.program = handle.get();
  EXPECT_CONTAINS(refusal(problem, cpu()), "score programs: not supported");
  EXPECT_CONTAINS(refusal(problem, cuda_arch(90)), "score programs: not supported");
}

TEST(ProblemWithAProgram, SharesAPrefixOnlyWhereNoPlaceMatters) {
  Problem problem = csr_problem();
  share_prefixes(problem);
  const Handle places = created("", "j <= q_pos");
  problem.program = places.get();
  EXPECT_CONTAINS(refusal(problem), "prefix_groups: given with a program that uses j, accepted without");
}

}  // namespace
}  // namespace tessera::test
