// Every case of the table, on every kernel and ISA.
#include <gtest/gtest.h>

#include "check.hpp"
#include "execute.hpp"

namespace tessera::testing {
namespace {

const std::vector<Case>& table() {
  static const std::vector<Case> cases = case_table();
  return cases;
}

class Table : public ::testing::TestWithParam<size_t> {};

TEST_P(Table, MatchesTheOracle) {
  const Case& c = table()[GetParam()];
  for (const std::string& failure : check_case(c, {.isas = isas()})) {
    ADD_FAILURE() << failure << "\n  replay: " << replay(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Case, Table, ::testing::Range(size_t{0}, table().size()));

TEST(CaseText, ParsesBackToTheSameCase) {
  for (const Case& c : table()) {
    std::string error;
    const auto parsed = parse_case(to_text(c), &error);
    ASSERT_TRUE(parsed) << error;
    EXPECT_EQ(*parsed, c) << to_text(c);
  }
}

TEST(CaseText, RefusesWhatIsNoCase) {
  for (const char* text : {"dtype=f8", "sq=-1", "sq", "sq=1x", "colour=red", "scale=nan", "d=513"}) {
    std::string error;
    EXPECT_FALSE(parse_case(text, &error)) << text;
    EXPECT_NE(error.find(text), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace tessera::testing
