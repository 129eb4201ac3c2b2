// One step's random new tokens with their cache, and its expected content afterwards: tessera_append's definition in
// float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "core/float8.hpp"
#include "support.hpp"

namespace tessera::test {

// What shares a scale of an 8-bit cache; kComputed: a token and head, and the call stores it.
enum class Scales { kNone, kOne, kHeads, kSequences, kComputed };

// A random step: the sizes and options of one call.
struct Form {
  DType dtype = float32;
  std::optional<DType> codes = std::nullopt;  // of the cache, float8_e4m3 or float8_e5m2; otherwise it has `dtype`
  Scales scales = Scales::kNone;
  bool packed = false, paged = false, interleaved = false, positions = false, queries = true, in_place = false;
  bool heads_first = false;  // HND: heads are outside the keys of a page
  bool wide = false;         // float32 cos and sin beside a shorter dtype
  std::int64_t batch = 3, tokens = 4, tokens_q = 4, heads_q = 4, heads_kv = 2, d = 32, dv = 24, rotary = 16;
  std::int64_t page_size = 5, max_pages = 6, spare_pages = 3;
  std::uint64_t seed = 1;
};

class Step {
 public:
  explicit Step(const Form& drawn) : form(drawn), random(drawn.seed) {
    draw_lengths();
    const std::int64_t rows = total(form.tokens), rows_q = total(form.tokens_q);
    add("k", call.k, tokens_layout(form.tokens, form.heads_kv, form.d), rows);
    add("v", call.v, tokens_layout(form.tokens, form.heads_kv, form.dv), rows);
    pages = form.paged ? form.batch * form.max_pages + form.spare_pages : form.batch;
    keys_a_page = form.paged ? form.page_size : form.page_size * form.max_pages;
    add("k_cache", call.k_cache, cache_layout(form.d));
    add("v_cache", call.v_cache, cache_layout(form.dv));
    if (form.scales != Scales::kNone) {
      add("k_descale", call.k_descale, scales_layout());
      add("v_descale", call.v_descale, scales_layout());
      // Whole powers of two and others; some make numbers saturate.
      for (const char* const name : {"k_descale", "v_descale"}) {
        for (std::size_t n = 0; n < memory[name].size() / sizeof(float); ++n) {
          const double scale = n % 3 == 0 ? 0.5 : 0.001 + 0.01 * static_cast<double>(between(0, 100));
          core::store(TESSERA_FLOAT32, memory[name].data(), static_cast<std::int64_t>(n), scale);
        }
      }
      call.compute_scales = form.scales == Scales::kComputed;
    }
    if (form.queries && form.rotary > 0) {
      add("q", call.q, tokens_layout(form.tokens_q, form.heads_q, form.d), rows_q);
      if (!form.in_place) add("q_out", call.q_out, tokens_layout(form.tokens_q, form.heads_q, form.d), rows_q);
    }
    if (form.rotary > 0) {
      const DType angles = form.wide ? float32 : form.dtype;
      add("cos", call.cos, layout(angles, {kAngles, form.rotary / 2}));
      add("sin", call.sin, layout(angles, {kAngles, form.rotary / 2}));
    }
    call.interleaved = form.interleaved;
    index(call.seqused_k, seqused_k, {form.batch});
    if (form.packed) index(call.cu_seqlens, cu_seqlens, {form.batch + 1});
    if (form.paged) draw_pages();
    if (form.positions && form.rotary > 0) {
      draw_positions(positions_k, call.positions_k, form.tokens);
      if (form.queries) draw_positions(positions_q, call.positions_q, form.tokens_q);
    }
  }
  Step(const Step&) = delete;

  std::int64_t count(std::int64_t b) const { return form.packed ? cu_seqlens[b + 1] - cu_seqlens[b] : form.tokens; }
  std::int64_t count_q(std::int64_t b) const { return form.packed ? count(b) : form.tokens_q; }
  std::int64_t begin(std::int64_t b) const { return form.packed ? cu_seqlens[b] : 0; }
  std::int64_t room() const { return form.page_size * form.max_pages; }

  static std::int64_t offset(const Layout& layout, std::int64_t b, std::int64_t row, std::int64_t h, std::int64_t d) {
    return layout.rank == 3 ? row * layout.strides[0] + h * layout.strides[1] + d
                            : b * layout.strides[0] + row * layout.strides[1] + h * layout.strides[2] + d;
  }
  double load(const std::string& name, const Layout& layout, std::int64_t at) const {
    return core::load(layout.dtype, memory.at(name).data(), at);
  }
  std::vector<std::byte> bytes(const std::string& name) const { return memory.at(name); }

  // Visits each element of the cache that the call writes: its offset, its value, and the offset of its scale.
  template <class Visit>
  void for_each_key(bool values, const Visit& visit) const {
    const tessera_tensor &from = values ? call.v : call.k, &to = values ? call.v_cache : call.k_cache;
    for (std::int64_t b = 0; b < form.batch; ++b) {
      for (std::int64_t i = 0; i < count(b); ++i) {
        const std::int64_t key = seqused_k[b] - count(b) + i;
        const std::int64_t page = form.paged ? page_table[b * form.max_pages + key / form.page_size] : b;
        const std::int64_t slot = form.paged ? key % form.page_size : key;
        for (std::int64_t h = 0; h < form.heads_kv; ++h) {
          for (std::int64_t d = 0; d < (values ? form.dv : form.d); ++d) {
            const auto read = [&](std::int64_t column) {
              return load(values ? "v" : "k", from.layout, offset(from.layout, b, begin(b) + i, h, column));
            };
            visit(offset(to.layout, page, slot, h, d), values ? read(d) : turned(read, d, position(b, i, key, false)),
                  scale_offset(b, page, slot, h));
          }
        }
      }
    }
  }
  // What `name` must hold after the call, by element; elements that the call does not write are not there.
  using Expected = std::map<std::int64_t, double>;
  Expected expected_keys(bool values) const {
    Expected expected;
    for_each_key(values, [&](std::int64_t at, double value, std::int64_t) { expected[at] = value; });
    return expected;
  }
  Expected expected_queries(const std::vector<std::byte>& q) const {
    const Layout& to = form.in_place ? call.q.layout : call.q_out.layout;
    Expected expected;
    for (std::int64_t b = 0; b < form.batch; ++b) {
      for (std::int64_t i = 0; i < count_q(b); ++i) {
        for (std::int64_t h = 0; h < form.heads_q; ++h) {
          for (std::int64_t d = 0; d < form.d; ++d) {
            const auto read = [&](std::int64_t column) {
              return core::load(static_cast<std::int32_t>(form.dtype), q.data(),
                                offset(call.q.layout, b, begin(b) + i, h, column));
            };
            const std::int64_t at = seqused_k[b] - count(b) + i;
            expected[offset(to, b, begin(b) + i, h, d)] = turned(read, d, position(b, i, at, true));
          }
        }
      }
    }
    return expected;
  }

  Form form;
  tessera_append_call call{};
  std::vector<std::int32_t> cu_seqlens, seqused_k, page_table, positions_q, positions_k;
  std::map<std::string, std::vector<std::byte>> memory;
  std::int64_t pages = 0, keys_a_page = 0;
  static constexpr std::int64_t kAngles = 64;

 private:
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  }
  std::int64_t total(std::int64_t a_sequence) const { return form.packed ? cu_seqlens.back() + kTail : a_sequence; }

  void draw_lengths() {
    cu_seqlens = {form.packed ? static_cast<std::int32_t>(between(0, 2)) : 0};
    for (std::int64_t b = 0; b < form.batch; ++b) {
      const std::int64_t count = form.packed ? between(0, form.tokens) : form.tokens;
      cu_seqlens.push_back(cu_seqlens.back() + static_cast<std::int32_t>(count));
      seqused_k.push_back(static_cast<std::int32_t>(between(count, room())));
    }
  }
  void draw_pages() {
    std::vector<std::int32_t> pool(static_cast<std::size_t>(pages));
    std::iota(pool.begin(), pool.end(), 0);
    std::shuffle(pool.begin(), pool.end(), random);
    // Pages that no new key goes to need not be there.
    page_table.assign(form.batch * form.max_pages, -7);
    for (std::int64_t b = 0; b < form.batch; ++b) {
      for (std::int64_t key = seqused_k[b] - count(b); key < seqused_k[b]; ++key) {
        std::int32_t& page = page_table[b * form.max_pages + key / form.page_size];
        if (page < 0) page = pool.back(), pool.pop_back();
      }
    }
    index(call.page_table, page_table, {form.batch, form.max_pages});
  }
  void draw_positions(std::vector<std::int32_t>& positions, tessera_tensor& tensor, std::int64_t tokens) {
    positions.resize(form.packed ? total(tokens) : form.batch * tokens);
    for (std::int32_t& x : positions) x = static_cast<std::int32_t>(between(0, kAngles - 1));
    form.packed ? index(tensor, positions, {total(tokens)}) : index(tensor, positions, {form.batch, tokens});
  }
  Layout tokens_layout(std::int64_t tokens, std::int64_t heads, std::int64_t d) const {
    return form.packed ? layout(form.dtype, {total(tokens), heads, d})
                       : layout(form.dtype, {form.batch, tokens, heads, d});
  }
  Layout scales_layout() const {
    if (form.scales == Scales::kOne) return layout(float32, {1});
    if (form.scales == Scales::kHeads) return layout(float32, {form.heads_kv});
    if (form.scales == Scales::kSequences) return layout(float32, {form.batch, form.heads_kv});
    return layout(float32, {pages, keys_a_page, form.heads_kv});
  }
  std::int64_t scale_offset(std::int64_t b, std::int64_t page, std::int64_t slot, std::int64_t h) const {
    switch (form.scales) {
      case Scales::kHeads:
        return h;
      case Scales::kSequences:
        return b * form.heads_kv + h;
      case Scales::kComputed:
        return (page * keys_a_page + slot) * form.heads_kv + h;
      default:
        return 0;
    }
  }
  // Pages with a gap after each: the other half of a fused cache of keys and values, say.
  Layout cache_layout(std::int64_t d) const {
    Layout cache = layout(form.codes.value_or(form.dtype), {pages, keys_a_page, form.heads_kv, d});
    if (form.heads_first) cache.strides[1] = d, cache.strides[2] = keys_a_page * d;
    cache.strides[0] += 3 * d;
    return cache;
  }
  void add(const std::string& name, tessera_tensor& tensor, const Layout& of, std::int64_t = 0) {
    std::vector<std::byte>& data = memory[name];
    const std::size_t count = span_elements(of), size = tessera_dtype_bytes(of.dtype);
    data.resize(std::max<std::size_t>(1, count) * size);
    std::normal_distribution<double> normal;
    for (std::size_t n = 0; n < count; ++n)
      core::store(of.dtype, data.data(), static_cast<std::int64_t>(n), normal(random));
    tensor = test_tensor(of, data.data());
  }
  static tessera_tensor test_tensor(const Layout& of, const void* data) { return tessera::tensor(of, data); }
  static void index(tessera_tensor& tensor, const std::vector<std::int32_t>& data,
                    std::initializer_list<std::int64_t> shape) {
    tensor = tessera::tensor(layout(int32, shape), data.data());
  }

  std::int64_t position(std::int64_t b, std::int64_t i, std::int64_t key, bool query) const {
    const std::vector<std::int32_t>& given = query ? positions_q : positions_k;
    if (given.empty()) return key;
    return given[form.packed ? begin(b) + i : b * (query ? form.tokens_q : form.tokens) + i];
  }
  template <class Read>
  double turned(const Read& read, std::int64_t d, std::int64_t at) const {
    if (d >= form.rotary) return read(d);
    const std::int64_t half = form.rotary / 2;
    const std::int64_t pair = form.interleaved ? d / 2 : d % half;
    const bool second = form.interleaved ? d % 2 == 1 : d >= half;
    const double x = read(form.interleaved ? 2 * pair : pair), y = read(form.interleaved ? 2 * pair + 1 : pair + half);
    const double cosine = load("cos", call.cos.layout, at * half + pair),
                 sine = load("sin", call.sin.layout, at * half + pair);
    return second ? x * sine + y * cosine : x * cosine - y * sine;
  }

  static constexpr std::int64_t kTail = 2;
  std::mt19937_64 random;
};

// Elements as expected, rounded from the exact sum by at most one unit of the dtype and the float32 products'
// roundings; everything else as it was.
inline void expect_written(const Step& step, const std::string& name, const Layout& of, const Step::Expected& expected,
                           const std::vector<std::byte>& before) {
  const std::vector<std::byte> after = step.bytes(name);
  const double unit = of.dtype == TESSERA_FLOAT32 ? 0x1p-23 : of.dtype == TESSERA_FLOAT16 ? 0x1p-11 : 0x1p-8;
  const auto count = static_cast<std::int64_t>(after.size() / tessera_dtype_bytes(of.dtype));
  for (std::int64_t n = 0; n < count; ++n) {
    const double value = core::load(of.dtype, after.data(), n);
    if (const auto at = expected.find(n); at != expected.end()) {
      // |x cos| + |y sin| is below 16 for normal numbers that a test draws.
      ASSERT_NEAR(value, at->second, unit * std::fabs(at->second) + 16 * 0x1p-23) << name << "[" << n << "]";
    } else {
      ASSERT_EQ(value, core::load(of.dtype, before.data(), n)) << name << "[" << n << "], which is not the call's";
    }
  }
}

// Codes of the values by their scales, and a computed scale: its row's largest magnitude over the format's largest
// number. What lies outside of the call is as it was.
inline void expect_codes(const Step& step, bool is_value, const std::map<std::string, std::vector<std::byte>>& before) {
  const std::string name = is_value ? "v_cache" : "k_cache", of_scales = is_value ? "v_descale" : "k_descale";
  const bool is_e4m3 = *step.form.codes == float8_e4m3;
  const double largest = is_e4m3 ? 448 : 57344, slack = 16 * 0x1p-23;  // of a product in float32, as expect_written's
  const auto dtype = static_cast<std::int32_t>(*step.form.codes);
  const std::vector<std::byte> after = step.bytes(name);
  std::vector<std::byte> rest = after;
  std::map<std::int64_t, double> most;
  step.for_each_key(is_value, [&](std::int64_t at, double value, std::int64_t scale_at) {
    most[scale_at] = std::max(most[scale_at], std::fabs(value));
    const double scale = step.form.scales == Scales::kNone
                             ? 1.0
                             : core::load(TESSERA_FLOAT32, step.memory.at(of_scales).data(), scale_at);
    const double expected = std::clamp(value / scale, -largest, largest);
    const int bits = is_e4m3 ? 3 : 2, least = is_e4m3 ? -6 : -14;
    const double half_step = std::ldexp(0.5, std::max(expected == 0 ? least : std::ilogb(expected), least) - bits);
    EXPECT_NEAR(core::load(dtype, after.data(), at), expected,
                half_step + slack / scale + 0x1p-22 * std::fabs(expected))
        << name << "[" << at << "]";
    rest[at] = before.at(name)[at];
  });
  EXPECT_EQ(rest, before.at(name)) << name << ": what is not the call's was written to";
  if (step.form.scales == Scales::kNone) return;
  std::vector<std::byte> other_scales = step.bytes(of_scales);
  for (const auto& [at, magnitude] : most) {
    if (step.form.scales != Scales::kComputed) break;
    const double scale = core::load(TESSERA_FLOAT32, other_scales.data(), at);
    EXPECT_NEAR(scale, magnitude / largest, (slack + 0x1p-22 * magnitude) / largest) << of_scales << "[" << at << "]";
    std::memcpy(&other_scales[at * sizeof(float)], &before.at(of_scales)[at * sizeof(float)], sizeof(float));
  }
  EXPECT_EQ(other_scales, before.at(of_scales)) << of_scales << ": what is not the call's was written to";
}

// `run` executes the call.
template <class Run>
void expect_right(const Form& form, const Run& run) {
  Step step(form);
  const auto before = step.memory;
  run(step.call);
  if (form.codes) {
    for (const bool is_value : {false, true}) expect_codes(step, is_value, before);
  } else {
    expect_written(step, "k_cache", step.call.k_cache.layout, step.expected_keys(false), before.at("k_cache"));
    expect_written(step, "v_cache", step.call.v_cache.layout, step.expected_keys(true), before.at("v_cache"));
  }
  std::set<std::string> written = {"k_cache", "v_cache"};
  if (form.codes) written.insert({"k_descale", "v_descale"});
  if (form.queries && form.rotary > 0) {
    const std::string name = form.in_place ? "q" : "q_out";
    const Layout& of = form.in_place ? step.call.q.layout : step.call.q_out.layout;
    expect_written(step, name, of, step.expected_queries(before.at("q")), before.at(name));
    written.insert(name);
  }
  for (const auto& [name, bytes] : before) {
    if (written.contains(name)) continue;
    EXPECT_EQ(step.bytes(name), bytes) << name << " was written to";
  }
}

// The n-th of many, every option in some of them.
inline Form draw_form(std::uint64_t n) {
  std::mt19937_64 random(n + 11);
  const auto coin = [&random] { return random() % 2 == 0; };
  const auto between = [&random](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  Form form;
  form.seed = n + 1;
  form.dtype = std::array{float32, float16, bfloat16}[n % 3];
  form.packed = coin(), form.paged = coin(), form.interleaved = coin(), form.positions = coin();
  form.queries = coin(), form.in_place = coin(), form.heads_first = coin(), form.wide = coin();
  form.batch = between(0, 4), form.tokens = between(0, 9), form.tokens_q = form.packed ? form.tokens : between(0, 9);
  form.heads_kv = between(1, 3), form.heads_q = form.heads_kv * between(1, 3);
  form.d = between(2, 70), form.dv = between(1, 70), form.rotary = 2 * between(0, form.d / 2);
  if (n % 4 == 0) {  // whole vectors of 16 bytes, of float16 two halves to rotate
    form.d = 16 * between(1, 4), form.dv = 16 * between(1, 4), form.rotary = 16 * between(0, form.d / 16);
  }
  if (n % 8 == 1) {  // more heads and columns than a block's threads have at once
    form.heads_kv = between(4, 9), form.heads_q = form.heads_kv * between(1, 4);
    form.d = between(64, 128), form.dv = between(64, 128), form.rotary = 2 * between(0, form.d / 2);
  }
  form.page_size = between(2, 9), form.max_pages = (form.tokens + form.page_size - 1) / form.page_size + between(0, 3);
  // Positions without a tensor of their own end where a row of cos does.
  if (form.page_size * form.max_pages + 9 >= Step::kAngles) form.positions = true;
  return form;
}

// The same with a cache of 8 bits and any of its scales.
inline Form draw_form_of_codes(std::uint64_t n) {
  Form form = draw_form(n);
  form.codes = n / 3 % 2 == 0 ? float8_e4m3 : float8_e5m2;
  form.scales = std::array{Scales::kComputed,  Scales::kNone, Scales::kHeads,   Scales::kComputed,
                           Scales::kSequences, Scales::kOne,  Scales::kComputed}[n % 7];
  form.paged = form.paged || form.scales == Scales::kComputed;
  return form;
}

// Every finite code's number, the middle between it and the next one, and its neighbours in float32, of both signs.
inline std::vector<float> codes_and_ties(const core::Float8Format& format) {
  std::vector<float> numbers = {format.largest, -format.largest};
  for (int code = 0; core::float8_to_float(format, static_cast<std::uint8_t>(code)) < format.largest; ++code) {
    const float a = core::float8_to_float(format, static_cast<std::uint8_t>(code)),
                b = core::float8_to_float(format, static_cast<std::uint8_t>(code + 1)), middle = (a + b) / 2;
    for (const float x : {a, middle, std::nextafter(middle, a), std::nextafter(middle, b)}) {
      numbers.insert(numbers.end(), {x, -x});
    }
  }
  return numbers;
}

// Bytes of two caches of `format`, all NaN being one.
inline void expect_same_codes(const core::Float8Format& format, std::vector<std::byte> a, std::vector<std::byte> b) {
  for (std::vector<std::byte>* const codes : {&a, &b}) {
    for (std::byte& code : *codes) {
      if (std::isnan(core::float8_to_float(format, static_cast<std::uint8_t>(code)))) code = std::byte{0x7f};
    }
  }
  EXPECT_EQ(a, b);
}

// Values that are not rotated get the codes and the scales that the CPU gives them: every tie between two codes,
// numbers too large and too small, infinities and NaN, by scales that are given and computed. `run` executes the call.
template <class Run>
void expect_the_cpus_codes(const Run& run) {
  for (const DType codes : {float8_e4m3, float8_e5m2}) {
    const core::Float8Format& format = codes == float8_e4m3 ? core::kE4M3 : core::kE5M2;
    std::vector<float> numbers = codes_and_ties(format);
    constexpr float kEndless = std::numeric_limits<float>::infinity();
    numbers.insert(numbers.end(), {kEndless, -kEndless, 1e30f, -1e30f, NAN, -0.0f, 2e-9f, 1e-38f, 1e-42f, 3.1e-5f});
    numbers.resize((numbers.size() + 23) / 24 * 24 + 3 * 24);  // and rows of zeros
    for (const Scales scales : {Scales::kNone, Scales::kOne, Scales::kSequences, Scales::kComputed}) {
      for (const std::int64_t d : {24, 23}) {  // aligned and not
        SCOPED_TRACE(std::string(name(codes)) + ", scales " + std::to_string(static_cast<int>(scales)));
        const auto heads = static_cast<std::int64_t>(numbers.size()) / 24;
        const Form form{.codes = codes,
                        .scales = scales,
                        .paged = true,
                        .queries = false,
                        .batch = 1,
                        .tokens = 1,
                        .heads_kv = heads,
                        .d = d,
                        .dv = d,
                        .rotary = 0,
                        .page_size = 2,
                        .max_pages = 1};
        Step step(form), on_cpu(form);
        for (Step* const each : {&step, &on_cpu}) {
          for (const char* const name : {"k", "v"}) {
            std::memcpy(each->memory.at(name).data(), numbers.data(), each->memory.at(name).size());
          }
        }
        run(step.call);
        append(on_cpu.call);
        for (const char* const name : {"k_cache", "v_cache"}) {
          expect_same_codes(format, step.bytes(name), on_cpu.bytes(name));
        }
        for (const char* const name : {"k_descale", "v_descale"}) {
          if (scales == Scales::kNone) continue;
          EXPECT_EQ(step.bytes(name), on_cpu.bytes(name)) << name;
        }
      }
    }
  }
}

}  // namespace tessera::test
