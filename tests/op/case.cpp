#include "case.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <span>

#include "core/score/definitions.hpp"
#include "tessera/tessera.h"

namespace tessera::testing {
namespace {

struct Word {
  const char* text;
  int64_t value;
};

constexpr Word kDtypes[] = {{"f32", TESSERA_FLOAT32},
                            {"f16", TESSERA_FLOAT16},
                            {"bf16", TESSERA_BFLOAT16},
                            {"e4m3", TESSERA_FLOAT8_E4M3},
                            {"e5m2", TESSERA_FLOAT8_E5M2}};
constexpr Word kKvDtypes[] = {
    {"q", -1}, {"e4m3", TESSERA_FLOAT8_E4M3}, {"e5m2", TESSERA_FLOAT8_E5M2}, {"i8", TESSERA_INT8}};
constexpr Word kScaleShapes[] = {
    {"none", kNoScales}, {"one", kScalesOne}, {"h", kScalesHead}, {"bh", kScalesBatch}, {"fine", kScalesFine}};
constexpr Word kForms[] = {{"dense", kDense}, {"packed", kPacked}, {"paged", kPaged}};
constexpr Word kOrders[] = {{"bshd", kBshd}, {"bhsd", kBhsd}, {"sbhd", kSbhd}};
constexpr Word kSpans[] = {{"none", kAbsent}, {"k", 0},   {"qk", 1},  {"hk", 2},  {"hqk", 3},
                           {"bk", 4},         {"bqk", 5}, {"bhk", 6}, {"bhqk", 7}};
constexpr Word kCaptured[] = {{"f32", TESSERA_FLOAT32}, {"f16", TESSERA_FLOAT16}, {"bf16", TESSERA_BFLOAT16}};
constexpr Word kAlibi[] = {{"none", 0}, {"h", 1}, {"bh", 2}};
constexpr Word kData[] = {
    {"normal", kNormal},      {"outlier", kOutlier}, {"growing", kGrowing},    {"huge", kHuge},
    {"nan_query", kNanQuery}, {"nan_key", kNanKey},  {"inf_key", kInfKey},     {"inf_value", kInfValue},
    {"inf_bias", kInfBias},   {"falling", kFalling}, {"nan_once", kNanOnce},   {"inf_once", kInfOnce},
    {"nan_value", kNanValue}, {"nan_d_o", kNanDO},   {"huge_bias", kHugeBias}, {"shared", kShared}};

struct Field {
  const char* name;
  int64_t Case::*integer = nullptr;
  double Case::*real = nullptr;
  std::string Case::*text = nullptr;  // printed in quotation marks
  std::span<const Word> words = {};
  int64_t low = 0, high = 1;
  bool always = false;  // printed even if it is the default
};

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// One source for printing, parsing and shrinking.
const Field kFields[] = {
    {.name = "dtype", .integer = &Case::dtype, .words = kDtypes, .always = true},
    {.name = "kv", .integer = &Case::kv, .words = kKvDtypes},
    {.name = "scales", .integer = &Case::scales, .words = kScaleShapes},
    {.name = "backward", .integer = &Case::backward},
    {.name = "b", .integer = &Case::b, .high = kAny, .always = true},
    {.name = "sq", .integer = &Case::sq, .high = kAny, .always = true},
    {.name = "sk", .integer = &Case::sk, .high = kAny, .always = true},
    {.name = "hq", .integer = &Case::hq, .low = 1, .high = kAny, .always = true},
    {.name = "hkv", .integer = &Case::hkv, .low = 1, .high = kAny, .always = true},
    {.name = "d", .integer = &Case::d, .low = 1, .high = 576, .always = true},
    {.name = "dv", .integer = &Case::dv, .low = 1, .high = 512, .always = true},
    {.name = "q", .integer = &Case::q_form, .words = kForms},
    {.name = "k", .integer = &Case::k_form, .words = kForms},
    {.name = "page", .integer = &Case::page, .low = 1, .high = kAny},
    {.name = "csr", .integer = &Case::csr},
    {.name = "lead", .integer = &Case::lead, .high = kAny},
    {.name = "tail", .integer = &Case::tail, .high = kAny},
    {.name = "few", .integer = &Case::few, .high = kAny},
    {.name = "used", .integer = &Case::used},
    {.name = "order", .integer = &Case::order, .words = kOrders},
    {.name = "gap", .integer = &Case::gap, .high = kAny},
    {.name = "reversed", .integer = &Case::reversed},
    {.name = "shared_kv", .integer = &Case::shared_kv},
    {.name = "causal", .integer = &Case::causal},
    {.name = "top_left", .integer = &Case::top_left},
    {.name = "wl", .integer = &Case::wl, .low = -1, .high = kAny},
    {.name = "wr", .integer = &Case::wr, .low = -1, .high = kAny},
    {.name = "causal_seqs", .integer = &Case::causal_seqs},
    {.name = "first_q", .integer = &Case::first_q, .high = kAny},
    {.name = "first_k", .integer = &Case::first_k, .high = kAny},
    {.name = "after_q", .integer = &Case::after_q, .high = kAny},
    {.name = "after_k", .integer = &Case::after_k, .high = kAny},
    {.name = "first_kv", .integer = &Case::first_kv, .high = 1000},
    {.name = "first_b", .integer = &Case::first_b, .high = 1000},
    {.name = "places", .integer = &Case::places},
    {.name = "tree", .integer = &Case::tree, .high = 1024},
    {.name = "prefix", .integer = &Case::prefix, .high = kAny},
    {.name = "mask", .integer = &Case::mask, .words = kSpans},
    {.name = "block_mask", .integer = &Case::block_mask, .words = kSpans},
    {.name = "block_q", .integer = &Case::block_q, .low = 1, .high = kAny},
    {.name = "block_k", .integer = &Case::block_k, .low = 1, .high = kAny},
    {.name = "bias", .integer = &Case::bias, .words = kSpans},
    {.name = "bias_f32", .integer = &Case::bias_f32},
    {.name = "d_bias", .integer = &Case::d_bias},
    {.name = "alibi", .integer = &Case::alibi, .words = kAlibi},
    {.name = "score_mod", .text = &Case::score_mod},
    {.name = "mask_mod", .text = &Case::mask_mod},
    {.name = "captured", .integer = &Case::captured, .words = kCaptured},
    {.name = "d_captured", .integer = &Case::d_captured},
    {.name = "lists", .integer = &Case::lists, .high = kAny},
    {.name = "softcap", .real = &Case::softcap},
    {.name = "dropout", .real = &Case::dropout},
    {.name = "scale", .real = &Case::scale},
    {.name = "state", .integer = &Case::state},
    {.name = "sink", .integer = &Case::sink, .high = 2},
    {.name = "d_sink", .integer = &Case::d_sink},
    {.name = "lse", .integer = &Case::lse},
    {.name = "d_lse", .integer = &Case::d_lse},
    {.name = "low", .integer = &Case::low},
    {.name = "invariant", .integer = &Case::invariant},
    {.name = "deterministic", .integer = &Case::deterministic},
    {.name = "cores", .integer = &Case::cores, .low = 1, .high = 1024},
    {.name = "data", .integer = &Case::data, .words = kData},
    {.name = "seed", .integer = &Case::seed, .high = kAny},
};

bool is_quote(char c) { return c == '"' || c == '\''; }

// Where the word at the start of `text` ends: a text in quotation marks may have spaces.
size_t word_length(std::string_view text) {
  char quote = 0;
  for (size_t n = 0; n < text.size(); ++n) {
    if (quote ? text[n] == quote : is_quote(text[n])) {
      quote = quote ? char{0} : text[n];
    } else if (!quote && text[n] == ' ') {
      return n;
    }
  }
  return text.size();
}

std::string value_text(const Field& field, const Case& c) {
  if (field.text) return '"' + c.*field.text + '"';
  if (field.real) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", c.*field.real);
    return text;
  }
  for (const Word& word : field.words)
    if (word.value == c.*field.integer) return word.text;
  return std::to_string(c.*field.integer);
}

bool parse_value(const Field& field, std::string_view text, Case& c) {
  if (field.text) {
    const bool quoted = text.size() >= 2 && text.front() == text.back() && is_quote(text.front());
    c.*field.text = quoted ? text.substr(1, text.size() - 2) : text;
    return quoted;
  }
  if (field.real) {
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), c.*field.real);
    return code == std::errc() && end == text.data() + text.size() && !std::isnan(c.*field.real);
  }
  if (!field.words.empty()) {
    for (const Word& word : field.words)
      if (word.text == text) return c.*field.integer = word.value, true;
    return false;
  }
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), c.*field.integer);
  return code == std::errc() && end == text.data() + text.size() && c.*field.integer >= field.low &&
         c.*field.integer <= field.high;
}

}  // namespace

bool holds_nonfinite(const Case& c) {
  for (const Data data : {kNanQuery, kNanKey, kInfKey, kInfValue, kNanOnce, kInfOnce, kNanValue, kNanDO})
    if (c.data == data) return true;
  return false;
}

int32_t kv_dtype(const Case& c) { return static_cast<int32_t>(c.kv < 0 ? c.dtype : c.kv); }

bool has_program(const Case& c) { return !c.score_mod.empty() || !c.mask_mod.empty(); }

bool has_8bit(const Case& c) { return tessera_dtype_bytes(kv_dtype(c)) == 1; }

int32_t o_dtype(const Case& c) {
  return tessera_dtype_bytes(static_cast<int32_t>(c.dtype)) == 1 ? TESSERA_BFLOAT16 : static_cast<int32_t>(c.dtype);
}

namespace {

// What fwd_sm90_fp8 supports.
bool fits_fp8_kernel(const Case& c) {
  constexpr int64_t kMostHeadDim = 256, kColumns = 16;
  const bool dims = std::max(c.d, c.dv) <= kMostHeadDim && c.d % kColumns == 0 && c.dv % kColumns == 0;
  const bool layout = c.k_form != kPaged && c.gap == 0 && !c.reversed && !c.shared_kv && c.sk > 0;
  const bool tensors =
      !c.places && c.bias == kAbsent && c.mask == kAbsent && c.block_mask == kAbsent && !c.prefix && !has_program(c);
  return c.dtype == TESSERA_FLOAT8_E4M3 && dims && layout && tensors && c.dropout == 0;
}

// What fwd_sm80 supports of an 8-bit cache.
bool fits_cache_of_codes(const Case& c) {
  const int64_t kv = kv_dtype(c);
  return (kv == TESSERA_FLOAT8_E4M3 || kv == TESSERA_FLOAT8_E5M2) && kv != c.dtype && !c.prefix;
}

}  // namespace

bool served_by_gpu(const Case& c, tessera_direction direction, int32_t arch) {
  constexpr int64_t kMostBackwardHeadDim = 512;
  constexpr int32_t kHopper = 90;
  const bool codes = fits_cache_of_codes(c) || (arch == kHopper && fits_fp8_kernel(c));
  if ((c.places && c.causal_seqs) || (has_8bit(c) && !codes)) return false;
  return direction == TESSERA_FORWARD || (c.d <= kMostBackwardHeadDim && !c.causal_seqs);
}

bool served_by_gpu(const Case& c, int32_t arch) {
  return served_by_gpu(c, c.backward ? TESSERA_BACKWARD : TESSERA_FORWARD, arch);
}

std::string to_text(const Case& c) {
  const Case standard;
  std::string text;
  for (const Field& field : kFields) {
    const std::string value = value_text(field, c);
    if (!field.always && value == value_text(field, standard)) continue;
    text += (text.empty() ? "" : " ") + std::string(field.name) + "=" + value;
  }
  return text;
}

std::optional<Case> parse_case(std::string_view text, std::string* error) {
  Case c;
  while (true) {
    const size_t start = text.find_first_not_of(' ');
    if (start == std::string_view::npos) return c;
    text.remove_prefix(start);
    const std::string_view word = text.substr(0, word_length(text));
    text.remove_prefix(word.size());
    const std::string_view name = word.substr(0, word.find('='));
    const Field* field = std::ranges::find(kFields, name, [](const Field& f) { return std::string_view(f.name); });
    if (field == std::end(kFields) || name.size() == word.size() ||
        !parse_value(*field, word.substr(name.size() + 1), c)) {
      if (error) *error = "'" + std::string(word) + "' is no field of a case, or not a value it takes";
      return std::nullopt;
    }
  }
}

std::vector<Case> simpler_cases(const Case& c) {
  std::vector<Case> simpler;
  const Case standard;
  const auto offer = [&](Case candidate) {
    candidate = legalised(candidate);
    if (!(candidate == c)) simpler.push_back(candidate);
  };
  for (const Field& field : kFields) {
    Case candidate = c;
    if (field.real) {
      candidate.*field.real = standard.*field.real;
      offer(candidate);
    } else if (field.text) {
      (candidate.*field.text).clear();
      offer(candidate);
    } else if (field.always && field.words.empty()) {
      // Sizes: the smallest, a half, one less.
      for (const int64_t value : {field.low, c.*field.integer / 2, c.*field.integer - 1}) {
        candidate.*field.integer = std::max(value, field.low);
        if (candidate.*field.integer < c.*field.integer) offer(candidate);
      }
    } else if (&(c.*field.integer) != &c.seed && &(c.*field.integer) != &c.backward) {
      candidate.*field.integer = standard.*field.integer;
      offer(candidate);
    }
  }
  return simpler;
}

Case legalised(Case c) {
  if (c.dtype != TESSERA_FLOAT16 && c.dtype != TESSERA_BFLOAT16) c.kv = -1;
  if (has_8bit(c)) {
    c.backward = c.prefix = 0;
    if (c.shared_kv) c.scales = std::min<int64_t>(c.scales, kScalesHead);
    if (c.data == kHuge) c.data = kNormal;
    if (kv_dtype(c) != TESSERA_FLOAT8_E5M2) {  // there are no infinities
      if (c.data == kInfKey) c.data = kNanKey;
      if (c.data == kInfValue) c.data = kNanValue;
      if (c.data == kInfOnce) c.data = kNanOnce;
    }
    if (kv_dtype(c) == TESSERA_INT8 && holds_nonfinite(c)) c.data = kNormal;
  } else {
    c.scales = kNoScales;
  }
  c.hkv = std::max<int64_t>(1, std::min(c.hkv, c.hq));
  while (c.hq % c.hkv != 0) --c.hkv;
  if (c.q_form == kPaged) c.q_form = kPacked;
  // A batch of packed keys with dense queries, and the reverse, are both fine; paged keys have their own lengths.
  if (c.k_form == kPaged) c.used = 1;
  if (c.k_form != kPaged) c.csr = 0;
  if (c.k_form != kDense) c.shared_kv = 0;
  // Paged caches are for inference: gradients of a page that two sequences share are undefined.
  if (c.k_form == kPaged) c.backward = 0;
  // A packed problem states its longest sequence, since the shapes of bias and masks depend on it.
  if (c.q_form == kPacked) c.sq = std::max<int64_t>(c.sq, 1);
  if (c.q_form != kPacked) c.few = 0;
  if (c.q_form != kPacked && c.k_form != kPacked) c.lead = Case{}.lead, c.tail = Case{}.tail;
  if (c.k_form != kDense) c.sk = std::max<int64_t>(c.sk, 1);
  if (c.causal_seqs) c.causal = 0;
  if (c.backward) c.tree = c.prefix = 0;
  if (c.tree || c.prefix) c.first_q = c.first_k = c.after_q = c.after_k = c.first_kv = c.first_b = c.places = 0;
  if (c.dropout > 0) c.first_k = c.first_k / 32 * 32;
  if (c.prefix) {  // options that depend on a query's place or on the sequence alone; rows that are those of one
    c.wl = c.wr = -1, c.top_left = c.alibi = c.invariant = c.reversed = c.shared_kv = 0, c.dropout = 0;
    c.bias = c.mask = c.block_mask = kAbsent;
    if (c.q_form != kPacked) c.order = kBshd;
    if (c.k_form == kDense && c.order == kSbhd) c.order = kBhsd;
  }
  const auto program_mentions = [&c](const char* name) {
    return mentions(c.score_mod, name) || mentions(c.mask_mod, name);
  };
  if (has_program(c)) {
    // Where scores have few digits left, or overflow float32, so do a program's results.
    for (const Data data : {kGrowing, kFalling, kHuge, kHugeBias, kShared})
      if (c.data == data) c.data = kNormal;
    for (const char* place : {"b", "i", "j", "q_pos", "len_q", "len_k"}) {
      if (c.prefix && program_mentions(place)) c.score_mod.clear(), c.mask_mod.clear();
    }
    // A tensor of all pairs would be one of all pairs of the whole.
    if (program_mentions("dense")) c.first_q = c.first_k = c.after_q = c.after_k = c.places = 0;
  } else {
    c.captured = TESSERA_FLOAT32;
  }
  if (c.score_mod.empty()) c.d_captured = 0;
  if (c.mask_mod.empty()) c.lists = 0;
  if (c.block_mask != kAbsent) c.block_mask |= kSpanQ;
  if (c.bias == kAbsent) c.d_bias = c.bias_f32 = 0;
  if (!c.sink) c.d_sink = 0;
  if (c.backward) c.lse = 1;
  if (!c.lse) c.low = 0;
  if (c.shared_kv) c.used = 0;
  // The oracle leaves out keys of weight 0, which an infinity causes; a kernel multiplies them.
  if (c.data == kHuge || c.data == kInfKey || c.data == kInfBias || c.data == kInfOnce) c.backward = 0;
  if ((c.data == kInfBias || c.data == kHugeBias) && c.bias == kAbsent) c.data = kNormal;
  // Whether dropout turns a NaN weight into 0 is not promised either.
  if (holds_nonfinite(c)) c.dropout = 0;
  // Inf in a value that a query sees with weight 0 is a NaN in any product of P and V: none is that small without
  // ALiBi.
  if (c.data == kInfValue) c.alibi = 0;
  if (!c.backward) c.d_bias = c.d_sink = c.d_lse = c.d_captured = c.deterministic = 0;
  return c;
}

}  // namespace tessera::testing
