#include "inputs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include "core/score/definitions.hpp"
#include "core/score/parse.hpp"
#include "numbers.hpp"

namespace tessera::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kUnusedPages = 2;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Draw {
 public:
  explicit Draw(int64_t seed) : engine_(static_cast<uint64_t>(seed)) {}
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(2 * M_PI * uniform()); }
  int64_t up_to(int64_t largest) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(largest + 1)); }
  // 0 and the largest are frequent, since they break most often.
  int64_t length(int64_t largest) {
    const int64_t kind = up_to(4);
    return kind == 0 ? 0 : kind == 1 ? largest : up_to(largest);
  }

 private:
  std::mt19937_64 engine_;
};

// First rows and lengths of b sequences, the first of the full length, the others of at most `others`.
int64_t draw_lengths(Draw& draw, const Case& c, bool packed, int64_t length, int64_t others,
                     std::vector<int64_t>& begin, std::vector<int64_t>& lengths) {
  int64_t rows = packed ? c.lead : 0;
  for (int64_t n = 0; n < c.b; ++n) {
    begin.push_back(rows);
    lengths.push_back(packed && n > 0 ? draw.length(others) : length);
    rows += lengths.back();
  }
  return rows + (packed ? c.tail : 0);
}

// body(reader, b, keys) for the sequences that have the first `keys` keys of sequence `reader`.
template <class Body>
void for_each_sharing(const Inputs& in, const Body& body) {
  for (size_t g = 0; g < in.prefix_lens.size(); ++g) {
    int64_t reader = -1;
    for (auto b = static_cast<int64_t>(in.prefix_groups[g]); b < static_cast<int64_t>(in.prefix_groups[g + 1]); ++b) {
      if (in.sq[b] == 0) continue;  // its keys are arbitrary
      if (reader < 0) reader = b;
      body(reader, b, static_cast<int64_t>(in.prefix_lens[g]));
    }
  }
}

// Groups of consecutive sequences, some of none and some of one, and sequences of no group before and after them.
void draw_prefixes(Draw& draw, Inputs& in) {
  const Case& c = in.c;
  int64_t last = draw.up_to(2) == 0 ? draw.up_to(c.b) : 0;
  in.prefix_groups = {static_cast<double>(last)};
  do {
    const int64_t begin = last;
    last += draw.length(c.b - begin);
    int64_t keys = draw.length(c.prefix);
    for (int64_t b = begin; b < last; ++b) {
      if (in.sq[b] > 0) keys = std::min(keys, in.k_rows[b]);
    }
    in.prefix_groups.push_back(static_cast<double>(last));
    in.prefix_lens.push_back(static_cast<double>(keys));
  } while (draw.up_to(3) > 0);
  for_each_sharing(in, [&](int64_t, int64_t b, int64_t keys) { in.sk[b] = std::max(in.sk[b], keys); });
}

// The shared keys and values, if they are not in the same pages.
void copy_prefixes(Inputs& in) {
  const Case& c = in.c;
  const auto copy = [&](std::vector<double>& rows, int64_t from, int64_t to, int64_t width) {
    std::copy_n(rows.begin() + from * width, width, rows.begin() + to * width);
  };
  for_each_sharing(in, [&](int64_t reader, int64_t b, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      copy(in.k, in.k_row(reader, j), in.k_row(b, j), c.hkv * c.d);
      copy(in.v, in.k_row(reader, j), in.k_row(b, j), c.hkv * c.dv);
    }
  });
}

// Gives every sequence pages of a pool in random order.
void draw_pages(Draw& draw, Inputs& in) {
  const Case& c = in.c;
  in.max_pages = ceil_div(c.sk, c.page) + 1;
  in.pages = kUnusedPages;
  for (const int64_t sk : in.sk) in.pages += ceil_div(sk, c.page);
  std::vector<int64_t> pool(in.pages);
  std::iota(pool.begin(), pool.end(), 0);
  for (size_t n = pool.size() - 1; n > 0; --n) std::swap(pool[n], pool[draw.up_to(static_cast<int64_t>(n))]);
  in.page_table.assign(c.b * in.max_pages, -1);
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t n = 0; n < ceil_div(in.sk[b], c.page); ++n) {
      in.page_table[b * in.max_pages + n] = static_cast<double>(pool.back());
      pool.pop_back();
    }
  }
  for_each_sharing(in, [&](int64_t reader, int64_t b, int64_t keys) {
    std::copy_n(&in.page_table[reader * in.max_pages], keys / c.page, &in.page_table[b * in.max_pages]);
  });
  in.rows_k = in.pages * c.page;
  // Some unused pages are between the sequences' pages; a last sequence without pages has none after it.
  in.page_indices.assign(1, -1);
  for (int64_t b = 0; b < c.b; ++b) {
    in.page_indptr.push_back(static_cast<double>(in.page_indices.size()));
    const auto row = in.page_table.begin() + b * in.max_pages;
    in.page_indices.insert(in.page_indices.end(), row, row + ceil_div(in.sk[b], c.page) + b % 2);
  }
  in.page_indptr.push_back(static_cast<double>(in.page_indices.size()));
}

double draw_value(Draw& draw, const Case& c) {
  double value = draw.normal();
  if (c.data == kOutlier && draw.uniform() < 0.001) value += 10 * draw.normal();
  if (c.data == kHuge) value *= c.dtype == TESSERA_FLOAT16 ? 1e4 : 1e15;
  return round_to(static_cast<int32_t>(c.dtype), value);
}

void draw_row(Draw& draw, const Case& c, double factor, double* row, int64_t count) {
  for (int64_t n = 0; n < count; ++n) row[n] = round_to(static_cast<int32_t>(c.dtype), draw_value(draw, c) * factor);
}

// A scale of normally distributed values that uses most of the format's range.
double scale_of(Draw& draw, int32_t dtype) {
  const double largest = dtype == TESSERA_INT8 ? 30 : 100;
  return round_to(TESSERA_FLOAT32, std::exp2(2 * draw.uniform() - 1) / largest);
}
constexpr int64_t kScaleBlock = 128;  // tokens

// Of queries, and of what all keys of a sequence have in common: scores of some thousands.
constexpr double kSharedLength = 30;
// By how much keys differ from it, so that a dtype holds the difference.
double difference_of(const Case& c) { return c.dtype == TESSERA_BFLOAT16 ? 0.25 : 0.03; }

// Of a key's length over four orders of magnitude.
double growth_of(const Case& c, int64_t key) {
  const double share = static_cast<double>(key) / static_cast<double>(c.sk);
  if (c.data == kGrowing) return std::pow(10, 4 * share - 2);
  return c.data == kFalling ? std::pow(10, 2 - 4 * share) : 1;
}

void clear_rows(Inputs& in) {
  const Case& c = in.c;
  in.q.assign(in.rows_q * c.hq * c.d, kNaN);
  in.d_o.assign(in.rows_q * c.hq * c.dv, kNaN);
  in.k.assign(in.rows_k * c.hkv * c.d, kNaN);
  in.v.assign(in.rows_k * c.hkv * c.dv, kNaN);
}

void draw_rows(Draw& draw, Inputs& in) {
  const Case& c = in.c;
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t i = 0; i < in.sq[b]; ++i) {
      double* q = &in.q[in.q_row(b, i) * c.hq * c.d];
      draw_row(draw, c, c.data == kShared ? kSharedLength : 1, q, c.hq * c.d);
      double* d_o = &in.d_o[in.q_row(b, i) * c.hq * c.dv];
      draw_row(draw, c, 1, d_o, c.hq * c.dv);
      if (c.data == kNanDO && draw.uniform() < 0.05) d_o[draw.up_to(c.hq * c.dv - 1)] = kNaN;
      if (c.data == kNanQuery && draw.uniform() < 0.1) q[draw.up_to(c.hq * c.d - 1)] = kNaN;
    }
    std::vector<double> shared(c.data == kShared ? c.hkv * c.d : 0);
    for (double& value : shared) value = kSharedLength * draw.normal();
    for (int64_t j = 0; j < in.sk[b]; ++j) {
      double* k = &in.k[in.k_row(b, j) * c.hkv * c.d];
      double* v = &in.v[in.k_row(b, j) * c.hkv * c.dv];
      const double growth = growth_of(c, j);
      draw_row(draw, c, growth, k, c.hkv * c.d);
      for (size_t n = 0; n < shared.size(); ++n) {
        k[n] = round_to(static_cast<int32_t>(c.dtype), shared[n] + difference_of(c) * k[n]);
      }
      draw_row(draw, c, 1, v, c.hkv * c.dv);
      if (j == in.sk[b] / 3 && c.data == kNanOnce) k[draw.up_to(c.hkv * c.d - 1)] = kNaN;
      if (j == in.sk[b] / 3 && c.data == kInfOnce) k[draw.up_to(c.hkv * c.d - 1)] = kInfinity;
      if (c.data == kNanValue && (j == in.sk[b] * 2 / 3 || draw.uniform() < 0.01)) {
        v[draw.up_to(c.hkv * c.dv - 1)] = kNaN;
      }
      if (draw.uniform() > 0.1) continue;
      const double infinity = draw.uniform() < 0.5 ? -kInfinity : kInfinity;
      if (c.data == kNanKey) k[draw.up_to(c.hkv * c.d - 1)] = kNaN;
      if (c.data == kInfKey) k[draw.up_to(c.hkv * c.d - 1)] = infinity;
      if (c.data == kInfValue) v[draw.up_to(c.hkv * c.dv - 1)] = infinity;
    }
  }
  if (!c.shared_kv) return;
  for (int64_t b = 1; b < c.b; ++b) {
    std::copy_n(in.k.begin(), c.sk * c.hkv * c.d, in.k.begin() + b * c.sk * c.hkv * c.d);
    std::copy_n(in.v.begin(), c.sk * c.hkv * c.dv, in.v.begin() + b * c.sk * c.hkv * c.dv);
  }
}

std::vector<int64_t> span_shape(const Case& c, int64_t span, int64_t rows, int64_t columns) {
  return {span & kSpanB ? c.b : 1, span & kSpanH ? c.hq : 1, span & kSpanQ ? rows : 1, columns};
}

int64_t elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// A row of `columns` numbers, each of them finite.
void draw_huge_row(Draw& draw, int32_t dtype, double* row, int64_t columns) {
  const double largest = dtype == TESSERA_FLOAT16    ? 65504
                         : dtype == TESSERA_BFLOAT16 ? 0x1.fep127
                                                     : std::numeric_limits<float>::max();
  const auto of = [&](double value) { return round_to(dtype, std::clamp(value, -largest, largest)); };
  const double kinds[][3] = {{-largest, -largest, -largest},
                             {-largest, -0.75 * largest, -largest},
                             {-largest, 0, 0},
                             {-1e9, -1e9, -1e9},
                             {-1e4, -1e4, -1e4},
                             {1e30, 1e30, 1e30},
                             {largest, 0.75 * largest, 0},
                             {-1e30, -1e30, -2.6e38}};
  const auto& kind = kinds[draw.up_to(static_cast<int64_t>(std::size(kinds)) - 1)];
  for (int64_t n = 0; n < columns; ++n) {
    const double value = kind[draw.up_to(2)];
    row[n] = value == 0 ? round_to(dtype, draw.normal()) : of(value);
  }
}

void draw_score_tensors(Draw& draw, Inputs& in) {
  const Case& c = in.c;
  if (c.bias != kAbsent) {
    const int32_t dtype = c.bias_f32 ? static_cast<int32_t>(TESSERA_FLOAT32) : o_dtype(c);
    in.bias.resize(elements(span_shape(c, c.bias, c.sq, c.sk)));
    for (double& value : in.bias) {
      value = round_to(dtype, draw.normal());
      if (c.data == kInfBias && draw.uniform() < 0.3) value = -kInfinity;
    }
    for (size_t row = 0; c.data == kHugeBias && row < in.bias.size(); row += c.sk) {
      if (draw.up_to(4) > 0) draw_huge_row(draw, dtype, &in.bias[row], c.sk);
    }
    // Rows beyond every sequence's end are padding, too.
    const int64_t longest_k = in.sk.empty() ? 0 : *std::ranges::max_element(in.sk);
    for (size_t n = 0; n < in.bias.size(); ++n)
      if (static_cast<int64_t>(n) % c.sk >= longest_k) in.bias[n] = kNaN;
  }
  if (c.mask != kAbsent) {
    in.mask.resize(elements(span_shape(c, c.mask, c.sq, c.sk)));
    for (double& value : in.mask) value = draw.uniform() < 0.6;
    // A few queries that see nothing at all.
    if (c.sk > 0)
      for (size_t row = 0; row < in.mask.size() / c.sk; ++row)
        if (draw.uniform() < 0.05) std::fill_n(in.mask.begin() + row * c.sk, c.sk, 0.0);
  }
  if (c.block_mask != kAbsent) {
    const int64_t cols = ceil_div(c.sk, c.block_k);
    in.block_mask.resize(elements(span_shape(c, c.block_mask, ceil_div(c.sq, c.block_q), cols)));
    double share = 0.6;
    const double sparse = draw.uniform() < 0.5 ? 0.3 : 0.97;
    for (size_t n = 0; n < in.block_mask.size(); ++n) {
      // Some blocks of queries, or most, see little, and their neighbours hide long runs from others.
      if (n % static_cast<size_t>(cols) == 0) share = draw.uniform() < sparse ? 0.03 : 0.6;
      in.block_mask[n] = draw.uniform() < share;
    }
  }
  in.slopes.resize(c.alibi == 0 ? 0 : c.alibi == 1 ? c.hq : c.b * c.hq);
  for (double& value : in.slopes) {
    value = round_to(TESSERA_FLOAT32, std::exp2(-1 - 6 * draw.uniform()));
    if (draw.uniform() < 0.25) value = -value;  // what is far is preferred
  }
  in.sink.resize(c.sink ? c.hq : 0);
  for (double& value : in.sink) value = round_to(TESSERA_FLOAT32, draw.normal());
  constexpr double kFarSinks[] = {40, -40, 3000, -3e38};
  for (size_t h = 0; c.sink == 2 && h < in.sink.size(); ++h) {
    in.sink[h] =
        round_to(TESSERA_FLOAT32, in.sink[h] + kFarSinks[(h + static_cast<size_t>(c.seed)) % std::size(kFarSinks)]);
  }
}

// The program, and what it names in a world of the case's sizes.
void draw_program(Inputs& in) {
  const Case& c = in.c;
  if (!has_program(c)) return;
  const auto most = [](const std::vector<int64_t>& totals, int64_t one) {
    return totals.empty() ? one : std::max(one, *std::ranges::max_element(totals));
  };
  const int64_t heads = in.whole_heads();
  const World world(static_cast<uint64_t>(c.seed),
                    WorldSizes{.batch = c.first_b + c.b,
                               .heads = heads,
                               .heads_kv = heads * c.hkv / c.hq,
                               .len_q = most(in.total_q, c.sq),
                               .len_k = most(in.total_k, c.sk)},
                    c.score_mod + "\n" + c.mask_mod);
  core::score::Program program;
  const tessera_status status = core::score::parse(c.score_mod, c.mask_mod, world.names(), program);
  if (status.code != TESSERA_OK) throw std::invalid_argument(status.message);
  // A text may name what folding leaves unused; such tensors are bound, too, and their gradients are 0.
  for (const core::score::Name& name : world.names()) {
    std::vector<core::score::Name>& names = name.is_tensor ? program.tensors : program.scalars;
    const bool named = mentions(c.score_mod, name.text) || mentions(c.mask_mod, name.text);
    const bool known = std::ranges::count(names, name.text, &core::score::Name::text) > 0;
    if (named && !known) names.push_back(name);
  }
  const int32_t integers[] = {TESSERA_INT32, TESSERA_INT64, TESSERA_INT16};  // in the order of the three dtypes
  for (const core::score::Name& name : program.tensors) {
    const WorldTensor& from = world.tensors.at(name.text);
    const auto type = name.type == core::score::Type::kFloat ? static_cast<int32_t>(c.captured)
                      : name.type == core::score::Type::kInt ? integers[c.captured]
                                                             : static_cast<int32_t>(TESSERA_BOOL);
    CapturedTensor& tensor = in.captured.emplace_back(name.text, type, from.shape, from.data);
    for (double& value : tensor.values) value = round_to(type, value);
    // Stride 0 of the first axis: every row of it is the first one.
    if (!c.shared_kv || tensor.shape.size() < 2 || tensor.values.empty()) continue;
    const size_t row = tensor.values.size() / static_cast<size_t>(tensor.shape[0]);
    for (size_t n = row; n < tensor.values.size(); ++n) tensor.values[n] = tensor.values[n - row];
  }
  for (const core::score::Name& name : program.scalars) in.scalars.push_back(world.scalars.at(name.text));
  in.program = std::make_shared<const core::score::Program>(std::move(program));
}

std::shared_ptr<tessera_program> make_program(const Inputs& in) {
  std::vector<tessera_program_name> names;
  for (const core::score::Name& name : in.program->tensors) {
    names.push_back({name.text.c_str(), static_cast<int32_t>(name.type), name.rank});
  }
  for (const core::score::Name& name : in.program->scalars) {
    names.push_back({name.text.c_str(), static_cast<int32_t>(name.type), TESSERA_SCALAR_RANK});
  }
  tessera_program* program = nullptr;
  const tessera_status status = tessera_program_create(in.c.score_mod.c_str(), in.c.mask_mod.c_str(), names.data(),
                                                       static_cast<int32_t>(names.size()), &program);
  if (status.code != TESSERA_OK) throw std::invalid_argument(status.message);
  return {program, tessera_program_release};
}

// Replaces the values of 8-bit q, k and v by what their codes and scales say.
void quantize(Inputs& in) {
  const Case& c = in.c;
  if (!has_8bit(c)) return;
  Draw draw(c.seed + 1);
  const auto draw_scales = [&](bool of_q, std::vector<double>& scales, int32_t dtype) {
    if (c.scales == kNoScales) return;
    scales.assign(elements(in.scale_shape(of_q)), kNaN);
    if (c.scales == kScalesFine) return;  // drawn where tokens are
    for (double& scale : scales) scale = scale_of(draw, dtype);
  };
  const auto kv = kv_dtype(c), of_q = static_cast<int32_t>(c.dtype);
  const bool queries = tessera_dtype_bytes(of_q) == 1;
  if (queries) draw_scales(true, in.q_scales, of_q);
  draw_scales(false, in.k_scales, kv), draw_scales(false, in.v_scales, kv);
  const auto convert = [&](std::vector<double>& values, std::vector<double>& codes, std::vector<double>& scales,
                           int32_t dtype, int64_t heads, int64_t width, bool is_q) {
    codes.assign(values.size(), kNaN);
    for (int64_t b = 0; b < c.b; ++b) {
      for (int64_t token = 0; token < (is_q ? in.sq[b] : in.sk[b]); ++token) {
        const int64_t row = is_q ? in.q_row(b, token) : in.k_row(b, token);
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t head = h * c.hkv / heads;
          double scale = 1;
          if (c.scales == kScalesOne) scale = scales[0];
          if (c.scales == kScalesHead) scale = scales[head];
          if (c.scales == kScalesBatch) scale = scales[b * c.hkv + head];
          if (c.scales == kScalesFine) {
            const bool in_pages = !is_q && c.k_form == kPaged;
            const int64_t blocks = in.scale_shape(is_q)[1];
            double& own = scales[(in_pages ? row : b * blocks + token / kScaleBlock) * c.hkv + head];
            if (std::isnan(own)) own = scale_of(draw, dtype);
            scale = own;
          }
          for (int64_t x = 0; x < width; ++x) {
            const int64_t at = (row * heads + h) * width + x;
            codes[at] = round_to(dtype, values[at] / scale);
            values[at] = codes[at] * scale;
          }
        }
      }
    }
  };
  if (queries) convert(in.q, in.q_codes, in.q_scales, of_q, c.hq, c.d, true);
  convert(in.k, in.k_codes, in.k_scales, kv, c.hkv, c.d, false);
  convert(in.v, in.v_codes, in.v_scales, kv, c.hkv, c.dv, false);
}

std::vector<double> cumulative(int64_t first, const std::vector<int64_t>& lengths) {
  std::vector<double> sums{static_cast<double>(first)};
  for (const int64_t length : lengths) sums.push_back(sums.back() + static_cast<double>(length));
  return sums;
}

Tensor filled(int32_t dtype, std::vector<int64_t> shape, const Placement& placement,
              const std::vector<double>& values) {
  Tensor tensor(dtype, std::move(shape), placement);
  tensor.store(values);
  return tensor;
}

Call make_call(const Inputs& in, int32_t dtype, bool regular) {
  const Case& c = in.c;
  Call call;
  tessera_problem& problem = call.problem;
  tessera_problem_init(&problem);

  const bool packed_q = c.q_form == kPacked, packed_k = c.k_form == kPacked, paged = c.k_form == kPaged;
  Placement rows_q, rows_k, out_q, out_k, scores, lse;
  if (!regular) {
    const std::vector<int> orders[] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {1, 0, 2, 3}};
    const std::vector<int> heads_first = {1, 0, 2};
    rows_q.gap = rows_k.gap = c.gap;
    rows_q.order = packed_q ? (c.order == kBhsd ? heads_first : std::vector<int>{}) : orders[c.order];
    rows_k.order = packed_k ? (c.order == kBhsd ? heads_first : std::vector<int>{}) : orders[c.order];
    out_q = rows_q;
    out_k = rows_k;
    if (c.reversed) {
      rows_q.reversed_dim = packed_q ? 0 : 1;
      rows_k.reversed_dim = packed_k ? 0 : 1;
    }
    if (c.shared_kv) rows_k.repeated_dim = 0;
    if (c.order != kBshd) lse.order = packed_q ? std::vector<int>{1, 0} : std::vector<int>{0, 2, 1};
    if (c.gap) scores.order = {0, 1, 3, 2};
    scores.gap = lse.gap = c.gap;
  }

  const auto shape_q = [&](int64_t dim) {
    return packed_q ? std::vector<int64_t>{in.rows_q, c.hq, dim} : std::vector<int64_t>{c.b, c.sq, c.hq, dim};
  };
  const auto shape_k = [&](int64_t dim) {
    return packed_k ? std::vector<int64_t>{in.rows_k, c.hkv, dim}
           : paged  ? std::vector<int64_t>{in.pages, c.page, c.hkv, dim}
                    : std::vector<int64_t>{c.b, c.sk, c.hkv, dim};
  };
  const std::vector<int64_t> shape_lse =
      packed_q ? std::vector<int64_t>{c.hq, in.rows_q} : std::vector<int64_t>{c.b, c.hq, c.sq};

  const int32_t of_kv = regular ? dtype : kv_dtype(c), of_o = regular ? dtype : o_dtype(c);
  const auto codes_of = [&](const std::vector<double>& codes, const std::vector<double>& values) {
    return regular || codes.empty() ? values : codes;
  };
  call.q = filled(dtype, shape_q(c.d), rows_q, codes_of(in.q_codes, in.q));
  call.k = filled(of_kv, shape_k(c.d), rows_k, codes_of(in.k_codes, in.k));
  call.v = filled(of_kv, shape_k(c.dv), rows_k, codes_of(in.v_codes, in.v));
  call.o = Tensor(of_o, shape_q(c.dv), out_q);
  if (!regular && c.scales != kNoScales) {
    const auto scales = [&](bool of_q, const std::vector<double>& values) {
      const std::vector<int64_t> shape = in.scale_shape(of_q);
      Placement placement;
      if (c.gap && shape.size() == 3) placement.order = {1, 2, 0};
      return filled(TESSERA_FLOAT32, shape, placement, values);
    };
    if (!in.q_scales.empty()) call.q_descale = scales(true, in.q_scales);
    call.k_descale = scales(false, in.k_scales), call.v_descale = scales(false, in.v_scales);
  }
  if (c.lse || regular) call.lse = Tensor(TESSERA_FLOAT32, shape_lse, lse);
  if (c.low) call.lse_low = Tensor(TESSERA_FLOAT32, shape_lse, lse);
  if (packed_q) call.cu_seqlens_q = filled(TESSERA_INT32, {c.b + 1}, {}, cumulative(c.lead, in.sq));
  if (packed_k) call.cu_seqlens_k = filled(TESSERA_INT32, {c.b + 1}, {}, cumulative(c.lead, in.k_rows));
  if (c.used) call.seqused_k = filled(TESSERA_INT32, {c.b}, {}, {in.sk.begin(), in.sk.end()});
  if (paged && !(c.csr && !regular)) {
    call.page_table = filled(TESSERA_INT32, {c.b, in.max_pages}, {}, in.page_table);
  } else if (paged) {
    call.page_indptr = filled(TESSERA_INT32, {c.b + 1}, {}, in.page_indptr);
    call.page_indices = filled(TESSERA_INT32, {static_cast<int64_t>(in.page_indices.size())}, {}, in.page_indices);
  }
  if (c.bias != kAbsent) {
    const auto bias_dtype = c.bias_f32 && !regular ? static_cast<int32_t>(TESSERA_FLOAT32) : of_o;
    call.bias = filled(bias_dtype, span_shape(c, c.bias, c.sq, c.sk), scores, in.bias);
  }
  if (c.mask != kAbsent) call.mask = filled(TESSERA_BOOL, span_shape(c, c.mask, c.sq, c.sk), scores, in.mask);
  if (c.block_mask != kAbsent) {
    const auto shape = span_shape(c, c.block_mask, ceil_div(c.sq, c.block_q), ceil_div(c.sk, c.block_k));
    call.block_mask = filled(TESSERA_BOOL, shape, scores, in.block_mask);
    problem.mask_block_q = c.block_q;
    problem.mask_block_k = c.block_k;
  }
  if (c.alibi) {
    const std::vector<int64_t> shape = c.alibi == 1 ? std::vector<int64_t>{c.hq} : std::vector<int64_t>{c.b, c.hq};
    call.slopes = filled(TESSERA_FLOAT32, shape, {}, in.slopes);
  }
  if (c.sink) call.sink = filled(TESSERA_FLOAT32, {c.hq}, {}, in.sink);
  if (c.causal_seqs) call.causal_seqs = filled(TESSERA_BOOL, {c.b}, {}, in.causal_seqs);

  if (c.tree) {
    const auto shape = packed_q ? std::vector<int64_t>{in.rows_q, c.tree} : std::vector<int64_t>{c.b, c.sq, c.tree};
    Placement placement;
    if (!regular && c.gap) placement.order = packed_q ? std::vector<int>{1, 0} : std::vector<int>{2, 0, 1};
    call.tree = filled(TESSERA_INT32, shape, placement, in.tree);
  }

  // The oracle computes the call without them.
  if (c.prefix && !regular) {
    const auto groups = static_cast<int64_t>(in.prefix_lens.size());
    call.prefix_groups = filled(TESSERA_INT32, {groups + 1}, {}, in.prefix_groups);
    call.prefix_lens = filled(TESSERA_INT32, {groups}, {}, in.prefix_lens);
    if (c.seed % 3 == 0) problem.max_prefix_k = c.prefix / 2;
  }

  if (in.program) {
    call.program = make_program(in);
    call.scalars = in.scalars;
    problem.list_capacity = c.lists;
  }
  for (const CapturedTensor& tensor : in.captured) {
    const std::vector<int64_t> shape = tensor.shape.empty() ? std::vector<int64_t>{1} : tensor.shape;
    Placement placement, of_gradient;
    if (!regular) {
      const bool repeats = c.shared_kv && shape.size() > 1;
      for (int axis = static_cast<int>(shape.size()); c.gap && axis-- > 0;) placement.order.push_back(axis);
      placement.gap = of_gradient.gap = c.gap;
      if (repeats) placement.repeated_dim = 0;
      if (c.reversed) placement.reversed_dim = static_cast<int>(shape.size()) - 1;
    }
    const auto type = regular && tensor.is_float() ? static_cast<int32_t>(TESSERA_FLOAT64) : tensor.dtype;
    call.captured_names.push_back("d_captured." + tensor.name);
    call.captured.push_back(filled(type, shape, placement, tensor.values));
    const bool wanted = c.d_captured && tensor.is_float();
    call.d_captured.push_back(wanted ? Tensor(regular ? type : gradient_dtype(c, tensor), shape, of_gradient)
                                     : Tensor());
  }

  if (c.backward) {
    call.d_o = filled(dtype, shape_q(c.dv), rows_q, in.d_o);
    call.d_q = Tensor(dtype, shape_q(c.d), out_q);
    call.d_k = Tensor(dtype, shape_k(c.d), out_k);
    call.d_v = Tensor(dtype, shape_k(c.dv), out_k);
    if (c.d_lse) call.d_lse = filled(TESSERA_FLOAT32, shape_lse, lse, in.d_lse);
    if (c.d_bias) {
      Placement placement;
      placement.gap = regular ? 0 : c.gap;
      call.d_bias = Tensor(TESSERA_FLOAT32, span_shape(c, c.bias, c.sq, c.sk), placement);
    }
    if (c.d_sink) call.d_sink = Tensor(TESSERA_FLOAT32, {c.hq});
  }

  problem.has_scale = c.scale != kDefaultScale;
  problem.scale = problem.has_scale ? c.scale : 0;
  problem.causal = static_cast<int32_t>(c.causal);
  problem.alignment = c.top_left ? TESSERA_TOP_LEFT : TESSERA_BOTTOM_RIGHT;
  problem.window_left = c.wl;
  problem.window_right = c.wr;
  problem.softcap = c.softcap;
  if (c.places) {
    std::vector<double> rows;
    for (int64_t b = 0; b < c.b; ++b) {
      for (const auto* numbers : {&in.first_q, &in.total_q, &in.first_k, &in.total_k}) {
        rows.push_back(static_cast<double>((*numbers)[b]));
      }
    }
    Placement placement;
    if (!regular && c.gap) placement.order = {1, 0};
    call.places = filled(TESSERA_INT32, {c.b, 4}, placement, rows);
  } else if (in.has_place()) {
    problem.first_q = c.first_q, problem.total_q = c.first_q + c.sq + c.after_q;
    problem.first_k = c.first_k, problem.total_k = c.first_k + c.sk + c.after_k;
  }
  if (c.first_kv > 0) problem.first_head = in.first_head(), problem.total_heads = in.whole_heads();
  problem.first_sequence = c.first_b;
  problem.dropout_p = c.dropout;
  problem.dropout_seed = 0x9E3779B97F4A7C15u * static_cast<uint64_t>(c.seed);
  problem.dropout_offset = 0x100000007u * static_cast<uint64_t>(c.seed);
  if (c.state && !regular) {
    call.dropout_state = Tensor(TESSERA_INT64, {2}, {.order = {}, .gap = 1, .reversed_dim = 0, .repeated_dim = -1});
    const int64_t stride = call.dropout_state.layout().strides[0];
    auto* state = call.dropout_state.data_as<int64_t>();
    state[0] = static_cast<int64_t>(problem.dropout_seed), state[stride] = static_cast<int64_t>(problem.dropout_offset);
    problem.dropout_seed = problem.dropout_offset = 0;
  }
  if (packed_q) problem.max_seqlen_q = c.sq;
  if (packed_k || paged) problem.max_seqlen_k = c.sk;
  problem.deterministic = static_cast<int32_t>(c.deterministic);
  problem.batch_invariant = static_cast<int32_t>(c.invariant);
  call.describe();
  return call;
}

}  // namespace

std::vector<int64_t> Inputs::scale_shape(bool of_q) const {
  if (c.scales == kScalesOne) return {1};
  if (c.scales == kScalesHead) return {c.hkv};
  if (c.scales == kScalesBatch) return {c.b, c.hkv};
  if (!of_q && c.k_form == kPaged) return {pages, c.page, c.hkv};
  return {c.b, ceil_div(of_q ? c.sq : c.sk, kScaleBlock), c.hkv};
}

double Inputs::scale() const { return c.scale == kDefaultScale ? 1 / std::sqrt(static_cast<double>(c.d)) : c.scale; }

int64_t Inputs::q_row(int64_t b, int64_t i) const { return q_begin[b] + i; }

int64_t Inputs::k_row(int64_t b, int64_t j) const {
  if (c.k_form != kPaged) return k_begin[b] + j;
  return static_cast<int64_t>(page_table[b * max_pages + j / c.page]) * c.page + j % c.page;
}

core::score::Inputs Inputs::pair(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const int64_t q_pos = i + first_q[b] + total_k[b] - total_q[b];
  const int64_t head = h + first_head();
  return {.b = b + c.first_b,
          .h = head,
          .h_kv = head * c.hkv / c.hq,
          .i = i + first_q[b],
          .j = j + first_k[b],
          .q_pos = q_pos,
          .len_q = total_q[b],
          .len_k = total_k[b]};
}

size_t Inputs::lse_index(int64_t b, int64_t h, int64_t i) const {
  return c.q_form == kPacked ? h * rows_q + q_row(b, i) : (b * c.hq + h) * c.sq + i;
}

size_t Inputs::span_index(int64_t span, int64_t b, int64_t h, int64_t i, int64_t j, int64_t rows,
                          int64_t columns) const {
  const int64_t heads = span & kSpanH ? c.hq : 1;
  const int64_t span_rows = span & kSpanQ ? rows : 1;
  return (((span & kSpanB ? b : 0) * heads + (span & kSpanH ? h : 0)) * span_rows + (span & kSpanQ ? i : 0)) * columns +
         j;
}

size_t Inputs::bias_index(int64_t b, int64_t h, int64_t i, int64_t j) const {
  return span_index(c.bias, b, h, i, j, c.sq, c.sk);
}

bool Inputs::visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const int64_t over = i + diagonal(b);  // the key on query i's diagonal
  if ((c.causal || (c.causal_seqs && causal_seqs[b] != 0)) && j > over) return false;
  if (c.wl >= 0 && j < over - c.wl) return false;
  if (c.wr >= 0 && j > over + c.wr) return false;
  if (const int64_t t = j - (sk[b] - sq[b]); c.tree && t >= 0 && t < 32 * c.tree) {
    const double word = tree[q_row(b, i) * c.tree + t / 32];
    if (!(static_cast<uint32_t>(static_cast<int32_t>(word)) >> (t % 32) & 1)) return false;
  }
  if (c.mask != kAbsent && mask[span_index(c.mask, b, h, i, j, c.sq, c.sk)] == 0) return false;
  if (c.block_mask == kAbsent) return true;
  return block_mask[span_index(c.block_mask, b, h, i / c.block_q, j / c.block_k, ceil_div(c.sq, c.block_q),
                               ceil_div(c.sk, c.block_k))] != 0;
}

// Where each sequence is in the whole. One place for all must have room for the longest.
static void place(Inputs& in) {
  const Case& c = in.c;
  for (int64_t b = 0; b < c.b; ++b) {
    const int64_t step = c.places ? 32 * (b % 3) : 0;
    in.first_q.push_back(in.has_place() ? c.first_q + step : 0), in.first_k.push_back(c.first_k + step);
    in.total_q.push_back(in.has_place() ? in.first_q[b] + (c.places ? in.sq[b] + b : c.sq) + c.after_q : in.sq[b]);
    in.total_k.push_back(in.has_place() ? in.first_k[b] + (c.places ? in.sk[b] : c.sk) + c.after_k : in.sk[b]);
  }
}

static Inputs make(const Case& c, bool values) {
  Inputs in;
  in.c = c;
  Draw draw(c.seed);
  in.rows_q = draw_lengths(draw, c, c.q_form == kPacked, c.sq, c.few ? std::min(c.few, c.sq) : c.sq, in.q_begin, in.sq);
  in.rows_k = draw_lengths(draw, c, c.k_form == kPacked, c.sk, c.sk, in.k_begin, in.k_rows);
  in.sk = in.k_rows;
  if (c.used)
    for (int64_t& sk : in.sk) sk = draw.length(sk);
  if (c.prefix) draw_prefixes(draw, in);
  place(in);
  if (c.k_form == kPaged) draw_pages(draw, in);
  clear_rows(in);
  if (values) draw_rows(draw, in);
  quantize(in);
  copy_prefixes(in);
  in.d_lse.resize(in.rows_q * c.hq);
  for (double& value : in.d_lse) value = round_to(TESSERA_FLOAT32, draw.normal());
  draw_score_tensors(draw, in);
  draw_program(in);
  for (int64_t b = 0; c.causal_seqs && b < c.b; ++b) in.causal_seqs.push_back(static_cast<double>(draw.up_to(1)));
  // A few queries see none of these keys, a few all.
  in.tree.resize(in.rows_q * c.tree);
  for (int64_t row = 0; c.tree && row < in.rows_q; ++row) {
    const double kind = draw.uniform();
    for (int64_t n = 0; n < c.tree; ++n) {
      uint32_t word = kind < 0.1 ? 0 : ~uint32_t{0};
      for (int bit = 0; kind >= 0.2 && bit < 32; ++bit) word ^= uint32_t{draw.uniform() < 0.4} << bit;
      in.tree[row * c.tree + n] = static_cast<int32_t>(word);
    }
  }
  return in;
}

int32_t gradient_dtype(const Case& c, const CapturedTensor& tensor) {
  return c.gap ? tensor.dtype : static_cast<int32_t>(TESSERA_FLOAT32);
}

Inputs make_inputs(const Case& c) { return make(c, true); }

Inputs make_shapes(const Case& c) { return make(c, false); }

Call make_call(const Inputs& in) { return make_call(in, static_cast<int32_t>(in.c.dtype), false); }

Call make_oracle_call(const Inputs& in) { return make_call(in, TESSERA_FLOAT64, true); }

void Call::describe() {
  problem.q = q.layout();
  problem.k = k.layout();
  problem.v = v.layout();
  problem.o = o.layout();
  problem.lse = lse.layout();
  problem.lse_low = lse_low.layout();
  problem.dropout_state = dropout_state.layout();
  problem.places = places.layout();
  problem.o_accum = o_accum.layout();
  problem.cu_seqlens_q = cu_seqlens_q.layout();
  problem.cu_seqlens_k = cu_seqlens_k.layout();
  problem.seqused_k = seqused_k.layout();
  problem.page_table = page_table.layout();
  problem.page_indptr = page_indptr.layout();
  problem.page_indices = page_indices.layout();
  problem.bias = bias.layout();
  problem.mask = mask.layout();
  problem.block_mask = block_mask.layout();
  problem.alibi_slopes = slopes.layout();
  problem.sink = sink.layout();
  problem.causal_seqs = causal_seqs.layout();
  problem.tree_mask = tree.layout();
  problem.prefix_groups = prefix_groups.layout();
  problem.prefix_lens = prefix_lens.layout();
  problem.q_descale = q_descale.layout();
  problem.k_descale = k_descale.layout();
  problem.v_descale = v_descale.layout();
  problem.d_o = d_o.layout();
  problem.d_q = d_q.layout();
  problem.d_k = d_k.layout();
  problem.d_v = d_v.layout();
  problem.d_lse = d_lse.layout();
  problem.d_bias = d_bias.layout();
  problem.d_sink = d_sink.layout();
  problem.program = program.get();
  for (size_t n = 0; n < captured.size(); ++n) {
    problem.captured[n] = captured[n].layout();
    problem.d_captured[n] = d_captured[n].layout();
  }
}

tessera_buffers Call::buffers() const {
  return buffers([](const Tensor& tensor) { return tensor.data(); });
}

tessera_buffers Call::buffers(const std::function<void*(const Tensor&)>& address) const {
  const auto floats = [&](const Tensor& tensor) { return static_cast<float*>(address(tensor)); };
  const auto indices = [&](const Tensor& tensor) { return static_cast<const int32_t*>(address(tensor)); };
  const auto flags = [&](const Tensor& tensor) { return static_cast<const uint8_t*>(address(tensor)); };
  tessera_buffers all = {.q = address(q),
                         .k = address(k),
                         .v = address(v),
                         .o = address(o),
                         .lse = floats(lse),
                         .cu_seqlens_q = indices(cu_seqlens_q),
                         .cu_seqlens_k = indices(cu_seqlens_k),
                         .seqused_k = indices(seqused_k),
                         .page_table = indices(page_table),
                         .bias = address(bias),
                         .mask = flags(mask),
                         .block_mask = flags(block_mask),
                         .alibi_slopes = floats(slopes),
                         .sink = floats(sink),
                         .d_o = address(d_o),
                         .d_q = address(d_q),
                         .d_k = address(d_k),
                         .d_v = address(d_v),
                         .d_lse = floats(d_lse),
                         .d_bias = floats(d_bias),
                         .d_sink = floats(d_sink),
                         .causal_seqs = flags(causal_seqs),
                         .page_indptr = indices(page_indptr),
                         .page_indices = indices(page_indices),
                         .tree_mask = indices(tree),
                         .prefix_groups = indices(prefix_groups),
                         .prefix_lens = indices(prefix_lens),
                         .lse_low = floats(lse_low),
                         .dropout_state = static_cast<const int64_t*>(address(dropout_state)),
                         .captured = {},
                         .d_captured = {},
                         .scalars = {},
                         .q_descale = floats(q_descale),
                         .k_descale = floats(k_descale),
                         .v_descale = floats(v_descale),
                         .places = indices(places),
                         .o_accum = address(o_accum)};
  for (size_t n = 0; n < captured.size(); ++n) {
    all.captured[n] = address(captured[n]);
    all.d_captured[n] = address(d_captured[n]);
  }
  std::ranges::copy(scalars, all.scalars);
  return all;
}

std::vector<const Tensor*> Call::inputs() const {
  std::vector<const Tensor*> all = {&q,
                                    &k,
                                    &v,
                                    &cu_seqlens_q,
                                    &cu_seqlens_k,
                                    &seqused_k,
                                    &page_table,
                                    &page_indptr,
                                    &page_indices,
                                    &bias,
                                    &mask,
                                    &block_mask,
                                    &slopes,
                                    &sink,
                                    &causal_seqs,
                                    &tree,
                                    &prefix_groups,
                                    &prefix_lens,
                                    &d_o,
                                    &d_lse,
                                    &dropout_state,
                                    &q_descale,
                                    &k_descale,
                                    &v_descale,
                                    &places,
                                    &o_accum};
  for (const Tensor& tensor : captured) all.push_back(&tensor);
  return all;
}

}  // namespace tessera::testing
