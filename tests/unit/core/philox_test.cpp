#include "core/philox.hpp"

#include <gtest/gtest.h>

#include <cstdint>

namespace tessera::core {
namespace {

// Random123's known answers for philox 4x32, 10 rounds (kat_vectors).
TEST(Philox, KnownAnswers) {
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  static_assert(philox4x32_10({0, 0, 0, 0}, {0, 0}) == PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  EXPECT_EQ(philox4x32_10({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

uint32_t value_of(uint64_t seed, uint64_t offset, uint32_t head, uint32_t i, uint32_t j) {
  uint32_t low = 0, high = 65536;  // kept with threshold low, dropped with high
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (Dropout{seed, offset, middle}.keeps(head, i, j) ? low : high) = middle;
  }
  return low;
}

// One call serves the columns that a thread of an mma fragment owns: pairs, every eight columns.
TEST(Dropout, OneCallServesAFragmentsColumns) {
  constexpr uint64_t kSeed = 0x0123456789abcdef, kOffset = 0xfedcba9876543210;
  constexpr uint32_t kHead = 13, kRow = 77;
  for (uint32_t group = 0; group < 3; ++group) {
    for (uint32_t lane = 0; lane < 4; ++lane) {
      const PhiloxCounter words =
          philox4x32_10({4 * group + lane, kRow, kHead, 0x76543210}, {0x89abcdef, 0x01234567 ^ 0xfedcba98});
      for (uint32_t word = 0; word < 4; ++word) {
        const uint32_t column = 32 * group + 8 * word + 2 * lane;
        EXPECT_EQ(value_of(kSeed, kOffset, kHead, kRow, column), words[word] & 0xFFFF) << column;
        EXPECT_EQ(value_of(kSeed, kOffset, kHead, kRow, column + 1), words[word] >> 16) << column + 1;
      }
    }
  }
}

TEST(Dropout, DropsTheShareAskedFor) {
  constexpr double kP = 0.3;
  constexpr uint32_t kRows = 256, kColumns = 512;
  const Dropout dropout{42, 0, dropout_threshold(kP)};
  int dropped = 0;
  for (uint32_t i = 0; i < kRows; ++i) {
    for (uint32_t j = 0; j < kColumns; ++j) dropped += !dropout.keeps(1, i, j);
  }
  constexpr double kCount = kRows * kColumns;
  const double sigma = std::sqrt(kCount * kP * (1 - kP));
  EXPECT_NEAR(dropped, kCount * kP, 4 * sigma);
}

TEST(Dropout, ThresholdIsInStepsOf65536) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 32768u);
  EXPECT_EQ(dropout_threshold(1.0 / 65536), 1u);
  EXPECT_EQ(dropout_threshold(65535.0 / 65536), 65535u);
}

}  // namespace
}  // namespace tessera::core
