// Every code of the 8-bit formats, read by every kernel of every instruction set of this machine, is the number that
// core/float8.hpp says.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/convert.hpp"
#include "core/float8.hpp"
#include "core/isa.hpp"
#include "support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kCodes = 256;

float number(DType dtype, std::int64_t code) {
  const auto byte = static_cast<std::uint8_t>(code);
  if (dtype == int8) return static_cast<float>(static_cast<std::int8_t>(byte));
  return core::float8_to_float(dtype == float8_e4m3 ? core::kE4M3 : core::kE5M2, byte);
}

// For each instruction set, kernel and dtypes: body(device, dtype of the codes, dtype of q, which may be the same).
template <class Body>
void for_all(const Body& body) {
  for (std::int32_t isa = 0; isa <= cpu().isa_limit; ++isa) {
    if (!core::has_isa(cpu().isa_limit, isa)) continue;
    for (const char* family : {"decode", "tiled"}) {
      Device device = cpu();
      device.isa = isa, device.vector_isa = 0;
      std::strcpy(device.family, family);
      for (const DType dtype : {float8_e4m3, float8_e5m2, int8}) {
        for (const DType q : {bfloat16, float16, dtype}) {
          if (q == int8) continue;
          SCOPED_TRACE(std::string(tessera_isa_name(isa)) + " " + family + " " + std::string(name(dtype)) + " " +
                       std::string(name(q)));
          body(device, dtype, q);
        }
      }
    }
  }
}

std::vector<std::byte> ones(DType dtype, std::int64_t count) {
  const std::uint16_t one = dtype == bfloat16 ? 0x3f80 : dtype == float16 ? 0x3c00 : dtype == float8_e4m3 ? 0x38 : 0x3c;
  const std::size_t bytes = dtype == bfloat16 || dtype == float16 ? 2 : 1;
  std::vector<std::byte> all(static_cast<std::size_t>(count) * bytes);
  for (std::size_t at = 0; at < all.size(); at += bytes) std::memcpy(&all[at], &one, bytes);
  return all;
}
// o of 8-bit queries is bfloat16.
DType dtype_of_o(DType q) { return q == float16 ? float16 : bfloat16; }

// One key, so its weight is 1 and o is the value. A sum that begins with 0 has no -0.
TEST(Codes, EveryValueIsExact) {
  for_all([](const Device& device, DType dtype, DType q_dtype) {
    Problem problem;
    problem.q = layout(q_dtype, {1, 1, 1, 64});
    problem.o = layout(dtype_of_o(q_dtype), {1, 1, 1, kCodes});
    problem.k = layout(dtype, {1, 1, 1, 64});
    problem.v = layout(dtype, {1, 1, 1, kCodes});
    const Plan plan = tessera::plan(problem, device);
    std::vector<std::byte> workspace(plan.workspace_bytes);
    const std::vector<std::byte> q = ones(q_dtype, 64);
    std::vector<std::uint16_t> o(kCodes);
    std::vector<std::uint8_t> k(64), v(kCodes);
    for (std::int64_t n = 0; n < kCodes; ++n) v[static_cast<std::size_t>(n)] = static_cast<std::uint8_t>(n);
    forward(plan, {.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data()}, workspace);
    for (std::int64_t n = 0; n < kCodes; ++n) {
      const std::uint16_t bits = o[static_cast<std::size_t>(n)];
      const float found = q_dtype == float16 ? core::float16_to_float(bits) : core::bfloat16_to_float(bits);
      const float expected = number(dtype, n);
      EXPECT_TRUE(found == expected || (std::isnan(found) && std::isnan(expected)))
          << "code " << n << ": " << found << ", expected " << expected;
    }
  });
}

// One key of one code a sequence, so lse is its number; neighbouring codes differ by more than the bound.
TEST(Codes, EveryKeyIsItsNumber) {
  for_all([](const Device& device, DType dtype, DType q_dtype) {
    constexpr std::int64_t kD = 80;
    Problem problem;
    problem.q = layout(q_dtype, {kCodes, 1, 1, kD});
    problem.o = layout(dtype_of_o(q_dtype), {kCodes, 1, 1, 8});
    problem.k = layout(dtype, {kCodes, 1, 1, kD});
    problem.v = layout(dtype, {kCodes, 1, 1, 8});
    problem.lse = lse_layout(problem);
    problem.set_scale(1.0);
    const Plan plan = tessera::plan(problem, device);
    std::vector<std::byte> workspace(plan.workspace_bytes);
    const std::vector<std::byte> q = ones(q_dtype, kCodes * kD);
    std::vector<std::uint16_t> o(kCodes * 8);
    std::vector<std::uint8_t> k(kCodes * kD), v(kCodes * 8);
    std::vector<float> lse(kCodes);
    for (std::int64_t n = 0; n < kCodes; ++n) {
      k[static_cast<std::size_t>(n * kD + n * 7 % kD)] = static_cast<std::uint8_t>(n);
    }
    Buffers buffers{.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .lse = lse.data()};
    forward(plan, buffers, workspace);
    for (std::int64_t n = 0; n < kCodes; ++n) {
      const float found = lse[static_cast<std::size_t>(n)], expected = number(dtype, n);
      if (std::isfinite(expected)) {
        EXPECT_NEAR(found, expected, 1e-6f * std::fabs(expected)) << "code " << n;
      } else {
        EXPECT_FALSE(std::isfinite(found)) << "code " << n;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::test
