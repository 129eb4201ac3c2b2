// Builds programs: equal operations are added once, constants are folded, and unused values are removed.
#pragma once

#include <map>
#include <tuple>

#include "core/score/program.hpp"

namespace tessera::core::score {

class Builder {
 public:
  Builder() = default;
  explicit Builder(const Program& program);  // its operations keep their indices

  int add(Op op, int a = -1, int b = -1, int c = -1);
  int constant(Type type, double x);
  int number(double x) { return constant(Type::kFloat, x); }
  int scalar(const Name& name);
  int load(const Name& tensor, const std::vector<int>& indices);

  const Value& at(int place) const { return program_.values[static_cast<size_t>(place)]; }
  Type type(int place) const { return at(place).type; }
  int size() const { return static_cast<int>(program_.values.size()); }
  const Program& program() const { return program_; }

 private:
  using Key = std::tuple<Op, Type, int16_t, int16_t, int16_t, int16_t, int16_t, uint64_t>;
  static Key key_of(const Value& value);
  int append(const Value& value);

  Program program_;
  std::map<Key, int> places_;
};

// The operations that `roots` need, in the order of their first use, and the names in them. The roots are renumbered
// (-1 stays).
Program reachable(const Program& program, const std::vector<int*>& roots);

}  // namespace tessera::core::score
