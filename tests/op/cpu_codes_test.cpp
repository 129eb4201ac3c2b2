// Each code of 8 bits as the CPU's decoding kernels read it, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "check.hpp"
#include "core/float8.hpp"
#include "execute.hpp"
#include "numbers.hpp"
#include "place.hpp"

namespace tessera::testing {
namespace {

double value_of(int32_t dtype, size_t code) {
  const uint8_t byte = static_cast<uint8_t>(code);
  if (dtype == TESSERA_INT8) return static_cast<int8_t>(byte);
  return core::float8_to_float(dtype == TESSERA_FLOAT8_E4M3 ? core::kE4M3 : core::kE5M2, byte);
}

// With one key O is its value, exactly, if the scale is a power of two; a query of a single 1 has one of the key's
// elements as its score, and LSE.
TEST(CpuCodes, AreReadExactly) {
  constexpr size_t kCodes = 256, kHeads = 16;
  for (const char* dtypes : {"dtype=bf16 kv=e4m3", "dtype=bf16 kv=e5m2", "dtype=bf16 kv=i8", "dtype=f16 kv=e4m3",
                             "dtype=f16 kv=e5m2", "dtype=f16 kv=i8"}) {
    SCOPED_TRACE(dtypes);
    const std::string text = std::string(dtypes) + " b=8 sq=2 sk=1 hq=16 hkv=2 d=256 dv=256 scales=h";
    Inputs in = make_inputs(legalised(parse_case(text.c_str(), nullptr).value()));
    std::ranges::fill(in.q, 0.0);
    std::ranges::fill(in.k_scales, 0.5), std::ranges::fill(in.v_scales, 0.5);
    for (size_t row = 0; row < in.q.size() / kCodes; ++row) in.q[row * kCodes + row % kCodes] = 1;
    for (size_t n = 0; n < in.v_codes.size(); ++n) {
      const double value = value_of(kv_dtype(in.c), n % kCodes);
      in.v_codes[n] = value, in.k_codes[n] = std::isfinite(value) ? value : 0;
    }
    for (const Place& place : cpu_places()) {
      SCOPED_TRACE(place_name(place));
      Call call = make_call(in);
      const RunResult result = run(call, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_DECODE, .place = place});
      ASSERT_TRUE(result.ok()) << result.why();
      const std::vector<double> o = call.o.load(), lse = call.lse.load();
      for (size_t n = 0; n < o.size(); ++n) {
        const double exact = round_to(static_cast<int32_t>(in.c.dtype), value_of(kv_dtype(in.c), n % kCodes) * 0.5);
        ASSERT_TRUE(o[n] == exact || (std::isnan(o[n]) && std::isnan(exact)))
            << "value of code " << n % kCodes << ": " << o[n];
      }
      for (size_t row = 0; row < kCodes; ++row) {  // [b][h][i] of LSE
        const size_t code = row / 32 * 32 + row % 2 * kHeads + row / 2 % kHeads;
        const double value = value_of(kv_dtype(in.c), code);
        const double score = (std::isfinite(value) ? value : 0) * 0.5 * in.scale();
        ASSERT_NEAR(lse[row], score, std::fabs(score) * 0x1p-20) << "key of code " << code;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
