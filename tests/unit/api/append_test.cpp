// tessera_append against its definition: the place of each element, unchanged elements, and refusals before anything is
// written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "append_step.hpp"
#include "core/convert.hpp"
#include "core/isa.hpp"

namespace tessera::test {
namespace {

auto on_threads(int threads) {
  return [threads](const tessera_append_call& call) {
    Device device = cpu();
    device.threads = threads;
    append(call, &device);
  };
}

TEST(Append, PutsEveryTokenWhereItBelongs) {
  for (std::uint64_t n = 0; n < 400; ++n) {
    SCOPED_TRACE("form " + std::to_string(n));
    expect_right(draw_form(n), on_threads(n % 4 == 0 ? 3 : 1));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Append, RoundsKeysAndValuesTo8Bits) {
  for (std::uint64_t n = 0; n < 200; ++n) {
    SCOPED_TRACE("form " + std::to_string(n));
    expect_right(draw_form_of_codes(n), on_threads(n % 4 == 0 ? 3 : 1));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Append, ManyTokensOnManyThreads) {
  expect_right({.dtype = bfloat16,
                .packed = true,
                .paged = true,
                .positions = true,
                .batch = 7,
                .tokens = 90,
                .heads_q = 8,
                .heads_kv = 4,
                .d = 128,
                .dv = 128,
                .rotary = 64,
                .page_size = 16,
                .max_pages = 9,
                .seed = 5},
               on_threads(4));
}

// Whatever is wrong with one token, no other one is written.
void expect_refused(const char* message, const Form& form, const std::function<void(Step&)>& spoil) {
  Step step(form);
  spoil(step);
  const auto before = step.memory;
  const Status status = try_append(step.call);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_TRUE(status.message().starts_with(message)) << status.message();
  for (const auto& [name, bytes] : before) EXPECT_EQ(step.bytes(name), bytes) << name << " was written to";
}

TEST(Append, RefusesBeforeAnythingIsWritten) {
  const Form dense{.seed = 3}, paged{.paged = true, .seed = 3}, packed{.packed = true, .positions = true, .seed = 3};
  expect_refused("seqused_k[2]: 31, accepted 4 .. 30", dense, [](Step& s) { s.seqused_k[2] = 31; });
  expect_refused("seqused_k[1]: 3, accepted 4 .. 30", dense, [](Step& s) { s.seqused_k[1] = 3; });
  expect_refused("page_table[2, ", paged, [](Step& s) {
    s.page_table[2 * s.form.max_pages + (s.seqused_k[2] - 1) / s.form.page_size] = static_cast<std::int32_t>(s.pages);
  });
  expect_refused("positions_k: token ", packed,
                 [](Step& s) { s.positions_k[s.cu_seqlens.back() - 1] = Step::kAngles; });
  expect_refused("positions_q: token ", packed, [](Step& s) { s.positions_q[s.cu_seqlens.back() - 1] = -1; });
  expect_refused("seqused_k: token ", dense,
                 [](Step& s) { s.call.cos.layout.shape[0] = s.call.sin.layout.shape[0] = 2; });
  expect_refused("cu_seqlens[1]: ", packed, [](Step& s) { s.cu_seqlens[1] = 1000; });
  expect_refused("k_cache: shares memory with k", dense, [](Step& s) { s.call.k_cache.data = s.call.k.data; });
  expect_refused("v: shape [3, 4, 3, 24], accepted [3, 4, 2, ", dense, [](Step& s) { ++s.call.v.layout.shape[2]; });
  expect_refused("v_cache: shape ", paged, [](Step& s) { ++s.call.v_cache.layout.shape[1]; });
  expect_refused("sin: absent", dense, [](Step& s) { s.call.sin = {}; });
  expect_refused("append: an extent of 2147483648, accepted up to 2147483647", dense,
                 [](Step& s) { s.call.cos.layout.shape[0] = s.call.sin.layout.shape[0] = std::int64_t{1} << 31; });
  expect_refused("page_table: room for 2147483650 keys a sequence, accepted at most 2147483647", paged,
                 [](Step& s) { s.call.page_table.layout.shape[1] = 429496730; });
  expect_refused("cos: shape [64, 17] turns 34 columns, accepted 2 .. 32", dense,
                 [](Step& s) { s.call.cos.layout.shape[1] = s.call.sin.layout.shape[1] = 17; });
  expect_refused("q: given without cos and sin", dense, [](Step& s) { s.call.cos = s.call.sin = {}; });
  expect_refused("interleaved: 2", dense, [](Step& s) { s.call.interleaved = 2; });
  expect_refused("k: NULL", dense, [](Step& s) { s.call.k.data = nullptr; });
  expect_refused("call: struct_size 0", dense, [](Step& s) { s.call.struct_size = 0; });
}

// An 8-bit cache of two sequences with 2 and 3 new tokens after 3 and 0 others, in pages of 4.
template <class Element>
struct CacheOf8Bits {
  static constexpr std::int64_t kHeads = 2, kDim = 24, kPages = 4, kPageSize = 4;
  std::vector<float> k = std::vector<float>(5 * kHeads * kDim), v = k, cos = std::vector<float>(8 * kDim / 4),
                     sin = cos;
  std::vector<Element> k_cache = std::vector<Element>(kPages * kPageSize * kHeads * kDim, Element{33}),
                       v_cache = k_cache;
  std::vector<float> k_scales = std::vector<float>(kPages * kPageSize * kHeads, -1.0f), v_scales = k_scales;
  std::vector<std::int32_t> cu_seqlens = {0, 2, 5}, used = {5, 3}, pages = {2, 0, 3, 1};
  tessera_append_call call{};

  explicit CacheOf8Bits(DType dtype) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& x : k) x = normal(random);
    for (float& x : v) x = 100 * normal(random);
    for (std::size_t n = 0; n < cos.size(); ++n) cos[n] = std::cos(0.1f * static_cast<float>(n)), sin[n] = 1 - cos[n];
    const Layout tokens = layout(float32, {5, kHeads, kDim}), cache = layout(dtype, {kPages, kPageSize, kHeads, kDim});
    call.k = tensor(tokens, k.data()), call.v = tensor(tokens, v.data());
    call.k_cache = tensor(cache, k_cache.data()), call.v_cache = tensor(cache, v_cache.data());
    call.seqused_k = tensor(layout(int32, {2}), used.data());
    call.cu_seqlens = tensor(layout(int32, {3}), cu_seqlens.data());
    call.page_table = tensor(layout(int32, {2, 2}), pages.data());
    const Layout angles = layout(float32, {8, kDim / 4});  // half of the columns are rotated
    call.cos = tensor(angles, cos.data()), call.sin = tensor(angles, sin.data());
    const Layout scales = layout(float32, {kPages, kPageSize, kHeads});
    call.k_descale = tensor(scales, k_scales.data()), call.v_descale = tensor(scales, v_scales.data());
    call.compute_scales = 1;
  }

  // Row of the cache, counted over all pages, of token t.
  std::int64_t row(std::int64_t t) const {
    const std::int64_t b = t < 2 ? 0 : 1, key = t < 2 ? 3 + t : t - 2;
    return pages[b * 2 + key / kPageSize] * kPageSize + key % kPageSize;
  }
  float rotated(std::int64_t t, std::int64_t h, std::int64_t d) const {
    const std::int64_t position = t < 2 ? 3 + t : t - 2, half = kDim / 4;
    const float* of = &k[(t * kHeads + h) * kDim];
    if (d >= 2 * half) return of[d];
    const float c = cos[position * half + d % half], s = sin[position * half + d % half];
    return d < half ? of[d] * c - of[d + half] * s : of[d - half] * s + of[d] * c;
  }
};

// Rotation and rounding in one pass: the codes are those of the exact values, the scales those of each token's largest.
template <class Element>
void expect_quantized(DType dtype, float largest) {
  using Cache = CacheOf8Bits<Element>;
  Cache cache(dtype);
  append(cache.call);
  std::vector<char> written(static_cast<std::size_t>(Cache::kPages * Cache::kPageSize));
  for (std::int64_t t = 0; t < 5; ++t) {
    written[cache.row(t)] = 1;
    for (std::int64_t h = 0; h < Cache::kHeads; ++h) {
      const std::int64_t at = cache.row(t) * Cache::kHeads + h;
      float k_most = 0, v_most = 0;
      for (std::int64_t d = 0; d < Cache::kDim; ++d) {
        k_most = std::max(k_most, std::fabs(cache.rotated(t, h, d)));
        v_most = std::max(v_most, std::fabs(cache.v[(t * Cache::kHeads + h) * Cache::kDim + d]));
      }
      EXPECT_FLOAT_EQ(cache.k_scales[at], k_most / largest);
      EXPECT_FLOAT_EQ(cache.v_scales[at], v_most / largest);
      for (std::int64_t d = 0; d < Cache::kDim; ++d) {
        const auto code = [&](const std::vector<Element>& codes) {
          return core::load(static_cast<std::int32_t>(dtype), codes.data(), at * Cache::kDim + d);
        };
        const auto half_step = [&](double value) {  // of the format, at a value in units of the scale
          if (dtype == int8) return 0.5;
          const int bits = dtype == float8_e4m3 ? 3 : 2, least = dtype == float8_e4m3 ? -6 : -14;
          return std::ldexp(0.5, std::max(value == 0 ? least : std::ilogb(value), least) - bits);
        };
        const double k_value = cache.rotated(t, h, d) / cache.k_scales[at];
        const double v_value = cache.v[(t * Cache::kHeads + h) * Cache::kDim + d] / cache.v_scales[at];
        EXPECT_NEAR(code(cache.k_cache), k_value, 1.0001 * half_step(k_value));
        EXPECT_NEAR(code(cache.v_cache), v_value, 1.0001 * half_step(v_value));
      }
    }
  }
  for (std::size_t row = 0; row < written.size(); ++row) {
    for (std::int64_t n = 0; n < Cache::kHeads * Cache::kDim && !written[row]; ++n) {
      EXPECT_EQ(cache.k_cache[row * Cache::kHeads * Cache::kDim + n], Element{33});
    }
    if (!written[row]) {
      EXPECT_EQ(cache.k_scales[row * Cache::kHeads], -1.0f);
    }
  }
}

TEST(Append, ComputesTheScalesOf8Bits) {
  expect_quantized<std::uint8_t>(float8_e4m3, 448);
  expect_quantized<std::uint8_t>(float8_e5m2, 57344);
  expect_quantized<std::int8_t>(int8, 127);
}

// Every instruction set stores and reads the codes as core/float8.hpp does: special numbers by a given scale of 2.
TEST(Append, SaturatesAndKeepsNaN) {
  for (const DType dtype : {float8_e4m3, float8_e5m2}) {
    for (int isa = TESSERA_ISA_BASELINE; isa <= std::min<int>(cpu().isa_limit, TESSERA_ISA_AVX512_BF16); ++isa) {
      CacheOf8Bits<std::uint8_t> cache(dtype);
      const auto e = static_cast<std::int32_t>(dtype);
      const float infinity = std::numeric_limits<float>::infinity();
      const float special[] = {infinity, -infinity, 1e30f, -1e30f, NAN, 0.0f, -0.0f, 2e-9f, 0.0156f, 0.00294f, 3.1e-5f};
      std::copy(std::begin(special), std::end(special), cache.v.begin());
      std::vector<float> scale = {2.0f};
      cache.call.compute_scales = 0;
      cache.call.k_descale = cache.call.v_descale = tensor(layout(float32, {1}), scale.data());
      Device device = cpu();
      device.isa = isa, device.vector_isa = 0;
      append(cache.call, &device);
      for (std::int64_t n = 0; n < CacheOf8Bits<std::uint8_t>::kHeads * CacheOf8Bits<std::uint8_t>::kDim; ++n) {
        std::uint8_t expected[8] = {};
        core::store(e, expected, 0, cache.v[n] / 2.0f);
        const std::uint8_t given =
            cache.v_cache[cache.row(0) * CacheOf8Bits<std::uint8_t>::kHeads * CacheOf8Bits<std::uint8_t>::kDim + n];
        EXPECT_EQ(given, expected[0]) << cache.v[n] << " by " << tessera_isa_name(isa);
      }
    }
  }
}

std::vector<float> numbers_to_round(DType dtype) {
  if (dtype != int8) return codes_and_ties(dtype == float8_e4m3 ? core::kE4M3 : core::kE5M2);
  std::vector<float> numbers = {127.0f, -127.0f, 127.5f, -127.5f, 128.0f, -128.0f, 1e9f, -1e9f};
  for (int n = 0; n < 127; ++n) {
    const float middle = static_cast<float>(n) + 0.5f;
    for (const float x :
         {static_cast<float>(n), middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 128.0f)}) {
      numbers.insert(numbers.end(), {x, -x});
    }
  }
  return numbers;
}

// core::store does not know int8.
int nearest_code(DType dtype, float value) {
  if (dtype == int8) return static_cast<int>(std::nearbyint(std::clamp(value, -127.0f, 127.0f))) & 0xff;
  std::uint8_t codes[8] = {};  // as wide as the widest element
  core::store(static_cast<std::int32_t>(dtype), codes, 0, value);
  return codes[0];
}

// By a scale of 2, so that the quotients are exact.
TEST(Append, EveryCodeAndEveryTieIsRoundedByEveryInstructionSet) {
  constexpr std::int64_t kDim = 64;
  for (const DType dtype : {float8_e4m3, float8_e5m2, int8}) {
    std::vector<float> numbers = numbers_to_round(dtype);
    const std::int64_t rows = (static_cast<std::int64_t>(numbers.size()) + kDim - 1) / kDim;
    numbers.resize(static_cast<std::size_t>(rows * kDim));
    std::vector<float> doubled = numbers, scale = {2.0f};
    for (float& x : doubled) x *= 2;
    for (int isa = TESSERA_ISA_BASELINE; isa <= cpu().isa_limit; ++isa) {
      if (!core::has_isa(cpu().isa_limit, isa)) continue;
      SCOPED_TRACE(std::string(tessera_isa_name(isa)) + " " + std::string(name(dtype)));
      std::vector<std::uint8_t> k_cache(numbers.size(), 33), v_cache = k_cache;
      std::vector<std::int32_t> used = {static_cast<std::int32_t>(rows)};
      const Layout tokens = layout(float32, {1, rows, 1, kDim}), cache = layout(dtype, {1, rows, 1, kDim});
      tessera_append_call call{};
      call.k = call.v = tensor(tokens, doubled.data());
      call.k_cache = tensor(cache, k_cache.data()), call.v_cache = tensor(cache, v_cache.data());
      call.seqused_k = tensor(layout(int32, {1}), used.data());
      call.k_descale = call.v_descale = tensor(layout(float32, {1}), scale.data());
      Device device = cpu();
      device.isa = isa, device.vector_isa = 0;
      append(call, &device);
      for (std::size_t n = 0; n < numbers.size(); ++n) {
        ASSERT_EQ(k_cache[n], nearest_code(dtype, numbers[n])) << numbers[n];
        ASSERT_EQ(v_cache[n], nearest_code(dtype, numbers[n])) << numbers[n];
      }
    }
  }
}

TEST(Append, RefusesScalesInWords) {
  const auto refused = [](const char* message, auto spoil) {
    CacheOf8Bits<std::uint8_t> cache(float8_e4m3);
    spoil(cache.call);
    const Status status = try_append(cache.call);
    EXPECT_TRUE(status.message().starts_with(message)) << status.message();
  };
  refused("k_descale: absent", [](tessera_append_call& call) { call.k_descale = {}; });
  refused("compute_scales: 1 without page_table", [](tessera_append_call& call) {
    call.page_table = {};  // two sequences of at most 8 keys
    call.k_cache.layout.shape[0] = call.v_cache.layout.shape[0] = 2;
  });
  refused("compute_scales: 2", [](tessera_append_call& call) { call.compute_scales = 2; });
  refused("k_descale: shape [4, 4, 2], accepted [1], [2] and [2, 2]",
          [](tessera_append_call& call) { call.compute_scales = 0; });
  refused("v_cache: dtype int8, must be that of k_cache: float8_e4m3",
          [](tessera_append_call& call) { call.v_cache.layout.dtype = TESSERA_INT8; });
  refused("compute_scales: 1 with a cache of float32",
          [](tessera_append_call& call) { call.k_cache.layout.dtype = call.v_cache.layout.dtype = TESSERA_FLOAT32; });
}

// A forward call with the same lengths sees the appended tokens.
TEST(Append, ThenAttentionSeesTheNewKeys) {
  Form form{.dtype = float32,
            .packed = true,
            .paged = true,
            .batch = 2,
            .tokens = 3,
            .heads_q = 2,
            .heads_kv = 2,
            .d = 8,
            .dv = 8,
            .rotary = 0,
            .page_size = 4,
            .max_pages = 3,
            .seed = 9};
  Step step(form);
  append(step.call);
  Problem problem;
  const std::int64_t tokens = step.call.k.layout.shape[0];
  problem.q = problem.o = layout(float32, {tokens, 2, 8});
  problem.k = step.call.k_cache.layout, problem.v = step.call.v_cache.layout;
  problem.cu_seqlens_q = layout(int32, {3});
  problem.page_table = layout(int32, {2, 3}), problem.seqused_k = layout(int32, {2});
  problem.causal = true, problem.window_left = 0;  // a query sees its own key alone, and gives its value
  for (std::int32_t& page : step.page_table) page = std::max(page, 0);
  const Plan plan = tessera::plan(problem);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  std::vector<float> q(static_cast<std::size_t>(tokens * 16), 1.0f), o(q.size());
  Buffers b = {.q = q.data(), .k = step.call.k_cache.data, .v = step.call.v_cache.data, .o = o.data()};
  b.cu_seqlens_q = step.cu_seqlens.data(), b.seqused_k = step.seqused_k.data(), b.page_table = step.page_table.data();
  forward(plan, b, workspace);
  const auto* v = reinterpret_cast<const float*>(step.memory.at("v").data());
  for (std::int64_t n = step.cu_seqlens.front() * 16; n < step.cu_seqlens.back() * 16; ++n) {
    EXPECT_FLOAT_EQ(o[n], v[n]) << n;
  }
}

}  // namespace
}  // namespace tessera::test
