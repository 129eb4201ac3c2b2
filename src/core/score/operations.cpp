#include "core/score/operations.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string_view>

namespace tessera::core::score {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kIntMin = INT32_MIN, kIntMax = INT32_MAX;
constexpr Type F = Type::kFloat, I = Type::kInt, B = Type::kBool;

int64_t integer(double x) { return static_cast<int64_t>(x); }

// ---- meaning --------------------------------------------------------------------------------------------------------

// If either operand is NaN, so is the result, as in PyTorch.
double min_(const double* x) { return std::isnan(x[0]) || std::isnan(x[1]) ? kNaN : std::min(x[0], x[1]); }
double max_(const double* x) { return std::isnan(x[0]) || std::isnan(x[1]) ? kNaN : std::max(x[0], x[1]); }

double floor_div(const double* x) {
  const int64_t a = integer(x[0]), b = integer(x[1]);
  if (b == 0) return 0;
  const int64_t q = a / b;
  return wrap(static_cast<double>(a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q));
}
double mod(const double* x) {
  const int64_t a = integer(x[0]), b = integer(x[1]);
  if (b == 0) return 0;
  const int64_t r = a % b;
  return static_cast<double>(r != 0 && (r < 0) != (b < 0) ? r + b : r);
}

uint32_t bits(double x) { return static_cast<uint32_t>(integer(x)); }
double from_bits(uint32_t x) { return static_cast<int32_t>(x); }

// Rounds toward zero; beyond 32 bits the result is the nearest integer, for NaN it is 0, as in CUDA's conversion.
double to_int(const double* x) {
  if (std::isnan(x[0])) return 0;
  return std::clamp(std::trunc(x[0]), kIntMin, kIntMax);
}

double sign(const double* x) { return std::isnan(x[0]) ? kNaN : (x[0] > 0) - (x[0] < 0); }

// ---- bounds ---------------------------------------------------------------------------------------------------------

constexpr Interval kAnyTruth{0, 1};

bool finite(const Interval& x) { return std::isfinite(x.low) && std::isfinite(x.high); }

// Kernels compute in float32 what is bounded here in float64. Bounds of floats are widened by more than the rounding
// error, so that "none" and "all" hold for both.
Interval rounded(double low, double high, bool nan) {
  const auto out = [](double x, double sign) {
    return std::isfinite(x) ? x + sign * (std::fabs(x) * 0x1p-20 + std::numeric_limits<float>::min()) : x;
  };
  if (std::isnan(low) || std::isnan(high)) return Interval::everything();
  low = out(low, -1), high = out(high, 1);
  constexpr double kLargest = std::numeric_limits<float>::max();
  return {low < -kLargest ? -kInf : low, high > kLargest ? kInf : high, nan};
}

// For a function that never decreases; `from` and `to` are the ends of its domain.
template <double (*f)(double)>
Interval rising(const Interval* x) {
  return rounded(f(x->low), f(x->high), x->nan);
}

Interval integers(double low, double high) {
  if (low < kIntMin || high > kIntMax) return {kIntMin, kIntMax};  // it may wrap
  return {low, high};
}

Interval add(const Interval* x) {
  const bool opposite = (x[0].low == -kInf && x[1].high == kInf) || (x[0].high == kInf && x[1].low == -kInf);
  return rounded(x[0].low + x[1].low, x[0].high + x[1].high, x[0].nan || x[1].nan || opposite);
}
Interval negated(const Interval* x) { return {-x->high, -x->low, x->nan}; }
Interval sub(const Interval* x) {
  const Interval operands[] = {x[0], negated(x + 1)};
  return add(operands);
}

struct Corners {
  double low, high;
};
Corners products(const Interval* x) {
  const double all[] = {x[0].low * x[1].low, x[0].low * x[1].high, x[0].high * x[1].low, x[0].high * x[1].high};
  const auto [low, high] = std::minmax_element(std::begin(all), std::end(all));
  return {*low, *high};
}
Interval mul(const Interval* x) {
  if (!finite(x[0]) || !finite(x[1])) return Interval::everything();
  const auto [low, high] = products(x);
  return rounded(low, high, x[0].nan || x[1].nan);
}
Interval div(const Interval* x) {
  if (!finite(x[0]) || !finite(x[1]) || (x[1].low <= 0 && x[1].high >= 0)) return Interval::everything();
  const Interval operands[] = {x[0], rounded(1 / x[1].high, 1 / x[1].low, x[1].nan)};
  return mul(operands);
}
Interval absolute(const Interval* x) {
  const double low = x->low > 0 ? x->low : x->high < 0 ? -x->high : 0;
  return {low, std::max(std::fabs(x->low), std::fabs(x->high)), x->nan};
}
Interval abs_int(const Interval* x) {
  const Interval r = absolute(x);
  return integers(r.low, r.high);
}
Interval least(const Interval* x) {
  return {std::min(x[0].low, x[1].low), std::min(x[0].high, x[1].high), x[0].nan || x[1].nan};
}
Interval largest(const Interval* x) {
  return {std::max(x[0].low, x[1].low), std::max(x[0].high, x[1].high), x[0].nan || x[1].nan};
}
Interval mul_int(const Interval* x) {
  const auto [low, high] = products(x);
  return integers(low, high);
}
Interval floor_div_bound(const Interval* x) {
  if (x[1].low <= 0 && x[1].high >= 0) return {kIntMin, kIntMax};
  const double all[] = {std::floor(x[0].low / x[1].low), std::floor(x[0].low / x[1].high),
                        std::floor(x[0].high / x[1].low), std::floor(x[0].high / x[1].high)};
  const auto [low, high] = std::minmax_element(std::begin(all), std::end(all));
  return integers(*low, *high);
}
Interval mod_bound(const Interval* x) {
  if (!(x[1].low == x[1].high && x[1].low > 0)) return {std::min(0.0, x[1].low), std::max(0.0, x[1].high)};
  const double n = x[1].low, q = std::floor(x[0].low / n);
  if (q == std::floor(x[0].high / n)) return {x[0].low - q * n, x[0].high - q * n};  // within one period
  return {0, n - 1};
}
Interval shift_right(const Interval* x) {
  if (!(x[1].low == x[1].high && x[1].low >= 0 && x[1].low < 32)) return {kIntMin, kIntMax};
  const double n = std::ldexp(1, static_cast<int>(x[1].low));
  return {std::floor(x[0].low / n), std::floor(x[0].high / n)};
}
// For non-negative integers: at most the smaller of the two.
Interval and_int(const Interval* x) {
  if (x[0].low >= 0 || x[1].low >= 0) {
    const double most = x[0].low < 0 ? x[1].high : x[1].low < 0 ? x[0].high : std::min(x[0].high, x[1].high);
    return {0, most};
  }
  return {kIntMin, kIntMax};
}

Interval truth(bool always, bool never) { return always ? Interval{1, 1} : never ? Interval{0, 0} : kAnyTruth; }
Interval less(const Interval* x) {
  const bool nan = x[0].nan || x[1].nan;
  return truth(x[0].high < x[1].low && !nan, x[0].low >= x[1].high);
}
Interval less_equal(const Interval* x) {
  const bool nan = x[0].nan || x[1].nan;
  return truth(x[0].high <= x[1].low && !nan, x[0].low > x[1].high);
}
bool apart(const Interval* x) { return x[0].high < x[1].low || x[1].high < x[0].low; }
bool same(const Interval* x) {
  return x[0].low == x[0].high && x[1].low == x[1].high && x[0].low == x[1].low && !x[0].nan && !x[1].nan;
}
Interval equal(const Interval* x) { return truth(same(x), apart(x)); }
Interval not_equal(const Interval* x) { return truth(apart(x), same(x)); }

Interval both(const Interval* x) { return {std::min(x[0].low, x[1].low), std::min(x[0].high, x[1].high)}; }
Interval either(const Interval* x) { return {std::max(x[0].low, x[1].low), std::max(x[0].high, x[1].high)}; }
Interval complement(const Interval* x) { return {1 - x->high, 1 - x->low}; }
Interval where(const Interval* x) {
  if (x[0].is(1)) return x[1];
  if (x[0].is(0)) return x[2];
  return {std::min(x[1].low, x[2].low), std::max(x[1].high, x[2].high), x[1].nan || x[2].nan};
}
Interval unchanged(const Interval* x) { return *x; }
Interval to_float(const Interval* x) { return rounded(x->low, x->high, false); }
Interval to_int_bound(const Interval* x) {
  return {std::clamp(std::trunc(x->nan ? std::min(x->low, 0.0) : x->low), kIntMin, kIntMax),
          std::clamp(std::trunc(x->nan ? std::max(x->high, 0.0) : x->high), kIntMin, kIntMax)};
}
Interval log_bound(const Interval* x) {
  if (x->high < 0) return Interval::exactly(kNaN);
  return rounded(std::log(std::max(x->low, 0.0)), std::log(x->high), x->nan || x->low < 0);
}
Interval sqrt_bound(const Interval* x) {
  if (x->high < 0) return Interval::exactly(kNaN);
  return rounded(std::sqrt(std::max(x->low, 0.0)), std::sqrt(x->high), x->nan || x->low < 0);
}
Interval rsqrt_bound(const Interval* x) {
  if (x->high < 0) return Interval::exactly(kNaN);
  const bool nan = x->nan || x->low < 0;
  const double low = x->low <= 0 ? -kInf : 1 / std::sqrt(x->high);  // for -0 it is -inf
  return rounded(low, x->low > 0 ? 1 / std::sqrt(x->low) : kInf, nan);
}
Interval wave(const Interval* x) { return {-1, 1, x->nan || !finite(*x)}; }
Interval sign_bound(const Interval* x) { return {sign(&x->low), sign(&x->high), x->nan}; }

double exp_(double x) { return std::exp(x); }
double exp2_(double x) { return std::exp2(x); }
double tanh_(double x) { return std::tanh(x); }
double floor_(double x) { return std::floor(x); }
double sigmoid_(double x) { return 1 / (1 + std::exp(-x)); }

// ---- the table ------------------------------------------------------------------------------------------------------

#define TESSERA_MEANS(...) [](const double* x) -> double { return __VA_ARGS__; }
// clang-format off
constexpr Operation kOperations[] = {
    //  op               text        result  operands    precedence   commutes  meaning in float64                         bounds             CUDA text, bounds in CUDA
    {Op::kS,             "s",        F, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "s"},
    {Op::kB,             "b",        I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.b"},
    {Op::kH,             "h",        I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.h"},
    {Op::kHkv,           "h_kv",     I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.h_kv"},
    {Op::kI,             "i",        I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.i"},
    {Op::kJ,             "j",        I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.j"},
    {Op::kQPos,          "q_pos",    I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.q_pos"},
    {Op::kLenQ,          "len_q",    I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.len_q"},
    {Op::kLenK,          "len_k",    I, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "at.len_k"},
    {Op::kG,             "g",        F, 0, {},        kFunction,   false, nullptr,                                    nullptr,           "g"},
    {Op::kConstant,      nullptr,    F, 0, {},        kFunction,   false, nullptr,                                    nullptr,           nullptr},
    {Op::kScalar,        nullptr,    F, 0, {},        kFunction,   false, nullptr,                                    nullptr,           nullptr},
    {Op::kLoad,          nullptr,    F, 0, {},        kFunction,   false, nullptr,                                    nullptr,           nullptr},

    {Op::kAdd,           "+",        F, 2, {F, F},    kSum,        true,  TESSERA_MEANS(x[0] + x[1]),                 add,               "%0 + %1", "add"},
    {Op::kSub,           "-",        F, 2, {F, F},    kSum,        false, TESSERA_MEANS(x[0] - x[1]),                 sub,               "%0 - %1", "sub"},
    {Op::kMul,           "*",        F, 2, {F, F},    kProduct,    true,  TESSERA_MEANS(x[0] * x[1]),                 mul,               "%0 * %1", "mul"},
    {Op::kDiv,           "/",        F, 2, {F, F},    kProduct,    false, TESSERA_MEANS(x[0] / x[1]),                 div,               "divide(%0, %1)"},
    {Op::kNeg,           "-",        F, 1, {F},       kUnary,      false, TESSERA_MEANS(-x[0]),                       negated,           "-%0", "negated"},
    {Op::kAbs,           "abs",      F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::fabs(x[0])),             absolute,          "fabsf(%0)", "absolute"},
    {Op::kMin,           "min",      F, 2, {F, F},    kFunction,   true,  min_,                                       least,             "min_nan(%0, %1)", "least"},
    {Op::kMax,           "max",      F, 2, {F, F},    kFunction,   true,  max_,                                       largest,           "max_nan(%0, %1)", "largest"},
    {Op::kFloor,         "floor",    F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::floor(x[0])),            rising<floor_>,    "floorf(%0)", "floored"},
    {Op::kSign,          "sign",     F, 1, {F},       kFunction,   false, sign,                                       sign_bound,        "sign(%0)", "sign"},
    {Op::kIsNaN,         "isnan",    B, 1, {F},       kFunction,   false, TESSERA_MEANS(std::isnan(x[0])),            nullptr,           "%0 != %0", "is_nan"},
    {Op::kExp,           "exp",      F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::exp(x[0])),              rising<exp_>,      "exp_(%0)"},
    {Op::kExp2,          "exp2",     F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::exp2(x[0])),             rising<exp2_>,     "exp2_(%0)"},
    {Op::kLog,           "log",      F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::log(x[0])),              log_bound,         "log_(%0)"},
    {Op::kSqrt,          "sqrt",     F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::sqrt(x[0])),             sqrt_bound,        "sqrt_(%0)"},
    {Op::kRsqrt,         "rsqrt",    F, 1, {F},       kFunction,   false, TESSERA_MEANS(1 / std::sqrt(x[0])),         rsqrt_bound,       "rsqrt_(%0)"},
    {Op::kTanh,          "tanh",     F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::tanh(x[0])),             rising<tanh_>,     "tanh_(%0)"},
    {Op::kSigmoid,       "sigmoid",  F, 1, {F},       kFunction,   false, TESSERA_MEANS(sigmoid_(x[0])),              rising<sigmoid_>,  "sigmoid_(%0)"},
    {Op::kSin,           "sin",      F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::sin(x[0])),              wave,              "sin_(%0)"},
    {Op::kCos,           "cos",      F, 1, {F},       kFunction,   false, TESSERA_MEANS(std::cos(x[0])),              wave,              "cos_(%0)"},

    {Op::kAddInt,        "+",        I, 2, {I, I},    kSum,        true,  TESSERA_MEANS(wrap(x[0] + x[1])),           [](const Interval* x) { return integers(x[0].low + x[1].low, x[0].high + x[1].high); }, "wrap_add(%0, %1)", "add"},
    {Op::kSubInt,        "-",        I, 2, {I, I},    kSum,        false, TESSERA_MEANS(wrap(x[0] - x[1])),           [](const Interval* x) { return integers(x[0].low - x[1].high, x[0].high - x[1].low); }, "wrap_sub(%0, %1)", "sub"},
    {Op::kMulInt,        "*",        I, 2, {I, I},    kProduct,    true,  TESSERA_MEANS(from_bits(bits(x[0]) * bits(x[1]))), mul_int,     "wrap_mul(%0, %1)", "mul"},
    {Op::kFloorDiv,      "//",       I, 2, {I, I},    kProduct,    false, floor_div,                                  floor_div_bound,   "floor_div(%0, %1)", "floor_div"},
    {Op::kMod,           "%",        I, 2, {I, I},    kProduct,    false, mod,                                        mod_bound,         "floor_mod(%0, %1)", "floor_mod"},
    {Op::kNegInt,        "-",        I, 1, {I},       kUnary,      false, TESSERA_MEANS(wrap(-x[0])),                 [](const Interval* x) { return integers(-x->high, -x->low); }, "wrap_sub(0, %0)", "negated"},
    {Op::kAbsInt,        "abs",      I, 1, {I},       kFunction,   false, TESSERA_MEANS(wrap(std::fabs(x[0]))),       abs_int,           "wrap_abs(%0)", "absolute"},
    {Op::kMinInt,        "min",      I, 2, {I, I},    kFunction,   true,  TESSERA_MEANS(std::min(x[0], x[1])),        least,             "min(%0, %1)", "least"},
    {Op::kMaxInt,        "max",      I, 2, {I, I},    kFunction,   true,  TESSERA_MEANS(std::max(x[0], x[1])),        largest,           "max(%0, %1)", "largest"},
    {Op::kAndInt,        "&",        I, 2, {I, I},    kBitAnd,     true,  TESSERA_MEANS(from_bits(bits(x[0]) & bits(x[1]))), and_int,     "%0 & %1", "both"},
    {Op::kOrInt,         "|",        I, 2, {I, I},    kBitOr,      true,  TESSERA_MEANS(from_bits(bits(x[0]) | bits(x[1]))), nullptr,     "%0 | %1"},
    {Op::kXorInt,        "^",        I, 2, {I, I},    kBitXor,     true,  TESSERA_MEANS(from_bits(bits(x[0]) ^ bits(x[1]))), nullptr,     "%0 ^ %1"},
    {Op::kNotInt,        "~",        I, 1, {I},       kUnary,      false, TESSERA_MEANS(from_bits(~bits(x[0]))),      [](const Interval* x) { return Interval{-1 - x->high, -1 - x->low}; }, "~%0", "complement"},
    // Shifts by 32 or more, or by a negative number, shift by all bits.
    {Op::kShiftLeft,     "<<",       I, 2, {I, I},    kShift,      false, TESSERA_MEANS(x[1] < 0 || x[1] > 31 ? 0.0 : from_bits(bits(x[0]) << bits(x[1]))), nullptr, "shift_left(%0, %1)"},
    {Op::kShiftRight,    ">>",       I, 2, {I, I},    kShift,      false, TESSERA_MEANS(static_cast<double>(integer(x[0]) >> (x[1] < 0 || x[1] > 31 ? 31 : integer(x[1])))), shift_right, "shift_right(%0, %1)", "shift_right"},

    {Op::kLess,          "<",        B, 2, {F, F},    kComparison, false, TESSERA_MEANS(x[0] < x[1]),                 less,              "%0 < %1", "less"},
    {Op::kLessEqual,     "<=",       B, 2, {F, F},    kComparison, false, TESSERA_MEANS(x[0] <= x[1]),                less_equal,        "%0 <= %1", "less_equal"},
    {Op::kEqual,         "==",       B, 2, {F, F},    kComparison, true,  TESSERA_MEANS(x[0] == x[1]),                equal,             "%0 == %1", "equal"},
    {Op::kNotEqual,      "!=",       B, 2, {F, F},    kComparison, true,  TESSERA_MEANS(x[0] != x[1]),                not_equal,         "%0 != %1", "not_equal"},
    {Op::kLessInt,       "<",        B, 2, {I, I},    kComparison, false, TESSERA_MEANS(x[0] < x[1]),                 less,              "%0 < %1", "less"},
    {Op::kLessEqualInt,  "<=",       B, 2, {I, I},    kComparison, false, TESSERA_MEANS(x[0] <= x[1]),                less_equal,        "%0 <= %1", "less_equal"},
    {Op::kEqualInt,      "==",       B, 2, {I, I},    kComparison, true,  TESSERA_MEANS(x[0] == x[1]),                equal,             "%0 == %1", "equal"},
    {Op::kNotEqualInt,   "!=",       B, 2, {I, I},    kComparison, true,  TESSERA_MEANS(x[0] != x[1]),                not_equal,         "%0 != %1", "not_equal"},

    {Op::kAnd,           "&&",       B, 2, {B, B},    kAndAlso,    true,  TESSERA_MEANS(std::min(x[0], x[1])),        both,              "%0 && %1", "both"},
    {Op::kOr,            "||",       B, 2, {B, B},    kOrElse,     true,  TESSERA_MEANS(std::max(x[0], x[1])),        either,            "%0 || %1", "either"},
    {Op::kXor,           "^",        B, 2, {B, B},    kBitXor,     true,  TESSERA_MEANS(x[0] != x[1]),                not_equal,         "%0 != %1", "not_equal"},
    {Op::kNot,           "!",        B, 1, {B},       kUnary,      false, TESSERA_MEANS(1 - x[0]),                    complement,        "!%0", "complement"},

    {Op::kWhere,         "where",    F, 3, {B, F, F}, kFunction,   false, TESSERA_MEANS(x[0] != 0 ? x[1] : x[2]),     where,             "%0 ? %1 : %2", "where"},
    {Op::kWhereInt,      "where",    I, 3, {B, I, I}, kFunction,   false, TESSERA_MEANS(x[0] != 0 ? x[1] : x[2]),     where,             "%0 ? %1 : %2", "where"},
    {Op::kWhereBool,     "where",    B, 3, {B, B, B}, kFunction,   false, TESSERA_MEANS(x[0] != 0 ? x[1] : x[2]),     where,             "%0 ? %1 : %2", "where"},

    {Op::kIntToFloat,    "float",    F, 1, {I},       kFunction,   false, TESSERA_MEANS(x[0]),                        to_float,          "static_cast<float>(%0)", "to_float"},
    {Op::kBoolToFloat,   "float",    F, 1, {B},       kFunction,   false, TESSERA_MEANS(x[0]),                        unchanged,         "%0 ? 1.0f : 0.0f", "to_float"},
    {Op::kFloatToInt,    "int",      I, 1, {F},       kFunction,   false, to_int,                                     to_int_bound,      "to_int(%0)", "to_int"},
    {Op::kBoolToInt,     "int",      I, 1, {B},       kFunction,   false, TESSERA_MEANS(x[0]),                        unchanged,         "%0 ? 1 : 0", "to_int"},
};
// clang-format on
#undef TESSERA_MEANS

constexpr bool rows_are_in_order() {
  for (size_t n = 0; n < std::size(kOperations); ++n) {
    if (kOperations[n].op != static_cast<Op>(n)) return false;
  }
  return std::size(kOperations) == static_cast<size_t>(Op::kCount);
}
static_assert(rows_are_in_order(), "one row for each operation, in the order of Op");

bool is_input(Op op) { return op <= Op::kG; }

}  // namespace

// The ends of an interval are numbers: for NaN alone they are 0.
Interval Interval::exactly(double x) { return std::isnan(x) ? Interval{0, 0, true} : Interval{x, x}; }
Interval Interval::everything() { return {-kInf, kInf, true}; }

const Operation& operation(Op op) { return kOperations[static_cast<size_t>(op)]; }

const Operation* find_operation(const char* text, int text_length, const Type* types, int count) {
  const std::string_view name(text, static_cast<size_t>(text_length));
  for (const Operation& row : kOperations) {
    if (is_input(row.op) || !row.text || row.text != name || row.operands != count) continue;
    if (std::equal(types, types + count, row.operand)) return &row;
  }
  return nullptr;
}

bool is_function(const char* text, int text_length) {
  const std::string_view name(text, static_cast<size_t>(text_length));
  return std::any_of(std::begin(kOperations), std::end(kOperations), [&](const Operation& row) {
    return !is_input(row.op) && row.text && name == row.text && row.precedence == kFunction;
  });
}

int32_t wrap(double integer) { return static_cast<int32_t>(static_cast<uint32_t>(static_cast<int64_t>(integer))); }

}  // namespace tessera::core::score
