#include "core/score/drawn.hpp"

namespace tessera::testing {

using core::score::Type;

std::string expression(Type type, int depth, std::mt19937_64& random) {
  const auto pick = [&](std::initializer_list<const char*> from) {
    return std::string(std::data(from)[random() % from.size()]);
  };
  const auto sub = [&](Type of) { return "(" + expression(of, depth - 1, random) + ")"; };
  if (type == Type::kFloat) {
    if (depth == 0) return pick({"s", "0.5", "-2.0", "t", "slope[h]", "place[i]", "key_bias[b, j]", "gain[]", "3"});
    switch (random() % 7) {
      case 0:
        return sub(Type::kFloat) + pick({" + ", " - ", " * ", " / "}) + sub(Type::kFloat);
      case 1:
        return pick({"tanh", "sigmoid", "sin", "cos", "exp", "exp2", "log", "sqrt", "rsqrt", "abs", "floor"}) +
               sub(Type::kFloat);
      case 2:
        return pick({"min", "max"}) + "(" + sub(Type::kFloat) + ", " + sub(Type::kFloat) + ")";
      case 3:
        return sub(Type::kBool) + " ? " + sub(Type::kFloat) + " : " + sub(Type::kFloat);
      case 4:
        return "embedding[(" + sub(Type::kInt) + ") % 7]";
      case 5:
        return "float" + sub(random() % 2 ? Type::kInt : Type::kBool);
      default:
        return "-" + sub(Type::kFloat);
    }
  }
  if (type == Type::kInt) {
    if (depth == 0)
      return pick(
          {"i", "j", "h", "h_kv", "b", "q_pos", "len_k", "len_q", "prefix", "2", "-7", "id[b, j]", "doc[b, i]"});
    switch (random() % 4) {
      case 0:
        return sub(Type::kInt) + pick({" + ", " - ", " * ", " // ", " % ", " & ", " | ", " ^ ", " << ", " >> "}) +
               sub(Type::kInt);
      case 1:
        return pick({"min", "max"}) + "(" + sub(Type::kInt) + ", " + sub(Type::kInt) + ")";
      case 2:
        return "where(" + sub(Type::kBool) + ", " + sub(Type::kInt) + ", " + sub(Type::kInt) + ")";
      default:
        return pick({"abs", "int", "-", "~"}) + sub(Type::kInt);
    }
  }
  if (depth == 0) return pick({"true", "keep[b, j]", "j <= q_pos", "i == j"});
  switch (random() % 4) {
    case 0:
      return sub(Type::kInt) + pick({" < ", " <= ", " == ", " != ", " > ", " >= "}) + sub(Type::kInt);
    case 1:
      return sub(Type::kFloat) + pick({" < ", " <= ", " > ", " >= "}) + sub(Type::kFloat);
    case 2:
      return sub(Type::kBool) + pick({" && ", " || ", " ^ ", " & ", " | ", " == "}) + sub(Type::kBool);
    default:
      return "!" + sub(Type::kBool);
  }
}

}  // namespace tessera::testing
