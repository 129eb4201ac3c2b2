// Every case of the table, on every kernel: on the CPU's ISAs, and on a GPU if there is one.
#include <gtest/gtest.h>

#include <algorithm>

#include "check.hpp"
#include "execute.hpp"

namespace tessera::testing {
namespace {

const std::vector<Case>& table() {
  static const std::vector<Case> cases = case_table();
  return cases;
}

void expect_right(const Case& c, const CheckOptions& options) {
  for (const std::string& failure : check_case(c, options)) {
    ADD_FAILURE() << failure << "\n  replay: " << replay(c, options.places);
  }
}

class Table : public ::testing::TestWithParam<size_t> {};

TEST_P(Table, MatchesTheOracle) { expect_right(table()[GetParam()], {.places = cpu_places()}); }

INSTANTIATE_TEST_SUITE_P(Case, Table, ::testing::Range(size_t{0}, table().size()));

// bfloat16 by AMX's tiles, real or, with the library of tests/amx_emulated, in plain C++. Also NaN and infinities
// of the other types' cases, since their spread depends on the tiles. No score programs, which
// vectors evaluate.
std::vector<Case> amx_table() {
  std::vector<Case> cases;
  for (Case c : table()) {
    if (has_program(c)) continue;
    if (holds_nonfinite(c) && !has_8bit(c)) c.dtype = TESSERA_BFLOAT16;
    if (c.dtype == TESSERA_BFLOAT16 && std::ranges::find(cases, c) == cases.end()) cases.push_back(c);
  }
  return cases;
}

class AmxTable : public ::testing::TestWithParam<size_t> {};

TEST_P(AmxTable, MatchesTheOracle) {
  static const std::vector<Case> cases = amx_table();
  if (cpu_device().isa_limit != TESSERA_ISA_AMX_BF16) GTEST_SKIP() << "skipped: no AMX here, and none emulated";
  expect_right(cases[GetParam()], {.places = {{.isa = TESSERA_ISA_AMX_BF16}}, .check_oracle = false});
}

INSTANTIATE_TEST_SUITE_P(Amx, AmxTable, ::testing::Range(size_t{0}, amx_table().size()));

// The table's cases with a score program, or those without.
std::vector<size_t> places_with(bool program) {
  std::vector<size_t> places;
  for (size_t n = 0; n < table().size(); ++n)
    if (has_program(table()[n]) == program) places.push_back(n);
  if (!gpu_missing().empty()) places.resize(1);  // without a GPU one line says so, not one a case
  return places;
}

class GpuTable : public ::testing::TestWithParam<size_t> {};

// The oracle itself is checked on the CPU's pass.
TEST_P(GpuTable, MatchesTheOracle) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  expect_right(table()[GetParam()], {.places = {kGpu}, .check_oracle = false});
}

INSTANTIATE_TEST_SUITE_P(Cuda, GpuTable, ::testing::ValuesIn(places_with(false)));
INSTANTIATE_TEST_SUITE_P(CudaPrograms, GpuTable, ::testing::ValuesIn(places_with(true)));

class GpuComparison : public ::testing::TestWithParam<size_t> {};

// The kernels on request, in the cases that they support.
TEST_P(GpuComparison, MatchesTheOracle) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  expect_right(table()[GetParam()], {.places = {kGpu}, .check_oracle = false, .comparison = true});
}

INSTANTIATE_TEST_SUITE_P(Cuda, GpuComparison, ::testing::Range(size_t{0}, gpu_missing().empty() ? table().size() : 1));

TEST(CaseText, ParsesBackToTheSameCase) {
  for (const Case& c : table()) {
    std::string error;
    const auto parsed = parse_case(to_text(c), &error);
    ASSERT_TRUE(parsed) << error;
    EXPECT_EQ(*parsed, c) << to_text(c);
  }
}

TEST(CaseText, RefusesWhatIsNoCase) {
  for (const char* text : {"dtype=f8", "sq=-1", "sq", "sq=1x", "colour=red", "scale=nan", "d=577", "score_mod=s",
                           "mask_mod='j <= i", "captured=f64"}) {
    std::string error;
    EXPECT_FALSE(parse_case(text, &error)) << text;
    EXPECT_NE(error.find(text), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace tessera::testing
