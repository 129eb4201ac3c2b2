// Score programs, from text or from C++ expressions.
//
//   using namespace tessera::score;
//   const Tensor bias("bias", 2);                                  // float, [h, distance]
//   const Scalar c("c");
//   const tessera::Program program(c * tanh(s / c) + bias(h, i - j + 512), j <= q_pos);
//
//   problem.program = program.get();
//   problem.captured[program.tensor("bias")] = layout(float32, {heads, 1024});
//   buffers.captured[program.tensor("bias")] = data;  buffers.scalars[program.scalar("c")] = 50;
#pragma once

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/status.hpp"
#include "tessera/tensor.hpp"
#include "tessera/tessera.h"

namespace tessera {

// A name that a program may use. The rank of a tensor is 0 .. 4.
struct ProgramName {
  std::string name;
  ValueType type = ValueType::floating;
  std::int32_t rank = TESSERA_SCALAR_RANK;

  bool is_tensor() const { return rank != TESSERA_SCALAR_RANK; }
};

// ---- expressions ----------------------------------------------------------------------------------------------------

namespace score {

// An expression of a program: its text and the names in it. Types are checked when the program is created.
class Value {
 public:
  Value(std::same_as<bool> auto truth) : text_(truth ? "true" : "false") {}  // NOLINT
  Value(std::integral auto number)                                           // NOLINT: s + 1
      requires(!std::same_as<decltype(number), bool>)
      : text_(number < 0 ? "(" + std::to_string(number) + ")" : std::to_string(number)) {}
  Value(std::floating_point auto number) : text_(text_of(static_cast<double>(number))) {}  // NOLINT: 0.5 * s
  Value(std::string text, std::vector<ProgramName> names) : text_(std::move(text)), names_(std::move(names)) {}

  const std::string& text() const { return text_; }
  const std::vector<ProgramName>& names() const { return names_; }

 private:
  // The shortest text that reads back as the same number, whatever the locale.
  static std::string text_of(double number) {
    if (number != number) return "nan";
    if (number - number != 0) return number < 0 ? "(-inf)" : "inf";
    char text[40];
    const std::to_chars_result end = std::to_chars(text, text + sizeof text, number);
    std::string result(text, end.ptr);
    if (result.find_first_of(".e") == std::string::npos) result += ".0";
    return number < 0 ? "(" + result + ")" : result;
  }

  std::string text_;
  std::vector<ProgramName> names_;
};

namespace detail {
inline void join(std::vector<ProgramName>& names, const std::vector<ProgramName>& others) {
  for (const ProgramName& other : others) {
    const auto named = [&other](const ProgramName& name) { return name.name == other.name; };
    if (std::ranges::none_of(names, named)) names.push_back(other);
  }
}

// `before` operand `between` operand ... `after`
inline Value joined(std::string_view before, std::string_view between, std::string_view after,
                    const std::vector<Value>& operands) {
  std::string text(before);
  std::vector<ProgramName> names;
  for (std::size_t n = 0; n < operands.size(); ++n) {
    if (n > 0) text += between;
    text += operands[n].text();
    join(names, operands[n].names());
  }
  return {text += after, names};
}
inline Value named(const char* name) { return {name, {}}; }
}  // namespace detail

// The built-in names: the score so far, the sequence, the query head and its KV head, the indices of the query and the
// key in their sequence, i + len_k - len_q, and the two lengths.
inline const Value s = detail::named("s"), b = detail::named("b"), h = detail::named("h"), h_kv = detail::named("h_kv"),
                   i = detail::named("i"), j = detail::named("j"), q_pos = detail::named("q_pos"),
                   len_q = detail::named("len_q"), len_k = detail::named("len_k");

class Scalar : public Value {
 public:
  explicit Scalar(const std::string& name, ValueType type = ValueType::floating) : Value(name, {{name, type}}) {}
};

// A named tensor; bias(h, i - j + 512) is one of its elements.
class Tensor {
 public:
  Tensor(std::string name, std::int32_t rank, ValueType type = ValueType::floating)
      : name_{std::move(name), type, rank} {}
  template <std::convertible_to<Value>... Index>
  Value operator()(const Index&... index) const {
    const Value element = detail::joined(name_.name + "[", ", ", "]", {Value(index)...});
    std::vector<ProgramName> names{name_};
    detail::join(names, element.names());
    return {element.text(), names};
  }

 private:
  ProgramName name_;
};

#define TESSERA_SCORE_OPERATOR(symbol)                           \
  inline Value operator symbol(const Value& x, const Value& y) { \
    return detail::joined("(", " " #symbol " ", ")", {x, y});    \
  }
TESSERA_SCORE_OPERATOR(+)
TESSERA_SCORE_OPERATOR(-)
TESSERA_SCORE_OPERATOR(*)
TESSERA_SCORE_OPERATOR(/)  // floating-point division
TESSERA_SCORE_OPERATOR(%)
TESSERA_SCORE_OPERATOR(<)
TESSERA_SCORE_OPERATOR(<=)
TESSERA_SCORE_OPERATOR(>)
TESSERA_SCORE_OPERATOR(>=)
TESSERA_SCORE_OPERATOR(==)
TESSERA_SCORE_OPERATOR(!=)
TESSERA_SCORE_OPERATOR(&&)
TESSERA_SCORE_OPERATOR(||)
TESSERA_SCORE_OPERATOR(&)
TESSERA_SCORE_OPERATOR(|)
TESSERA_SCORE_OPERATOR(^)
TESSERA_SCORE_OPERATOR(<<)
TESSERA_SCORE_OPERATOR(>>)
#undef TESSERA_SCORE_OPERATOR
inline Value operator-(const Value& x) { return detail::joined("(-", "", ")", {x}); }
inline Value operator!(const Value& x) { return detail::joined("(!", "", ")", {x}); }
inline Value operator~(const Value& x) { return detail::joined("(~", "", ")", {x}); }

// Integer division, rounded down.
inline Value floor_div(const Value& x, const Value& y) { return detail::joined("(", " // ", ")", {x, y}); }

#define TESSERA_SCORE_FUNCTION(name) \
  inline Value name(const Value& x) { return detail::joined(#name "(", ", ", ")", {x}); }
TESSERA_SCORE_FUNCTION(abs)
TESSERA_SCORE_FUNCTION(floor)
TESSERA_SCORE_FUNCTION(sign)
TESSERA_SCORE_FUNCTION(isnan)
TESSERA_SCORE_FUNCTION(exp)
TESSERA_SCORE_FUNCTION(exp2)
TESSERA_SCORE_FUNCTION(log)
TESSERA_SCORE_FUNCTION(sqrt)
TESSERA_SCORE_FUNCTION(rsqrt)
TESSERA_SCORE_FUNCTION(tanh)
TESSERA_SCORE_FUNCTION(sigmoid)
TESSERA_SCORE_FUNCTION(sin)
TESSERA_SCORE_FUNCTION(cos)
#undef TESSERA_SCORE_FUNCTION
inline Value min(const Value& x, const Value& y) { return detail::joined("min(", ", ", ")", {x, y}); }
inline Value max(const Value& x, const Value& y) { return detail::joined("max(", ", ", ")", {x, y}); }
inline Value where(const Value& condition, const Value& x, const Value& y) {
  return detail::joined("where(", ", ", ")", {condition, x, y});
}
inline Value to_float(const Value& x) { return detail::joined("float(", "", ")", {x}); }
inline Value to_int(const Value& x) { return detail::joined("int(", "", ")", {x}); }  // towards zero

}  // namespace score

// ---- programs -------------------------------------------------------------------------------------------------------

// A checked program; copies refer to the same one. It must live until the plans that use it are made. See
// tessera_program.
class Program {
 public:
  Program() = default;

  // From text; either may be empty. Throws Error (invalid_argument), whose message gives the column.
  Program(std::string_view score, std::string_view mask, std::vector<ProgramName> names = {})
      : names_(std::move(names)) {
    std::vector<tessera_program_name> rows;
    for (const ProgramName& name : names_) {
      rows.push_back({name.name.c_str(), static_cast<std::int32_t>(name.type), name.rank});
    }
    throw_if_error(tessera_program_create(std::string(score).c_str(), std::string(mask).c_str(), rows.data(),
                                          static_cast<std::int32_t>(rows.size()), &program_));
  }
  // From expressions. Names are declared in the order of their first use.
  Program(const score::Value& score, const score::Value& mask)
      : Program(score.text(), mask.text(), names_of(score, mask)) {}
  explicit Program(const score::Value& score) : Program(score.text(), "", score.names()) {}

  Program(const Program& other) : program_(other.program_), names_(other.names_) { tessera_program_retain(program_); }
  Program(Program&& other) noexcept
      : program_(std::exchange(other.program_, nullptr)), names_(std::move(other.names_)) {}
  Program& operator=(Program other) noexcept {
    std::swap(program_, other.program_);
    std::swap(names_, other.names_);
    return *this;
  }
  ~Program() { tessera_program_release(program_); }

  tessera_program* get() const { return program_; }  // NULL: no program

  // The index of a declared tensor in problem.captured and buffers.captured, or of a scalar in buffers.scalars. Throws
  // Error.
  std::size_t tensor(std::string_view name) const { return number_of(name, true); }
  std::size_t scalar(std::string_view name) const { return number_of(name, false); }

  // Canonical texts ("": no such part), and the gradient, one line for each result.
  std::string score() const { return text(TESSERA_PROGRAM_SCORE); }
  std::string mask() const { return text(TESSERA_PROGRAM_MASK); }
  std::string gradient() const { return text(TESSERA_PROGRAM_GRADIENT); }
  std::uint64_t hash() const { return tessera_program_hash(program_); }

 private:
  static std::vector<ProgramName> names_of(const score::Value& score, const score::Value& mask) {
    std::vector<ProgramName> names = score.names();
    score::detail::join(names, mask.names());
    return names;
  }
  std::size_t number_of(std::string_view name, bool is_tensor) const {
    std::size_t number = 0;
    for (const ProgramName& declared : names_) {
      if (declared.is_tensor() != is_tensor) continue;
      if (declared.name == name) return number;
      ++number;
    }
    throw Error(Code::invalid_argument, std::string(is_tensor ? "tensor" : "scalar") + ": '" + std::string(name) +
                                            "', accepted what the program declares");
  }
  std::string text(tessera_program_text which) const {
    std::string text(tessera_program_describe(program_, which, nullptr, 0), '\0');
    tessera_program_describe(program_, which, text.data(), text.size() + 1);
    return text;
  }

  tessera_program* program_ = nullptr;
  std::vector<ProgramName> names_;
};

}  // namespace tessera
