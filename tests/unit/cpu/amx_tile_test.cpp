// AMX's tile layer, operation by operation: the emulation against the definition, and the real tile registers, if
// present, against the emulation, bit by bit. Also the operands that are packed for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "amx_tile_probe.hpp"
#include "tessera/tessera.h"

namespace tessera::test {
namespace {

float float_of(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
std::uint16_t bf16_of(float value) {  // cut off
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

std::vector<std::uint16_t> random_bf16(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& value : values) value = bf16_of(normal(random));
  return values;
}

bool has_avx512_bf16() {
  tessera_device device{};
  return tessera_device_cpu(&device).code == TESSERA_OK && device.isa_limit >= TESSERA_ISA_AVX512_BF16;
}

class AmxTile : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!has_avx512_bf16()) GTEST_SKIP() << "skipped: this CPU lacks avx512_bf16, which the emulation is compiled for";
    real_ = GetParam() == std::string("real");
    tessera_device device{};
    if (real_ && (tessera_device_cpu(&device).code != TESSERA_OK || device.isa_limit < TESSERA_ISA_AMX_BF16)) {
      GTEST_SKIP() << "skipped: no AMX here";
    }
  }
  const AmxProbe& probe() const { return real_ ? amx_probe_real : amx_probe_emulated; }
  bool real_ = false;
};

TEST_P(AmxTile, LoadsAndStoresSixteenRows) {
  const std::vector<std::uint16_t> in = random_bf16(16 * 50, 1);
  std::vector<std::uint16_t> out(16 * 40, 7);
  probe().load_and_store(in.data(), 100, out.data(), 80);
  for (std::size_t r = 0; r < 16; ++r) {
    for (std::size_t c = 0; c < 40; ++c) {
      EXPECT_EQ(out[r * 40 + c], c < 32 ? in[r * 50 + c] : 7) << r << ", " << c;
    }
  }
}

TEST_P(AmxTile, Zeroes) {
  std::vector<std::uint16_t> tile = random_bf16(16 * 32, 2);
  probe().zero(tile.data());
  EXPECT_EQ(tile, std::vector<std::uint16_t>(16 * 32, 0));
}

TEST_P(AmxTile, MultipliesPairsInTheManualsOrder) {
  const std::vector<std::uint16_t> a = random_bf16(16 * 32, 3), b = random_bf16(16 * 32, 4);
  std::vector<float> c(256);
  for (std::size_t i = 0; i < c.size(); ++i) c[i] = static_cast<float>(i) / 16;
  std::vector<float> expected = c;
  for (std::size_t m = 0; m < 16; ++m) {
    for (std::size_t n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (std::size_t k = 0; k < 16; ++k) {
        even = std::fma(float_of(a[m * 32 + 2 * k]), float_of(b[k * 32 + 2 * n]), even);
        odd = std::fma(float_of(a[m * 32 + 2 * k + 1]), float_of(b[k * 32 + 2 * n + 1]), odd);
      }
      expected[m * 16 + n] += even + odd;
    }
  }
  probe().multiply_add(c.data(), a.data(), b.data());
  EXPECT_EQ(c, expected);
}

TEST_P(AmxTile, MultipliesAFewRowsAndLeavesTheOthers) {
  const std::vector<std::uint16_t> a = random_bf16(16 * 32, 5), b = random_bf16(16 * 32, 6);
  std::vector<float> all(256, 0.5f);
  probe().multiply_add(all.data(), a.data(), b.data());
  for (const std::size_t rows : {1, 4, 15, 16}) {
    std::vector<float> c(256, 0.5f), expected(256, 0.5f);
    std::copy_n(all.begin(), rows * 16, expected.begin());
    probe().multiply_add_rows(c.data(), a.data(), b.data(), static_cast<std::int64_t>(rows));
    EXPECT_EQ(c, expected) << rows;
  }
}

TEST_P(AmxTile, TakesDenormalsForZeros) {
  std::vector<std::uint16_t> a(16 * 32, bf16_of(1.0F)), b(16 * 32, 0);
  std::vector<float> c(256, std::numeric_limits<float>::denorm_min());
  b[0] = 0x0001;               // a denormal operand
  b[32] = bf16_of(0x1p-126F);  // the smallest normal: times 2^-1 below, a denormal product
  for (std::size_t m = 0; m < 16; ++m) a[m * 32 + 2] = bf16_of(0.5F);
  probe().multiply_add(c.data(), a.data(), b.data());
  EXPECT_EQ(c, std::vector<float>(256, 0.0F));
}

TEST_P(AmxTile, KeepsInfinityAndNaN) {
  std::vector<std::uint16_t> a(16 * 32, bf16_of(1.0F)), b(16 * 32, 0);
  b[0] = 0x7f80, b[2] = 0x7fc0;
  std::vector<float> c(256, 0.0F);
  probe().multiply_add(c.data(), a.data(), b.data());
  EXPECT_TRUE(std::isinf(c[0]));
  EXPECT_TRUE(std::isnan(c[1]));
  EXPECT_EQ(c[2], 0.0F);
}

INSTANTIATE_TEST_SUITE_P(Amx, AmxTile, ::testing::Values("emulated", "real"));

// Rows without padding: data past a row's last column belong to another row.
struct Rows {
  std::vector<std::vector<std::uint16_t>> data;
  std::vector<const std::uint16_t*> pointers;
  Rows(std::size_t count, std::size_t cols) : pointers(32, nullptr) {
    for (std::size_t r = 0; r < count; ++r) data.push_back(random_bf16(cols, 10 + static_cast<unsigned>(r)));
    for (std::size_t r = 0; r < count; ++r) pointers[r] = data[r].data();
  }
  std::uint16_t at(std::size_t r, std::size_t c) const {
    return r < data.size() && c < data[r].size() ? data[r][c] : std::uint16_t{0};
  }
};

TEST(AmxPack, PutsEveryElementInItsPlaceAndZerosPastTheEnd) {
  if (!has_avx512_bf16()) GTEST_SKIP() << "skipped: this CPU lacks avx512_bf16, which packing is compiled for";
  for (const std::size_t count : {32U, 31U, 17U, 16U, 5U, 1U}) {
    for (const std::size_t cols : {64U, 48U, 33U, 32U, 17U, 1U}) {
      SCOPED_TRACE(std::to_string(count) + " rows, " + std::to_string(cols) + " columns");
      const Rows rows(count, cols);
      const std::size_t padded = (cols + 31) / 32 * 32;
      const auto n = static_cast<std::int64_t>(count), width = static_cast<std::int64_t>(cols);
      std::vector<std::uint16_t> out(padded * 32, 9);
      amx_probe_emulated.column_pairs(out.data(), rows.pointers.data(), n, width);
      for (std::size_t c = 0; c < padded; ++c)
        for (std::size_t r = 0; r < 32; ++r)
          ASSERT_EQ(out[(c / 2 * 32 + r) * 2 + c % 2], rows.at(r, c)) << r << " " << c;
      out.assign(padded * 32, 9);
      amx_probe_emulated.transposed_rows(out.data(), rows.pointers.data(), n, width);
      for (std::size_t c = 0; c < padded; ++c)
        for (std::size_t r = 0; r < 32; ++r)
          ASSERT_EQ(out[c * 32 + r % 16 * 2 + r / 16], rows.at(r, c)) << r << " " << c;
      out.assign(padded * 32, 9);
      amx_probe_emulated.row_pairs(out.data(), rows.pointers.data(), n, width);
      for (std::size_t c = 0; c < padded; ++c)
        for (std::size_t r = 0; r < 32; ++r)
          ASSERT_EQ(out[c / 32 * 1024 + (r % 16 * 32 + c % 32) * 2 + r / 16], rows.at(r, c)) << r << " " << c;
    }
  }
}

}  // namespace
}  // namespace tessera::test
