#include "core/score/cuda_text.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/score/affine.hpp"
#include "core/score/capped.hpp"
#include "core/score/facts.hpp"
#include "core/score/operations.hpp"

namespace tessera::core::score {
namespace {

constexpr const char* kCudaTypes[] = {"float", "int", "bool"};
constexpr const char* kBoundsTypes[] = {"FloatBounds", "IntBounds", "BoolBounds"};
constexpr const char* kAnyBounds[] = {"any_float()", "any_int()", "any_bool()"};
constexpr InputSet kOfRow = input_bit(Op::kI) | input_bit(Op::kQPos), kOfColumn = input_bit(Op::kJ),
                   kOfPair = input_bit(Op::kS) | input_bit(Op::kG);

std::string number(int x) { return std::to_string(x); }

// A literal of the value as float32, exact and independent of the locale; in parentheses if it has a sign.
std::string float_literal(double constant) {
  const float x = static_cast<float>(constant);
  if (std::isnan(x)) return "not_a_number()";
  if (std::isinf(x)) return x < 0 ? "(-infinity())" : "infinity()";
  char text[40];
  const std::to_chars_result end = std::to_chars(text, text + sizeof text, x);
  std::string literal(text, end.ptr);
  if (literal.find_first_of(".e") == std::string::npos) literal += ".0";
  literal += "f";
  return std::signbit(x) ? "(" + literal + ")" : literal;
}

std::string literal(const Value& value) {
  if (value.type == Type::kFloat) return float_literal(value.constant);
  if (value.type == Type::kBool) return value.constant != 0 ? "true" : "false";
  if (value.constant == INT32_MIN) return "(-2147483647 - 1)";
  const std::string text = number(static_cast<int>(value.constant));
  return value.constant < 0 ? "(" + text + ")" : text;
}

// A condition, and whether the guarded side is evaluated if it is true.
struct Condition {
  int place;
  bool when;
  auto operator<=>(const Condition&) const = default;
};

// The condition under which operand `n` of a value is evaluated; nullopt: always.
std::optional<Condition> condition_of(const Value& value, int n) {
  switch (value.op) {
    case Op::kWhere:
    case Op::kWhereInt:
    case Op::kWhereBool:
      if (n > 0) return Condition{value.operands[0], n == 1};
      break;
    case Op::kAnd:
    case Op::kOr:
      if (n == 1) return Condition{value.operands[0], value.op == Op::kAnd};
      break;
    default:
      break;
  }
  return std::nullopt;
}

// The text of one program's values.
class Values {
 public:
  enum Part { kHead, kRow, kColumn, kDiagonal, kPair };

  // all_parts: kHead and kDiagonal, too; otherwise their values belong to rows or columns, and to pairs. The values
  // from `first_derived` on are of a derivative.
  Values(const Program& program, std::span<const int32_t> dtypes, std::vector<int> roots, bool all_parts,
         size_t first_derived = SIZE_MAX)
      : program_(program),
        dtypes_(dtypes),
        roots_(std::move(roots)),
        all_parts_(all_parts),
        first_derived_(first_derived),
        diagonal_(all_parts ? of_diagonal(program) : std::vector<bool>(program.values.size())),
        inputs_(program.values.size()),
        taken_(program.values.size()),
        hoisted_(program.values.size()),
        exact_(program.values.size()) {
    find_inputs();
    find_exact();
    find_conditions();
    find_hoisted();
  }

  // "struct Row { ... };" and the function that makes one; `head`: its parameter of the head's values, if it has one.
  std::string hoisted_text(Part part, const std::string& type, const std::string& function,
                           const std::string& head = "") const {
    std::string members, values;
    const std::vector<int> made = made_of(part);
    for (const int place : made) {
      members += std::string("    ") + kCudaTypes[static_cast<int>(at(place).type)] + " " + name(place) + ";\n";
      values += (values.empty() ? "" : ", ") + name(place);
    }
    return "  struct " + type + " {\n" + members + "  };\n  TESSERA_DEVICE static " + type + " " + function +
           "([[maybe_unused]] const ScoreProgramParams& p, " + head + "[[maybe_unused]] const ProgramPlace& at) {\n" +
           statements(made, part) + "    return {" + values + "};\n  }\n";
  }

  // Whether `Diagonal` loads elements, all of them unconditionally and by indices of which one is i - j or j - i and a
  // value of the head, and the others are values of the head: pairs then differ by steps along one axis.
  bool steps_along_diagonal() const {
    const std::vector<bool> needed = needed_by(made_of(kDiagonal), kDiagonal, true);
    const std::vector<std::optional<int>> steps = score::steps_along_diagonal(program_);
    bool loads = false;
    for (int place = 0; place < size(); ++place) {
      const Value& value = at(place);
      if (!needed[index(place)] || value.op != Op::kLoad || is_read(place, kDiagonal)) continue;
      if (!known_conditions(place, kDiagonal).empty()) return false;
      int axes = 0;
      for (int n = 0; n < operand_count(value); ++n) {
        const std::optional<int> step = steps[index(value.operands[n])];
        if (!step || std::abs(*step) > 1) return false;
        axes += *step != 0;
      }
      if (axes > 1) return false;
      loads = loads || axes == 1;
    }
    return loads;
  }
  // With that: "struct DiagonalAddresses { ... };", diagonal_addresses and diagonal_inside.
  std::string stepping_text(uint32_t dense_rows) const {
    const std::vector<int> made = made_of(kDiagonal);
    const std::vector<bool> needed = needed_by(made, kDiagonal, true);
    const std::vector<std::optional<int>> steps = score::steps_along_diagonal(program_);
    std::string members, inside, addresses, values, loaded;
    std::vector<int> used;
    std::vector<bool> computed(program_.values.size());  // without what only indices need
    for (const int place : made) computed[index(place)] = true;
    for (int place = size() - 1; place >= 0; --place) {
      if (!computed[index(place)] || at(place).op == Op::kLoad || is_read(place, kDiagonal)) continue;
      for (int n = 0; n < operand_count(at(place)); ++n) computed[index(at(place).operands[n])] = true;
    }
    for (int place = 0; place < size(); ++place) {
      const Value& value = at(place);
      if (!needed[index(place)] || !is_computed(place) || is_read(place, kDiagonal)) continue;
      if (value.op != Op::kLoad) {
        if (computed[index(place)]) loaded += statement(place, kDiagonal, true);
        continue;
      }
      int axis = -1;
      std::string least, most;
      for (int n = 0; n < operand_count(value); ++n) {
        const int of = value.operands[n], step = *steps[index(of)];
        used.push_back(of);
        const std::string at_place = operand(of, kDiagonal), add = step > 0 ? "wrap_add(" : "wrap_sub(";
        least += ", " + (step == 0 ? at_place : add + at_place + ", least)");
        most += ", " + (step == 0 ? at_place : add + at_place + ", most)");
        if (step != 0) axis = n;
      }
      const std::string type = "element_at<ElementType{" + number(dtypes_[static_cast<size_t>(value.name)]) + "}>(";
      members += "    const char* " + name(place) + ";\n";
      addresses +=
          "    to." + name(place) + " = address_of<kNear>(" + tensor(value) + indices(place, true, kDiagonal) + ");\n";
      inside += (inside.empty() ? "" : " && ") + ("holds(" + tensor(value) + least + ")") +
                (axis < 0 ? "" : " && holds(" + tensor(value) + most + ")");
      loaded += std::string("    const ") + kCudaTypes[static_cast<int>(value.type)] + " " + name(place) + " = " +
                type + "from." + name(place);
      if (axis >= 0) {
        const bool forwards = *steps[index(value.operands[axis])] > 0;
        const bool dense = axis == operand_count(value) - 1 && dense_rows >> value.name & 1;
        const auto dtype = static_cast<tessera_dtype>(dtypes_[static_cast<size_t>(value.name)]);
        loaded += " + " +
                  (dense ? number(static_cast<int>(tessera_dtype_bytes(dtype)))
                         : "stride_bytes<kNear>(" + tensor(value) + ".stride[" + number(axis) + "])") +
                  (forwards ? " * (at.i_offset - at.j_offset)" : " * (at.j_offset - at.i_offset)");
      }
      loaded += ");\n";
    }
    for (const int place : made) values += (values.empty() ? "" : ", ") + name(place);
    const std::string head = "[[maybe_unused]] const ScoreProgramParams& p, [[maybe_unused]] const Head& head, ";
    const std::string at = "[[maybe_unused]] const ProgramPlace& at";
    return "  struct DiagonalAddresses {\n" + members + "  };\n  TESSERA_DEVICE static bool diagonal_addresses(" +
           head + at + ", int least, int most, DiagonalAddresses& to) {\n" + statements(used, kDiagonal) + addresses +
           "    return " + inside + ";\n  }\n  TESSERA_DEVICE static Diagonal diagonal_inside(" + head +
           "const DiagonalAddresses& from, " + at + ") {\n" + loaded + "    return {" + values + "};\n  }\n";
  }

  // The number of values that hoisted_text's struct has.
  int hoisted_count(Part part) const { return static_cast<int>(std::count(hoisted_.begin(), hoisted_.end(), part)); }

  // "struct MaskRowBounds { ... };" with the bounds of each value of hoisted_text's struct `values`.
  std::string hoisted_bounds_text(Part part, const std::string& values) const {
    std::string members, include, join, visit;
    for (int place = 0; place < size(); ++place) {
      if (hoisted_[index(place)] != part) continue;
      members += std::string("    ") + kBoundsTypes[static_cast<int>(at(place).type)] + " " + name(place) + ";\n";
      include += "      bounds_join(" + name(place) + ", bounds_exactly(x." + name(place) + "));\n";
      join += "      bounds_join(" + name(place) + ", x." + name(place) + ");\n";
      visit += "      visitor(" + name(place) + ");\n";
    }
    const auto method = [](const std::string& declaration, const std::string& body) {
      return "    " + declaration + " {\n" + body + "    }\n";
    };
    return "  struct " + values + "Bounds {\n" + members +
           method("TESSERA_DEVICE void include([[maybe_unused]] const " + values + "& x)", include) +
           method("TESSERA_DEVICE void join([[maybe_unused]] const " + values + "Bounds& x)", join) +
           method("template <class Visitor>\n    TESSERA_DEVICE void visit([[maybe_unused]] Visitor&& visitor)",
                  visit) +
           "  };\n";
  }

  // Statements that return the bounds of a boolean, in a function that has the bounds of rows, columns and places.
  std::string bounds_text(int root) const {
    std::vector<bool> needed(program_.values.size());
    needed[index(root)] = true;
    const auto is_bounded = [this](int place) {
      return is_computed(place) && !is_read(place, kPair) && operation(at(place).op).cuda_bounds;
    };
    for (int place = size() - 1; place >= 0; --place) {
      if (!needed[index(place)] || !is_bounded(place)) continue;
      for (int n = 0; n < operand_count(at(place)); ++n) needed[index(at(place).operands[n])] = true;
    }
    const auto bounds = [&](int place) -> std::string {
      const Value& value = at(place);
      if (is_bounded(place) || is_read(place, kPair)) return operand(place, kPair);
      if (value.op == Op::kConstant || value.op == Op::kScalar) return "bounds_exactly(" + name_or_input(place) + ")";
      const bool is_place = !is_computed(place) && !depends_on_s(place);
      return is_place ? operation(value.op).cuda : kAnyBounds[static_cast<int>(value.type)];
    };
    std::string text;
    for (int place = 0; place < size(); ++place) {
      if (!needed[index(place)] || !is_bounded(place)) continue;
      text += std::string("    const ") + kBoundsTypes[static_cast<int>(at(place).type)] + " " + name(place) +
              " = bounds_" + operation(at(place).op).cuda_bounds + "(";
      for (int n = 0; n < operand_count(at(place)); ++n) text += (n > 0 ? ", " : "") + bounds(at(place).operands[n]);
      text += ");\n";
    }
    return text + "    return " + bounds(root) + ";\n";
  }

  // Statements that make `results`, in a function that has the pair's row and column, and the value at `given`.
  std::string pair_text(const std::vector<int>& results, int given = -1) const {
    return statements(results, kPair, given);
  }

  // The name of a value in the function of the pair.
  std::string result(int place) const { return operand(place, kPair); }

  // A check does not know values that depend on s: an index that depends on s is not checked, nor is a load whose
  // evaluation depends on such a condition.
  std::string check_text(int score, int mask) const {
    // when a value is evaluated, as a disjunction; "": never so far
    std::vector<std::string> when(program_.values.size());
    std::vector<int> used;  // the values that the check consists of
    const auto take = [&when](int place, const std::string& condition) {
      std::string& known = when[index(place)];
      if (known == "true" || condition == "true") {
        known = "true";
      } else {
        known += (known.empty() ? "" : " || ") + condition;
      }
    };
    if (mask >= 0) take(mask, "true");
    if (score >= 0 && mask < 0) take(score, "true");
    if (score >= 0 && mask >= 0 && !depends_on_s(mask) && loads_below(score)) {
      take(score, name_or_input(mask));
      used.push_back(mask);
    }
    std::string takes, outside;
    for (int place = size() - 1; place >= 0; --place) {
      if (when[index(place)].empty() || !loads_below(place)) continue;
      const Value& value = at(place);
      std::string taken = when[index(place)];
      if (taken != "true") {
        takes += "    const bool taken" + number(place) + " = " + taken + ";\n";
        taken = "taken" + number(place);
      }
      const int count = operand_count(value);
      const bool known =
          std::none_of(value.operands, value.operands + count, [this](int operand) { return depends_on_s(operand); });
      if (value.op == Op::kLoad && known) {
        outside += "    outside |= " + (taken == "true" ? "" : taken + " && ") + "!holds(" + tensor(value) +
                   indices(place, false) + ");\n";
        used.insert(used.end(), value.operands, value.operands + count);
      }
      for (int n = 0; n < count; ++n) {
        const std::optional<Condition> side = condition_of(value, n);
        if (!side) {
          take(value.operands[n], taken);
        } else if (!depends_on_s(side->place) && loads_below(value.operands[n])) {
          const std::string condition = (side->when ? "" : "!") + name_or_input(side->place);
          take(value.operands[n], taken == "true" ? condition : "(" + taken + " && " + condition + ")");
          used.push_back(side->place);
        }
      }
    }
    if (outside.empty()) return "";
    const std::vector<bool> needed = needed_by(used, kPair, false);
    std::string text;
    for (int place = 0; place < size(); ++place) {
      if (needed[index(place)] && is_computed(place)) text += statement(place, kPair, false);
    }
    return text + takes + "    bool outside = false;\n" + outside +
           "    if (outside && p.read_outside) *p.read_outside = 1;\n";
  }

  // ", index, index" of a load.
  std::string indices(const std::vector<int>& places) const {
    std::string text;
    for (const int place : places) text += ", " + result(place);
    return text;
  }

 private:
  static size_t index(int place) { return static_cast<size_t>(place); }
  const Value& at(int place) const { return program_.values[index(place)]; }
  int size() const { return static_cast<int>(program_.values.size()); }
  bool is_computed(int place) const { return at(place).op > Op::kScalar; }
  static std::string name(int place) { return "v" + number(place); }

  bool depends_on_s(int place) const { return (inputs_[index(place)] & kOfPair) != 0; }

  // Whether a value may be computed in a part. Those of a head, which depend on neither row nor column, may be in all.
  bool belongs_to(int place, Part part) const {
    const InputSet inputs = inputs_[index(place)];
    const bool of_head = (inputs & (kOfRow | kOfColumn | kOfPair)) == 0;
    switch (part) {
      case kHead:
        return all_parts_ && of_head;
      case kRow:
        return (inputs & (kOfColumn | kOfPair)) == 0;
      case kColumn:
        return (inputs & (kOfRow | kOfPair)) == 0;
      case kDiagonal:
        return of_head || diagonal_[index(place)];
      default:
        return true;
    }
  }

  void find_inputs() {
    for (int place = 0; place < size(); ++place) {
      const Value& value = at(place);
      if (value.op <= Op::kG) inputs_[index(place)] = input_bit(value.op);
      for (int n = 0; n < operand_count(value); ++n) inputs_[index(place)] |= inputs_[index(value.operands[n])];
    }
  }

  // Marks the floats on which a comparison, or a conversion to an integer, depends: quotients among them are correctly
  // rounded, so that one that is an integer is found to be. The comparisons of a derivative need no such quotients.
  void find_exact() {
    const auto decides = [](Op op) {
      return op == Op::kFloor || op == Op::kSign || op == Op::kFloatToInt || op == Op::kLess || op == Op::kLessEqual ||
             op == Op::kEqual || op == Op::kNotEqual;
    };
    for (int place = size() - 1; place >= 0; --place) {
      if (index(place) >= first_derived_ || !(exact_[index(place)] || decides(at(place).op))) continue;
      for (int n = 0; n < operand_count(at(place)); ++n) exact_[index(at(place).operands[n])] = true;
    }
  }

  // For each value, the conditions that all of its uses have in common; none for an unused value.
  void find_conditions() {
    const auto take = [this](int place, const std::set<Condition>& conditions) {
      std::optional<std::set<Condition>>& known = taken_[index(place)];
      if (!known) {
        known = conditions;
      } else {
        std::erase_if(*known, [&](const Condition& condition) { return !conditions.contains(condition); });
      }
    };
    for (const int root : roots_) take(root, {});
    for (int place = size() - 1; place >= 0; --place) {
      if (!taken_[index(place)]) continue;
      const Value& value = at(place);
      for (int n = 0; n < operand_count(value); ++n) {
        std::set<Condition> conditions = *taken_[index(place)];
        if (const std::optional<Condition> side = condition_of(value, n)) conditions.insert(*side);
        take(value.operands[n], conditions);
      }
    }
  }

  Part part_of(int place) const {
    for (const Part part : {kHead, kRow, kColumn, kDiagonal}) {
      if (belongs_to(place, part)) return part;
    }
    return kPair;
  }

  // The last values of each other part that are used by values of pairs, or of a head by those of any other part.
  void find_hoisted() {
    std::fill(hoisted_.begin(), hoisted_.end(), kPair);
    const auto use = [this](int place) {
      if (is_computed(place)) hoisted_[index(place)] = part_of(place);
    };
    for (const int root : roots_) use(root);
    for (int place = 0; place < size(); ++place) {
      if (!taken_[index(place)]) continue;
      const Part part = part_of(place);
      for (int n = 0; n < operand_count(at(place)); ++n) {
        const int operand = at(place).operands[n];
        if (part == kPair || (part != kHead && part_of(operand) == kHead)) use(operand);
      }
    }
  }

  // The conditions of a load that are known before it in this part.
  std::vector<Condition> known_conditions(int load, Part part) const {
    std::vector<Condition> known;
    for (const Condition& condition : *taken_[index(load)]) {
      if (condition.place < load && belongs_to(condition.place, part)) known.push_back(condition);
    }
    return known;
  }

  // Whether a value is read from the struct of another part.
  bool is_read(int place, Part part) const {
    const Part from = hoisted_[index(place)];
    return from != kPair && (part == kPair || (part != kHead && from == kHead));
  }

  // The members of a part's struct.
  std::vector<int> made_of(Part part) const {
    std::vector<int> made;
    for (int place = 0; place < size(); ++place) {
      if (hoisted_[index(place)] == part) made.push_back(place);
    }
    return made;
  }

  // All values that `results` depend on, in a part. hoists: values of rows and columns are already computed.
  std::vector<bool> needed_by(const std::vector<int>& results, Part part, bool hoists, int given = -1) const {
    std::vector<bool> needed(program_.values.size());
    for (const int place : results) needed[index(place)] = true;
    for (int place = size() - 1; place >= 0; --place) {
      if (!needed[index(place)] || (hoists && is_read(place, part)) || place == given) continue;
      for (int n = 0; n < operand_count(at(place)); ++n) needed[index(at(place).operands[n])] = true;
      if (at(place).op != Op::kLoad) continue;
      for (const Condition& condition : known_conditions(place, hoists ? part : kPair)) {
        needed[index(condition.place)] = true;
      }
    }
    return needed;
  }

  bool loads_below(int place) const {
    const std::vector<bool> needed = needed_by({place}, kPair, false);
    for (int n = 0; n <= place; ++n) {
      if (needed[index(n)] && at(n).op == Op::kLoad) return true;
    }
    return false;
  }

  std::string statements(const std::vector<int>& results, Part part, int given = -1) const {
    const std::vector<bool> needed = needed_by(results, part, true, given);
    std::string text;
    for (int place = 0; place < size(); ++place) {
      if (!needed[index(place)] || !is_computed(place) || is_read(place, part) || place == given) continue;
      text += statement(place, part, true);
    }
    return text;
  }

  std::string statement(int place, Part part, bool hoists) const {
    return std::string("    const ") + kCudaTypes[static_cast<int>(at(place).type)] + " " + name(place) + " = " +
           expression(place, part, hoists) + ";\n";
  }

  // Whether all pairs of a call have one such value.
  bool is_uniform(int place) const { return at(place).op == Op::kConstant || at(place).op == Op::kScalar; }

  // How an integer changes with the offsets of its place, if it is a coordinate or the difference of two, which
  // overflows nowhere: "at.j_offset - at.i_offset". Otherwise empty.
  std::string offset_text(int place) const {
    const Value& value = at(place);
    if (value.op == Op::kI || value.op == Op::kQPos) return "at.i_offset";
    if (value.op == Op::kJ) return "at.j_offset";
    if (value.op != Op::kSubInt || is_computed(value.operands[0]) || is_computed(value.operands[1])) return "";
    const std::string from = offset_text(value.operands[0]), taken = offset_text(value.operands[1]);
    return from.empty() || taken.empty() ? "" : from + " - " + taken;
  }
  // An integer as a float, so that pairs whose places differ in their offsets share the conversion; empty: none can.
  template <class Named>
  std::string converted(int place, const Named& named) const {
    const bool is_size = at(place).op == Op::kAbsInt;
    if (is_size) place = at(place).operands[0];
    const std::string offset = offset_text(place);
    if (offset.empty() || (is_size && !is_computed(place))) return "";
    const std::string text = "float_at(" + named(place) + ", " + offset + ")";
    return is_size ? "fabsf(" + text + ")" : text;
  }

  // The text of an operation, as operation() has it, or a cheaper one.
  std::string text_of(int place) const {
    const Value& value = at(place);
    const int divisor = value.operands[1];
    if (value.op == Op::kDiv && is_uniform(divisor)) {
      return std::string(exact_[index(place)] ? "divide_by" : "divide_near") + "(%0, SharedDivisor(%1))";
    }
    const bool rounds_down = value.op == Op::kFloorDiv || value.op == Op::kMod;
    if (rounds_down && at(divisor).op == Op::kConstant && at(divisor).constant > 0) {
      const auto by = static_cast<uint32_t>(at(divisor).constant);
      if (std::has_single_bit(by)) {
        return value.op == Op::kMod ? "%0 & " + number(static_cast<int>(by - 1))
                                    : "%0 >> " + number(std::countr_zero(by));
      }
    }
    return operation(value.op).cuda;
  }

  // The text of a value that is not computed, or the name of its variable.
  std::string name_or_input(int place) const {
    const Value& value = at(place);
    switch (value.op) {
      case Op::kConstant:
        return literal(value);
      case Op::kScalar: {
        const std::string scalar = "p.scalars[" + number(value.name) + "]";
        if (value.type == Type::kFloat) return scalar + ".real";
        return value.type == Type::kInt ? scalar + ".integer" : "(" + scalar + ".integer != 0)";
      }
      default:
        return is_computed(place) ? name(place) : operation(value.op).cuda;
    }
  }

  std::string operand(int place, Part part) const {
    constexpr const char* kStructs[] = {"head.", "row.", "column.", "diagonal."};
    return is_read(place, part) ? kStructs[hoisted_[index(place)]] + name(place) : name_or_input(place);
  }

  std::string tensor(const Value& load) const { return "p.tensors[" + number(load.name) + "]"; }
  std::string indices(int load, bool hoists, Part part = kPair) const {
    std::string text;
    for (int n = 0; n < operand_count(at(load)); ++n) {
      const int place = at(load).operands[n];
      text += ", " + (hoists ? operand(place, part) : name_or_input(place));
    }
    return text;
  }

  std::string expression(int place, Part part, bool hoists) const {
    const Value& value = at(place);
    const auto named = [&](int operand_place) {
      return hoists ? operand(operand_place, part) : name_or_input(operand_place);
    };
    if (value.op == Op::kLoad) {
      std::string taken;
      for (const Condition& condition : known_conditions(place, part)) {
        taken += (taken.empty() ? "" : " && ") + std::string(condition.when ? "" : "!") + named(condition.place);
      }
      return "load<ElementType{" + number(dtypes_[static_cast<size_t>(value.name)]) + "}, kNear>(" + tensor(value) +
             ", " + (taken.empty() ? "true" : taken) + indices(place, hoists, part) + ")";
    }
    if (value.op == Op::kIntToFloat) {
      if (std::string text = converted(value.operands[0], named); !text.empty()) return text;
    }
    const std::string pattern = text_of(place);
    std::string text;
    for (size_t n = 0; n < pattern.size(); ++n) {
      if (pattern[n] == '%' && n + 1 < pattern.size() && pattern[n + 1] >= '0' && pattern[n + 1] <= '2') {
        text += named(value.operands[pattern[++n] - '0']);
      } else {
        text += pattern[n];
      }
    }
    return text;
  }

  const Program& program_;
  std::span<const int32_t> dtypes_;
  std::vector<int> roots_;
  bool all_parts_;
  size_t first_derived_;
  std::vector<bool> diagonal_;  // with all_parts: the values that depend on i - j alone
  std::vector<InputSet> inputs_;
  // the conditions that all uses of a value have in common; empty: not used
  std::vector<std::optional<std::set<Condition>>> taken_;
  std::vector<Part> hoisted_;  // not kPair: a member of that part's struct
  std::vector<bool> exact_;    // a comparison depends on it
};

std::vector<int> roots_of(const Program& program) {
  std::vector<int> roots;
  for (const int root : {program.score, program.mask}) {
    if (root >= 0) roots.push_back(root);
  }
  return roots;
}

std::vector<int> roots_of(const Gradient& gradient) {
  std::vector<int> roots;
  if (gradient.d_s >= 0) roots.push_back(gradient.d_s);
  for (const LoadGradient& load : gradient.loads) {
    roots.insert(roots.end(), load.indices.begin(), load.indices.end());
    roots.push_back(load.adjoint);
  }
  return roots;
}

std::string facts_text(const Facts& facts, bool near) {
  std::string text;
  const auto add = [&text](const char* type, const char* name, const std::string& value) {
    text += std::string("  static constexpr ") + type + " " + name + " = " + value + ";\n";
  };
  const auto truth = [&add](const char* name, bool value) { add("bool", name, value ? "true" : "false"); };
  truth("kNear", near);
  truth("kChangesScore", facts.changes_score);
  truth("kHasMask", facts.has_mask);
  truth("kScoreNeedsS", facts.score_needs_s);
  truth("kMaskNeedsS", facts.mask_needs_s);
  truth("kSteady", !(facts.score_inputs & input_bit(Op::kJ)));
  truth("kReadsTensors", facts.reads_tensors);
  truth("kMayHide", facts.may_hide);
  truth("kScalesByHead", facts.scales_by_head);
  truth("kGrowsLinearly", facts.grows_linearly);
  truth("kPassesGradient", facts.passes_gradient);
  truth("kSlopeNeedsS", facts.slope_needs_s);
  truth("kSumsByHead", facts.sums_by_head);
  add("int", "kGradientLoads", number(facts.gradient_loads));
  return text;
}

// Whether the score is factor() s + term(), and how much of that is given.
std::string affine_text(const std::optional<Affine>& affine) {
  std::string text = "  static constexpr bool kAffine = ";
  if (!affine) return text + "false;\n";
  const Value& factor = affine->program.values[static_cast<size_t>(affine->factor)];
  const bool has_factor = factor.op != Op::kConstant || factor.constant != 1;
  const auto truth = [](bool value) { return value ? "true" : "false"; };
  return text + "true, kHasFactor = " + truth(has_factor) + ", kHasTerm = " + truth(affine->term >= 0) + ";\n";
}

// The pattern of each load n, for kernels that sum by pattern, and of what else its gradient can be made.
std::string patterns_text(const Checked& checked) {
  const Gradient& gradient = checked.gradient;
  const std::vector<LoadSum> sums = load_sums(checked);
  const auto by_load = [&](const std::string& type, const std::string& name, const char* otherwise, const auto& of) {
    std::string text = "  static constexpr " + type + " " + name + "([[maybe_unused]] int load) {\n    return ";
    for (size_t n = 0; n < gradient.loads.size(); ++n) {
      text += "load == " + std::to_string(n) + " ? " + type + "{" + number(static_cast<int>(of(n))) + "} : ";
    }
    return text + type + "::" + otherwise + ";\n  }\n";
  };
  return by_load("GradientPattern", "pattern", "kGather",
                 [&](size_t n) { return pattern_of(gradient.program, gradient.loads[n]); }) +
         by_load("LoadSum", "load_sum", "kPairs", [&](size_t n) { return sums[n]; });
}

constexpr const char* kParams = "[[maybe_unused]] const ScoreProgramParams& p";
constexpr const char* kPlace = "[[maybe_unused]] const ProgramPlace& at";
std::string function(const char* result, const char* name, const std::string& parts, const char* more,
                     const std::string& body) {
  return std::string("  TESSERA_DEVICE static ") + result + " " + name + "(" + kParams + ", " + parts + kPlace + more +
         ") {\n" + body + "  }\n";
}
std::string part_parameter(const std::string& type, const char* name) {
  return "[[maybe_unused]] const " + type + "& " + name + ", ";
}

// The structs of all parts, whose names begin with `type`, and those of their functions with `name`.
std::string parts_text(const Values& values, const std::string& type, const std::string& name) {
  const std::string head = part_parameter(type + "Head", "head");
  return values.hoisted_text(Values::kHead, type + "Head", name + "head") +
         values.hoisted_text(Values::kRow, type + "Row", name + "row", head) +
         values.hoisted_text(Values::kColumn, type + "Column", name + "column", head) +
         values.hoisted_text(Values::kDiagonal, type + "Diagonal", name + "diagonal", head);
}
std::string part_parameters(const std::string& type) {
  return part_parameter(type + "Head", "head") + part_parameter(type + "Row", "row") +
         part_parameter(type + "Column", "column") + part_parameter(type + "Diagonal", "diagonal");
}

// The mask alone, and its bounds over a tile of pairs.
std::string mask_text(const Program& program, std::span<const int32_t> dtypes) {
  const bool given = program.mask >= 0;
  const Values values(program, dtypes, given ? std::vector<int>{program.mask} : std::vector<int>{}, false);
  std::string text = "  static constexpr int kMaskRowValues = " + number(values.hoisted_count(Values::kRow)) +
                     ", kMaskColumnValues = " + number(values.hoisted_count(Values::kColumn)) + ";\n";
  text += values.hoisted_text(Values::kRow, "MaskRow", "mask_row") +
          values.hoisted_text(Values::kColumn, "MaskColumn", "mask_column") +
          values.hoisted_bounds_text(Values::kRow, "MaskRow") +
          values.hoisted_bounds_text(Values::kColumn, "MaskColumn");
  text += function("bool", "mask", part_parameter("MaskRow", "row") + part_parameter("MaskColumn", "column"),
                   ", [[maybe_unused]] float s",
                   given ? values.pair_text({program.mask}) + "    return " + values.result(program.mask) + ";\n"
                         : "    return true;\n");
  return text + std::string("  TESSERA_DEVICE static BoolBounds mask_bounds(") + kParams +
         ", [[maybe_unused]] const MaskRowBounds& row, [[maybe_unused]] const MaskColumnBounds& column, "
         "[[maybe_unused]] const PlaceBounds& at) {\n" +
         (given ? values.bounds_text(program.mask) : "    return bounds_exactly(true);\n") + "  }\n\n";
}

// kCapped, and the functions inside and outside of the score's tanh. The inner quotient need not be correctly rounded.
std::string capped_text(const Program& program, std::span<const int32_t> dtypes) {
  const std::optional<Capped> capped = capped_of(program);
  if (!capped) return "  static constexpr bool kCapped = false;\n";
  const auto [inner, tanh] = *capped;
  const Values values(program, dtypes, {program.score}, true, static_cast<size_t>(inner));
  return "  static constexpr bool kCapped = true;\n" +
         function("float", "inner", part_parameters(""), ", [[maybe_unused]] float s",
                  values.pair_text({inner}) + "    return " + values.result(inner) + ";\n") +
         function("float", "outer", part_parameter("Head", "head"), (", float " + values.result(tanh)).c_str(),
                  values.pair_text({program.score}, tanh) + "    return " + values.result(program.score) + ";\n");
}

// The score and a slope, for kernels that no longer have the score when they have its gradient.
std::string slope_text(const Program& program, std::span<const int32_t> dtypes, const Facts& facts) {
  const Slope made = slope(program);
  const int of = facts.sums_by_head ? made.loads[0].adjoint : made.d_s;
  const bool hides = facts.mask_needs_s;
  std::vector<int> roots{program.score, of};
  if (hides) roots.push_back(program.mask);
  const std::optional<Capped> capped = hides ? std::nullopt : capped_of(program);
  const Values values(made.program, dtypes, roots, true,
                      capped ? static_cast<size_t>(capped->inner) : program.values.size());
  const std::string score = values.result(program.score);
  return parts_text(values, "Slope", "slope_") +
         function("float", "score_and_slope", part_parameters("Slope"), ", [[maybe_unused]] float s, float& slope",
                  values.pair_text(roots) + "    slope = " + values.result(of) + ";\n    return " +
                      (hides ? values.result(program.mask) + " ? " + score + " : -infinity()" : score) + ";\n");
}

}  // namespace

MaskValues mask_values(const Program& program) {
  if (program.mask < 0) return {0, 0};
  const std::vector<int32_t> unused(program.tensors.size());
  const Values values(program, unused, {program.mask}, false);
  return {values.hoisted_count(Values::kRow), values.hoisted_count(Values::kColumn)};
}

std::string cuda_text(const Checked& checked, std::span<const int32_t> dtypes, StrideFacts strides, const char* name) {
  const Program& program = checked.program;
  const Gradient& gradient = checked.gradient;
  const std::optional<Affine> affine = affine_of(program);
  std::vector<int> roots = roots_of(program);
  if (affine) roots.push_back(affine->factor);
  if (affine && affine->term >= 0) roots.push_back(affine->term);
  const Values values(affine ? affine->program : program, dtypes, roots, true);
  const Values slopes(gradient.program, dtypes, roots_of(gradient), true);
  const Facts facts = facts_of(checked);
  std::string text = "// Version " + number(kCudaTextVersion) + " of core/score/cuda_text.\n" +
                     "#include \"tessera/attention/score/program_bounds.cuh\"\n\nnamespace tessera::program {\n\n" +
                     "struct " + name + " {\n" + facts_text(facts, strides.near) + affine_text(affine) +
                     patterns_text(checked) + "\n";
  text += parts_text(values, "", "");
  const bool steps = values.steps_along_diagonal();
  text += std::string("  static constexpr bool kStepsAlongDiagonal = ") + (steps ? "true" : "false") + ";\n" +
          (steps ? values.stepping_text(strides.dense_rows) : "");

  const auto value_of = [&](int root, const char* otherwise) {
    if (root < 0) return std::string("    return ") + otherwise + ";\n";
    return values.pair_text({root}) + "    return " + values.result(root) + ";\n";
  };
  constexpr const char* kScore = ", [[maybe_unused]] float s";
  text += function("float", "score", part_parameters(""), kScore, value_of(program.score, "s"));
  if (affine) {
    text += function("float", "factor", part_parameters(""), "", value_of(affine->factor, ""));
    text += function("float", "term", part_parameters(""), "", value_of(affine->term, "0.0f"));
  }
  text += capped_text(program, dtypes);
  text += function("bool", "visible", part_parameters(""), kScore, value_of(program.mask, "true"));
  text += std::string("  TESSERA_DEVICE static void check(") + kParams + ", " + kPlace + ") {\n" +
          values.check_text(program.score, program.mask) + "  }\n\n";
  text += mask_text(program, dtypes);

  text += parts_text(slopes, "Gradient", "gradient_");
  std::string body = slopes.pair_text(roots_of(gradient));
  for (size_t n = 0; n < gradient.loads.size(); ++n) {
    const LoadGradient& load = gradient.loads[n];
    const std::string index = slopes.indices(load.indices);
    body += "    sink.template add<" + std::to_string(n) + ", " + number(load.tensor) + ">(holds(p.tensors[" +
            number(load.tensor) + "]" + index + "), " + slopes.result(load.adjoint) + index + ");\n";
  }
  body += "    return " + (gradient.d_s < 0 ? std::string("0.0f") : slopes.result(gradient.d_s)) + ";\n";
  text += "  template <class Sink>\n" +
          function("float", "gradient", part_parameters("Gradient"),
                   ", [[maybe_unused]] float g, [[maybe_unused]] float s, [[maybe_unused]] Sink& sink", body);
  if (facts.slope_needs_s || facts.sums_by_head) text += slope_text(program, dtypes, facts);
  return text + "};\n\n}  // namespace tessera::program\n";
}

uint64_t cuda_text_hash(const Checked& checked, std::span<const int32_t> dtypes, StrideFacts strides) {
  uint64_t hash = checked.hash;  // FNV-1a, one number at a time
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
  mix(kCudaTextVersion);
  mix(strides.near);
  mix(strides.dense_rows);
  for (const int32_t dtype : dtypes) mix(static_cast<uint32_t>(dtype));
  return hash;
}

}  // namespace tessera::core::score
