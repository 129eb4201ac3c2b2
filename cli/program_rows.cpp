#include "program_rows.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/score/derivative.hpp"
#include "core/score/operations.hpp"

namespace tessera::cli {
namespace {

namespace score = core::score;
using score::Op;
using score::Type;

struct Pairs {
  std::int64_t b, h, h_kv, i, q_pos, len_q, len_k, keys;
};

// The values of a program for the keys of one row. What does not depend on the key has one number.
template <class Real>
class Rows {
 public:
  Rows(const BoundProgram& bound, const Pairs& pairs, const Real* s, const Real* g)
      : bound_(bound), pairs_(pairs), s_(s), g_(g) {
    columns_.reserve(bound.program.values.size());
    for (const score::Value& value : bound.program.values) columns_.push_back(column_of(value));
  }

  Real real(int place, std::int64_t key) const {
    const Column& column = columns_[static_cast<std::size_t>(place)];
    return column.reals[column.at(key)];
  }
  bool truth(int place, std::int64_t key) const {
    const Column& column = columns_[static_cast<std::size_t>(place)];
    return column.integers[column.at(key)] != 0;
  }

 private:
  struct Column {
    std::vector<Real> reals;             // of a float
    std::vector<std::int32_t> integers;  // of an integer or a truth value
    bool one = true;

    std::size_t at(std::int64_t key) const { return one ? 0 : static_cast<std::size_t>(key); }
  };

  const Column& operand(const score::Value& value, int n) const {
    return columns_[static_cast<std::size_t>(value.operands[n])];
  }

  // number(key) for each key, or once.
  template <class Number>
  static void fill(Column& column, std::int64_t keys, const Number& number) {
    const auto count = static_cast<std::size_t>(column.one ? std::min<std::int64_t>(keys, 1) : keys);
    if constexpr (std::is_floating_point_v<decltype(number(std::int64_t{}))>) {
      column.reals.resize(count);
      for (std::size_t n = 0; n < count; ++n) column.reals[n] = number(static_cast<std::int64_t>(n));
    } else {
      column.integers.resize(count);
      for (std::size_t n = 0; n < count; ++n) column.integers[n] = number(static_cast<std::int64_t>(n));
    }
  }

  Column column_of(const score::Value& value) const {
    const std::int64_t keys = pairs_.keys;
    const std::int64_t inputs[] = {0, pairs_.b,     pairs_.h,     pairs_.h_kv, pairs_.i,
                                   0, pairs_.q_pos, pairs_.len_q, pairs_.len_k};
    Column column;
    if (value.op == Op::kS || value.op == Op::kG) {
      const Real* const from = value.op == Op::kS ? s_ : g_;
      column.one = false;
      fill(column, keys, [&](std::int64_t key) { return from[key]; });
    } else if (value.op == Op::kJ) {
      column.one = false;
      fill(column, keys, [](std::int64_t key) { return static_cast<std::int32_t>(key); });
    } else if (value.op < Op::kG) {
      fill(column, keys, [&](std::int64_t) { return static_cast<std::int32_t>(inputs[static_cast<int>(value.op)]); });
    } else if (value.op == Op::kConstant || value.op == Op::kScalar) {
      const double number =
          value.op == Op::kConstant ? value.constant : bound_.scalars[static_cast<std::size_t>(value.name)];
      set(value.type, column, [&](std::int64_t) { return number; });
    } else if (value.op == Op::kLoad) {
      const int rank = score::operand_count(value);
      for (int axis = 0; axis < rank; ++axis) column.one = column.one && operand(value, axis).one;
      set(value.type, column, [&](std::int64_t key) {
        std::array<std::int64_t, score::kMaxRank> index{};
        for (int axis = 0; axis < rank; ++axis) {
          const Column& of = operand(value, axis);
          index[static_cast<std::size_t>(axis)] = of.integers[of.at(key)];
        }
        bool read = true;
        return bound_.element(value.name, index.data(), read);
      });
    } else {
      operate(value, column);
    }
    return column;
  }

  template <class Number>
  void set(Type type, Column& column, const Number& number) const {
    if (type == Type::kFloat) {
      fill(column, pairs_.keys, [&](std::int64_t key) { return static_cast<Real>(number(key)); });
    } else {
      fill(column, pairs_.keys, [&](std::int64_t key) { return score::wrap(number(key)); });
    }
  }

  void operate(const score::Value& value, Column& column) const {
    const score::Operation& operation = score::operation(value.op);
    for (int n = 0; n < operation.operands; ++n) column.one = column.one && operand(value, n).one;
    const Column &a = operand(value, 0), &b = operand(value, operation.operands > 1 ? 1 : 0);
    const auto unary = [&](const auto& function) {
      fill(column, pairs_.keys, [&](std::int64_t key) { return static_cast<Real>(function(a.reals[a.at(key)])); });
    };
    const auto binary = [&](const auto& function) {
      fill(column, pairs_.keys,
           [&](std::int64_t key) { return static_cast<Real>(function(a.reals[a.at(key)], b.reals[b.at(key)])); });
    };
    switch (value.op) {
      case Op::kAdd:
        return binary([](Real x, Real y) { return x + y; });
      case Op::kSub:
        return binary([](Real x, Real y) { return x - y; });
      case Op::kMul:
        return binary([](Real x, Real y) { return x * y; });
      case Op::kDiv:
        return binary([](Real x, Real y) { return x / y; });
      case Op::kNeg:
        return unary([](Real x) { return -x; });
      case Op::kAbs:
        return unary([](Real x) { return std::fabs(x); });
      case Op::kExp:
        return unary([](Real x) { return std::exp(x); });
      case Op::kExp2:
        return unary([](Real x) { return std::exp2(x); });
      case Op::kLog:
        return unary([](Real x) { return std::log(x); });
      case Op::kSqrt:
        return unary([](Real x) { return std::sqrt(x); });
      case Op::kTanh:
        return unary([](Real x) { return std::tanh(x); });
      case Op::kSin:
        return unary([](Real x) { return std::sin(x); });
      case Op::kCos:
        return unary([](Real x) { return std::cos(x); });
      case Op::kWhere: {
        const Column& other = operand(value, 2);
        return fill(column, pairs_.keys, [&](std::int64_t key) {
          return a.integers[a.at(key)] != 0 ? b.reals[b.at(key)] : other.reals[other.at(key)];
        });
      }
      default:
        return by_table(operation, value, column);
    }
  }

  // The others: integers and truth values, which are exact, and rare functions, rounded to Real.
  void by_table(const score::Operation& operation, const score::Value& value, Column& column) const {
    set(operation.result, column, [&](std::int64_t key) {
      std::array<double, 3> x{};
      for (int n = 0; n < operation.operands; ++n) {
        const Column& of = operand(value, n);
        x[static_cast<std::size_t>(n)] =
            operation.operand[n] == Type::kFloat ? static_cast<double>(of.reals[of.at(key)]) : of.integers[of.at(key)];
      }
      return operation.evaluate(x.data());
    });
  }

  const BoundProgram& bound_;
  const Pairs& pairs_;
  const Real *s_, *g_;
  std::vector<Column> columns_;
};

Pairs pairs_of(const peers::AttentionShape& s, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t keys) {
  return {b, h, h * s.heads_kv / s.heads_q, i, i + s.seqlen_k - s.seqlen_q, s.seqlen_q, s.seqlen_k, keys};
}

}  // namespace

ProgramRows::ProgramRows(const std::shared_ptr<const ScoreProgram>& program, const peers::AttentionShape& shape)
    : forward_(program), reverse_(program, {}), d_s_(-1), shape_(shape) {
  score::Gradient gradient = score::gradient(forward_.program);
  d_s_ = gradient.d_s;
  reverse_ = BoundProgram(program, std::move(gradient.program));
}

template <class Real>
void ProgramRows::score_row(std::int64_t b, std::int64_t h, std::int64_t i, Real* s, std::int64_t keys) const {
  const Pairs pairs = pairs_of(shape_, b, h, i, keys);
  const Rows<Real> rows(forward_, pairs, s, nullptr);
  const int score = forward_.program.score, mask = forward_.program.mask;
  for (std::int64_t key = 0; key < keys; ++key) {
    if (score >= 0) s[key] = rows.real(score, key);
    if (mask >= 0 && !rows.truth(mask, key)) s[key] = -std::numeric_limits<Real>::infinity();
  }
}

// A hidden key has the gradient 0 already, which a program may multiply by an infinite slope.
template <class Real>
void ProgramRows::gradient_row(std::int64_t b, std::int64_t h, std::int64_t i, const Real* s, Real* d_s,
                               std::int64_t keys) const {
  const Pairs pairs = pairs_of(shape_, b, h, i, keys);
  const Rows<Real> rows(reverse_, pairs, s, d_s);
  for (std::int64_t key = 0; key < keys; ++key) {
    if (d_s[key] != 0) d_s[key] = d_s_ < 0 ? Real{0} : rows.real(d_s_, key);
  }
}

void ProgramRows::score(std::int64_t b, std::int64_t h, std::int64_t i, float* s, std::int64_t keys) const {
  score_row(b, h, i, s, keys);
}
void ProgramRows::score(std::int64_t b, std::int64_t h, std::int64_t i, double* s, std::int64_t keys) const {
  score_row(b, h, i, s, keys);
}
void ProgramRows::gradient(std::int64_t b, std::int64_t h, std::int64_t i, const float* s, float* d_s,
                           std::int64_t keys) const {
  gradient_row(b, h, i, s, d_s, keys);
}
void ProgramRows::gradient(std::int64_t b, std::int64_t h, std::int64_t i, const double* s, double* d_s,
                           std::int64_t keys) const {
  gradient_row(b, h, i, s, d_s, keys);
}

}  // namespace tessera::cli
