#include "core/score/print.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "core/score/operations.hpp"

namespace tessera::core::score {
namespace {

// The shortest text that reads back as the same number, independent of the locale.
std::string number_text(Type type, double x) {
  if (type == Type::kBool) return x != 0 ? "true" : "false";
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x < 0 ? "-inf" : "inf";
  char text[40];
  const std::to_chars_result end = type == Type::kInt ? std::to_chars(text, text + sizeof text, static_cast<int64_t>(x))
                                                      : std::to_chars(text, text + sizeof text, x);
  std::string result(text, end.ptr);
  if (type == Type::kFloat && result.find_first_of(".e") == std::string::npos) result += ".0";
  return result;
}

class Printer {
 public:
  explicit Printer(const Program& program)
      : program_(program), uses_(program.values.size()), local_(program.values.size()) {}

  Texts texts(const std::vector<int>& roots) {
    const int last = *std::ranges::max_element(roots);
    count(roots, last);
    Texts result;
    std::vector<int> depth(program_.values.size());  // nesting depth of the text of each value
    for (int place = 0; place <= last; ++place) {
      const Value& value = at(place);
      const size_t n = static_cast<size_t>(place);
      if (uses_[n] == 0 || value.op <= Op::kScalar) continue;
      for (int operand = 0; operand < operand_count(value); ++operand) {
        depth[n] = std::max(depth[n], depth[static_cast<size_t>(value.operands[operand])] + 1);
      }
      if ((uses_[n] < 2 && depth[n] < kMostDepth) || (uses_[n] == 1 && std::ranges::count(roots, place) > 0)) continue;
      std::string name;
      do name = "v" + std::to_string(locals_++);
      while (named(name));
      result.statements += name + " = " + expression(place, kFunction) + "; ";
      local_[n] = name;
      depth[n] = 0;
    }
    for (const int root : roots) result.values.push_back(expression(root, kFunction));
    return result;
  }

 private:
  // One operation takes at most two of the parser's levels, "-(...)".
  static constexpr int kMostDepth = kMaxNesting / 2 - 4;

  const Value& at(int place) const { return program_.values[static_cast<size_t>(place)]; }

  // Counts the uses of each value: one for each root and for each operand that it is.
  void count(const std::vector<int>& roots, int last) {
    for (const int root : roots) ++uses_[static_cast<size_t>(root)];
    for (int place = last; place >= 0; --place) {
      if (uses_[static_cast<size_t>(place)] == 0) continue;
      for (int n = 0; n < operand_count(at(place)); ++n) ++uses_[static_cast<size_t>(at(place).operands[n])];
    }
  }

  bool named(const std::string& text) const {
    for (const std::vector<Name>* names : {&program_.tensors, &program_.scalars}) {
      for (const Name& name : *names) {
        if (name.text == text) return true;
      }
    }
    return false;
  }

  std::string list(const Value& value) {
    std::string all;
    for (int n = 0; n < operand_count(value); ++n) all += (n ? ", " : "") + expression(value.operands[n], kFunction);
    return all;
  }

  // The text inside an operator of precedence `around`; looser operators are put in parentheses.
  std::string expression(int place, int around) {
    const Value& value = at(place);
    if (!local_[static_cast<size_t>(place)].empty()) return local_[static_cast<size_t>(place)];
    const Operation& row = operation(value.op);
    switch (value.op) {
      case Op::kConstant: {
        const std::string text = number_text(value.type, value.constant);
        return text[0] == '-' && around > kUnary ? "(" + text + ")" : text;
      }
      case Op::kScalar:
        return program_.scalars[static_cast<size_t>(value.name)].text;
      case Op::kLoad:
        return program_.tensors[static_cast<size_t>(value.name)].text + "[" + list(value) + "]";
      default:
        break;
    }
    if (row.operands == 0) return row.text;
    if (row.precedence == kFunction) return std::string(row.text) + "(" + list(value) + ")";
    std::string text;
    if (row.operands == 1) {
      text = row.text + expression(value.operands[0], kUnary + 1);
    } else {
      // Operators associate to the left; comparisons do not associate.
      const int left = row.precedence == kComparison ? kComparison + 1 : row.precedence;
      text = expression(value.operands[0], left) + " " + row.text + " " +
             expression(value.operands[1], row.precedence + 1);
    }
    return row.precedence < around ? "(" + text + ")" : text;
  }

  const Program& program_;
  std::vector<int> uses_;
  std::vector<std::string> local_;  // the statement that declares a value's name
  int locals_ = 0;
};

}  // namespace

Texts to_texts(const Program& program, const std::vector<int>& roots) { return Printer(program).texts(roots); }

std::string to_text(const Program& program, int root) {
  const Texts texts = to_texts(program, {root});
  return texts.statements + texts.values[0];
}

std::string key(const Program& program) {
  std::string text = "1\n";  // the version of the language
  text += (program.score < 0 ? "" : to_text(program, program.score)) + "\n";
  text += (program.mask < 0 ? "" : to_text(program, program.mask)) + "\n";
  for (const std::vector<Name>* names : {&program.tensors, &program.scalars}) {
    for (const Name& name : *names) {
      text += name.text + ":" + kTypeNames[static_cast<int>(name.type)] +
              (name.is_tensor ? std::to_string(name.rank) : "") + "\n";
    }
  }
  return text;
}

bool key_changes_score(std::string_view key) {
  const size_t begin = key.find('\n') + 1;
  const std::string_view score = key.substr(begin, key.find('\n', begin) - begin);
  return !score.empty() && score != "s";
}

}  // namespace tessera::core::score
