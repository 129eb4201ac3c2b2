#include "core/score/parse.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <string>

#include "core/score/builder.hpp"
#include "core/score/operations.hpp"
#include "core/status.hpp"

namespace tessera::core::score {
namespace {

// The limit before folding and before unused values are removed: what a text of the longest length can contain.
constexpr int kMaxUnfolded = 8192;

constexpr Op kInputs[] = {Op::kS, Op::kB, Op::kH, Op::kHkv, Op::kI, Op::kJ, Op::kQPos, Op::kLenQ, Op::kLenK};

struct Token {
  enum Kind { kEnd, kName, kInteger, kNumber, kSymbol } kind = kEnd;
  std::string_view text;
  size_t column = 1;
};

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Whether the language itself uses a name.
bool is_reserved(std::string_view name) {
  if (name == "true" || name == "false" || name == "inf" || name == "nan") return true;
  const bool input =
      std::any_of(std::begin(kInputs), std::end(kInputs), [&](Op op) { return name == operation(op).text; });
  return input || is_function(name.data(), static_cast<int>(name.size()));
}

// An error, thrown from within an expression and caught by parse().
struct Wrong {
  size_t column;
  std::string what;
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) { next(); }
  const Token& token() const { return token_; }

  void next() {
    while (at_ < text_.size() && (std::strchr(" \t\r\n", text_[at_]) || text_[at_] == '#')) {
      if (text_[at_] == '\0') break;  // strchr finds the terminating zero
      if (text_[at_] == '#') at_ = std::min(text_.find('\n', at_), text_.size() - 1);
      ++at_;
    }
    const size_t begin = at_;
    token_ = {Token::kEnd, {}, begin + 1};
    if (at_ == text_.size()) return;
    const char c = text_[at_];
    if (is_letter(c)) {
      token_.kind = Token::kName;
      while (at_ < text_.size() && (is_letter(text_[at_]) || is_digit(text_[at_]))) ++at_;
    } else if (is_digit(c) || (c == '.' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1]))) {
      number();
    } else {
      token_.kind = Token::kSymbol;
      static constexpr std::string_view kTwo[] = {"&&", "||", "//", "<<", ">>", "<=", ">=", "==", "!="};
      const std::string_view two = text_.substr(at_, 2);
      at_ += std::find(std::begin(kTwo), std::end(kTwo), two) != std::end(kTwo) ? 2 : 1;
      constexpr std::string_view kOne = "+-*/%&|^~!<>=?:;,()[]";
      if (at_ - begin == 1 && kOne.find(c) == std::string_view::npos) {
        const bool printable = c > ' ' && c < 0x7f;
        throw Wrong{begin + 1, printable ? std::string("unexpected '") + c + "'" : "unexpected byte"};
      }
    }
    token_.text = text_.substr(begin, at_ - begin);
  }

 private:
  void number() {
    token_.kind = Token::kInteger;
    const auto digits = [&] {
      while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    };
    digits();
    if (at_ < text_.size() && text_[at_] == '.') token_.kind = Token::kNumber, ++at_, digits();
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      size_t exponent = at_ + 1;
      if (exponent < text_.size() && (text_[exponent] == '+' || text_[exponent] == '-')) ++exponent;
      if (exponent < text_.size() && is_digit(text_[exponent])) token_.kind = Token::kNumber, at_ = exponent, digits();
    }
    if (at_ < text_.size() && (is_letter(text_[at_]) || text_[at_] == '.')) {
      throw Wrong{at_ + 1, std::string("unexpected '") + text_[at_] + "' in a number"};
    }
  }

  std::string_view text_;
  size_t at_ = 0;
  Token token_;
};

class Parser {
 public:
  Parser(std::string_view text, std::span<const Name> names, Builder& builder)
      : lexer_(text), names_(names), builder_(builder) {}

  int program(Type result) {
    Operand root = statement();
    while (accept(";")) root = statement();
    if (token().kind != Token::kEnd) throw Wrong{token().column, "unexpected '" + std::string(token().text) + "'"};
    return converted(root, result, result == Type::kFloat ? "a score is a float" : "a mask is a truth value");
  }

 private:
  struct Operand {
    int place;
    size_t column;
  };

  // Counts the nesting depth of expressions.
  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxNesting) {
        throw Wrong{parser_.token().column, "nested more than " + std::to_string(kMaxNesting) + " deep"};
      }
    }
    ~Nested() { --parser_.nesting_; }
    Nested(const Nested&) = delete;

   private:
    Parser& parser_;
  };

  const Token& token() const { return lexer_.token(); }
  bool is(const char* symbol) const { return token().kind == Token::kSymbol && token().text == symbol; }
  bool accept(const char* symbol) {
    if (!is(symbol)) return false;
    lexer_.next();
    return true;
  }
  void expect(const char* symbol) {
    if (!accept(symbol)) throw Wrong{token().column, found() + ", accepted '" + symbol + "'"};
  }
  std::string found() const {
    return token().kind == Token::kEnd ? "the text ends" : "found '" + std::string(token().text) + "'";
  }

  const char* type_name(const Operand& x) const { return kTypeNames[static_cast<int>(builder_.type(x.place))]; }

  Operand made(Op op, size_t column, int a, int b = -1, int c = -1) {
    if (builder_.size() > kMaxUnfolded) throw Wrong{column, "too long"};
    return {builder_.add(op, a, b, c), column};
  }

  // Converts to a type: an integer becomes a float, nothing else is converted.
  int converted(const Operand& x, Type type, const char* rule) {
    if (builder_.type(x.place) == type) return x.place;
    if (type == Type::kFloat && builder_.type(x.place) == Type::kInt)
      return made(Op::kIntToFloat, x.column, x.place).place;
    throw Wrong{x.column,
                std::string("is ") + type_name(x) + ", accepted " + kTypeNames[static_cast<int>(type)] + ": " + rule};
  }

  // "x = expression", which declares a name for the statements after it (as the last statement, its value counts), or
  // an expression.
  Operand statement() {
    const Token first = token();
    if (first.kind == Token::kName) {
      Lexer ahead = lexer_;
      ahead.next();
      if (ahead.token().kind == Token::kSymbol && ahead.token().text == "=") {
        if (is_reserved(first.text) || declared(first.text) || locals_.contains(first.text)) {
          throw Wrong{first.column, "'" + std::string(first.text) + "' is a name already"};
        }
        lexer_ = ahead;
        lexer_.next();
        const Operand value = expression();
        locals_[first.text] = value.place;
        if (!is(";")) throw Wrong{token().column, found() + ", accepted ';' and an expression after it"};
        return value;
      }
    }
    return expression();
  }

  Operand expression() {
    const Nested nested(*this);
    const Operand condition = binary(kOrElse);
    if (!is("?")) return condition;
    const size_t column = token().column;
    lexer_.next();
    const Operand yes = expression();
    expect(":");
    const Operand no = expression();
    const Operand operands[] = {condition, yes, no};
    return call("where", column, operands, 3);
  }

  static int precedence_of(const Token& token) {
    if (token.kind != Token::kSymbol) return 0;
    static const std::map<std::string_view, int> kLevels = {
        {"||", kOrElse},     {"&&", kAndAlso},    {"<", kComparison},  {"<=", kComparison}, {">", kComparison},
        {">=", kComparison}, {"==", kComparison}, {"!=", kComparison}, {"|", kBitOr},       {"^", kBitXor},
        {"&", kBitAnd},      {"<<", kShift},      {">>", kShift},      {"+", kSum},         {"-", kSum},
        {"*", kProduct},     {"/", kProduct},     {"//", kProduct},    {"%", kProduct}};
    const auto level = kLevels.find(token.text);
    return level == kLevels.end() ? 0 : level->second;
  }

  Operand binary(int loosest) {
    Operand left = unary();
    bool compared = false;
    for (;;) {
      const Token symbol = token();
      const int precedence = precedence_of(symbol);
      if (precedence < loosest || precedence == 0) return left;
      if (precedence == kComparison && compared)
        throw Wrong{symbol.column, "comparisons do not chain: join them by &&"};
      lexer_.next();
      const Operand right = binary(precedence + 1);
      compared = precedence == kComparison;
      const bool exchanged = symbol.text == ">" || symbol.text == ">=";
      const Operand operands[] = {exchanged ? right : left, exchanged ? left : right};
      const std::string_view text = symbol.text == ">" ? "<" : symbol.text == ">=" ? "<=" : symbol.text;
      left = call(text, symbol.column, operands, 2);
      left.column = operands[exchanged].column;
    }
  }

  Operand unary() {
    const Token symbol = token();
    if (symbol.kind == Token::kSymbol &&
        (symbol.text == "-" || symbol.text == "+" || symbol.text == "!" || symbol.text == "~")) {
      const Nested nested(*this);
      lexer_.next();
      if (symbol.text == "-" && token().kind == Token::kInteger && token().text == "2147483648") {
        lexer_.next();
        return {builder_.constant(Type::kInt, INT32_MIN), symbol.column};
      }
      const Operand x = unary();
      if (symbol.text != "+") return call(symbol.text, symbol.column, &x, 1);
      if (builder_.type(x.place) == Type::kBool) throw Wrong{x.column, "is bool, accepted a number"};
      return x;
    }
    return primary();
  }

  Operand primary() {
    const Token first = token();
    if (accept("(")) {
      Operand inner = expression();
      expect(")");
      inner.column = first.column;
      return inner;
    }
    if (first.kind == Token::kInteger || first.kind == Token::kNumber) {
      lexer_.next();
      double x = 0;
      const std::from_chars_result read = std::from_chars(first.text.data(), first.text.data() + first.text.size(), x);
      if (read.ec == std::errc::result_out_of_range && first.kind == Token::kNumber) {
        throw Wrong{first.column, "'" + std::string(first.text.substr(0, 40)) + "' is beyond float64"};
      }
      if (first.kind == Token::kNumber) return {builder_.number(x), first.column};
      if (read.ec != std::errc() || x > INT32_MAX) {
        throw Wrong{first.column,
                    "'" + std::string(first.text.substr(0, 40)) +
                        "' is beyond 32 bits, accepted as a float: " + std::string(first.text.substr(0, 40)) + ".0"};
      }
      return {builder_.constant(Type::kInt, x), first.column};
    }
    if (first.kind != Token::kName) throw Wrong{first.column, found() + ", accepted a value"};
    lexer_.next();
    return named(first);
  }

  Operand named(const Token& name) {
    if (const auto local = locals_.find(name.text); local != locals_.end()) return {local->second, name.column};
    if (const Name* const found = declared(name.text)) {
      if (found->is_tensor) return element(*found, name);
      return {builder_.scalar(*found), name.column};
    }
    if (name.text == "true" || name.text == "false")
      return {builder_.constant(Type::kBool, name.text == "true"), name.column};
    if (name.text == "inf") return {builder_.number(std::numeric_limits<double>::infinity()), name.column};
    if (name.text == "nan") return {builder_.number(std::numeric_limits<double>::quiet_NaN()), name.column};
    for (const Op op : kInputs) {
      if (name.text == operation(op).text) return {builder_.add(op), name.column};
    }
    if (!is_function(name.text.data(), static_cast<int>(name.text.size()))) {
      std::string accepted;
      for (const Op op : kInputs) accepted += std::string(operation(op).text) + ", ";
      for (const Name& known : names_) accepted += known.text + ", ";
      throw Wrong{name.column, "'" + std::string(name.text.substr(0, kMaxNameLength)) + "' is no name here, accepted " +
                                   accepted + "and the functions of the language"};
    }
    expect("(");
    Operand operands[3];
    int count = 0;
    do {
      if (count == 3) throw Wrong{token().column, "'" + std::string(name.text) + "' has more operands than it takes"};
      operands[count++] = expression();
    } while (accept(","));
    expect(")");
    return call(name.text, name.column, operands, count);
  }

  Operand element(const Name& tensor, const Token& name) {
    std::vector<int> indices;
    if (tensor.rank > 0 || is("[")) {
      expect("[");
      while (!is("]")) {
        const Operand index = expression();
        if (builder_.type(index.place) != Type::kInt) {
          throw Wrong{index.column,
                      std::string("is ") + type_name(index) + ", accepted int: an index of '" + tensor.text + "'"};
        }
        indices.push_back(index.place);
        if (!accept(",")) break;
      }
      expect("]");
    }
    if (static_cast<int>(indices.size()) != tensor.rank) {
      throw Wrong{name.column, "'" + tensor.text + "' has " + std::to_string(indices.size()) + " indices, accepted " +
                                   std::to_string(tensor.rank)};
    }
    return {builder_.load(tensor, indices), name.column};
  }

  // An operator or a function of operands with their own types, or with integers converted to floats.
  Operand call(std::string_view text, size_t column, const Operand* operands, int count) {
    Type types[3] = {};
    int places[3] = {-1, -1, -1};
    bool all_bool = true;
    for (int n = 0; n < count; ++n) {
      places[n] = operands[n].place;
      types[n] = builder_.type(places[n]);
      all_bool = all_bool && types[n] == Type::kBool;
    }
    if (all_bool && count == 2 && (text == "==" || text == "!=")) {
      const Operand differs = made(Op::kXor, column, places[0], places[1]);
      return text == "!=" ? differs : made(Op::kNot, column, differs.place);
    }
    if (all_bool) text = text == "&" ? "&&" : text == "|" ? "||" : text == "~" ? "!" : text;
    const int length = static_cast<int>(text.size());
    const Operation* row = find_operation(text.data(), length, types, count);
    for (int n = 0; !row && n < count; ++n) {  // a condition is not converted
      if (types[n] == Type::kInt) types[n] = Type::kFloat;
      if (n + 1 == count) row = find_operation(text.data(), length, types, count);
    }
    if (!row) {
      std::string given;
      for (int n = 0; n < count; ++n) given += std::string(n ? " and " : "") + type_name(operands[n]);
      throw Wrong{column, "'" + std::string(text) + "' of " + given + accepted_by(text)};
    }
    if (count == 2 && (row->op == Op::kFloorDiv || row->op == Op::kMod) && builder_.at(places[1]).op == Op::kConstant &&
        builder_.at(places[1]).constant == 0) {
      throw Wrong{operands[1].column, "divides by 0"};
    }
    for (int n = 0; n < count; ++n) places[n] = converted({places[n], operands[n].column}, row->operand[n], "");
    return made(row->op, column, places[0], places[1], places[2]);
  }

  // ", accepted int and int; bool and bool": the types of every row of this name.
  static std::string accepted_by(std::string_view text) {
    std::string accepted;
    for (int op = 0; op < static_cast<int>(Op::kCount); ++op) {
      const Operation& row = operation(static_cast<Op>(op));
      if (!row.text || text != row.text || row.operands == 0) continue;
      accepted += accepted.empty() ? ", accepted " : "; ";
      for (int n = 0; n < row.operands; ++n) {
        accepted += std::string(n ? " and " : "") + kTypeNames[static_cast<int>(row.operand[n])];
      }
    }
    return accepted;
  }

  const Name* declared(std::string_view text) const {
    for (const Name& name : names_) {
      if (name.text == text) return &name;
    }
    return nullptr;
  }

  Lexer lexer_;
  std::span<const Name> names_;
  Builder& builder_;
  std::map<std::string_view, int> locals_;
  int nesting_ = 0;
};

tessera_status check_names(std::span<const Name> names) {
  for (size_t n = 0; n < names.size(); ++n) {
    const std::string& text = names[n].text;
    const bool well_formed = !text.empty() && text.size() <= kMaxNameLength && is_letter(text[0]) &&
                             std::all_of(text.begin(), text.end(), [](char c) { return is_letter(c) || is_digit(c); });
    if (!well_formed) {
      return invalid("name '%.40s': accepted a letter and up to %d letters, digits and underscores after it",
                     text.c_str(), kMaxNameLength - 1);
    }
    if (is_reserved(text)) return invalid("name '%s': it means something in every program", text.c_str());
    for (size_t other = 0; other < n; ++other) {
      if (names[other].text == text) return invalid("name '%s': given twice", text.c_str());
    }
    if (names[n].is_tensor && (names[n].rank < 0 || names[n].rank > kMaxRank)) {
      return invalid("tensor '%s': rank %d, accepted 0 .. %d", text.c_str(), names[n].rank, kMaxRank);
    }
  }
  return ok();
}

tessera_status parse_one(const char* which, std::string_view text, Type result, std::span<const Name> names,
                         Builder& builder, int& root) {
  if (text.size() > kMaxTextBytes) {
    return invalid("%s: a text of %zu bytes, accepted at most %d", which, text.size(), kMaxTextBytes);
  }
  try {
    Parser parser(text, names, builder);
    root = parser.program(result);
  } catch (const Wrong& wrong) {
    return invalid("%s, column %zu: %s", which, wrong.column, wrong.what.c_str());
  }
  return ok();
}

}  // namespace

tessera_status parse(std::string_view score, std::string_view mask, std::span<const Name> names, Program& program) {
  TESSERA_RETURN_IF_ERROR(check_names(names));
  Builder builder;
  int score_root = -1, mask_root = -1;
  if (!score.empty()) TESSERA_RETURN_IF_ERROR(parse_one("score", score, Type::kFloat, names, builder, score_root));
  if (!mask.empty()) TESSERA_RETURN_IF_ERROR(parse_one("mask", mask, Type::kBool, names, builder, mask_root));
  if (score_root >= 0 && builder.at(score_root).op == Op::kS) score_root = -1;
  if (mask_root >= 0 && builder.at(mask_root).op == Op::kConstant && builder.at(mask_root).constant != 0)
    mask_root = -1;
  Program made = reachable(builder.program(), {&score_root, &mask_root});
  made.score = score_root, made.mask = mask_root;
  if (made.operations() > kMaxOperations) {
    return invalid("score program: %d operations, accepted at most %d", made.operations(), kMaxOperations);
  }
  if (made.tensors.size() > kMaxTensors) {
    return invalid("score program: %zu tensors, accepted at most %d", made.tensors.size(), kMaxTensors);
  }
  if (made.scalars.size() > kMaxScalars) {
    return invalid("score program: %zu scalars, accepted at most %d", made.scalars.size(), kMaxScalars);
  }
  program = std::move(made);
  return ok();
}

}  // namespace tessera::core::score
