#include "core/score/drawn.hpp"

#include <iterator>

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

std::string smooth_expression(int depth, std::mt19937_64& random) {
  const auto pick = [&](std::initializer_list<const char*> from) {
    return std::string(std::data(from)[random() % from.size()]);
  };
  if (depth == 0) {
    return pick({"s", "s", "s", "0.5", "-1.5", "t", "slope[h]", "place[i]", "place[j]", "key_bias[b, j]", "gain[]",
                 "relative[h, i - j + len_k]", "embedding[id[b, j]]", "block[i >> 4, j >> 4]", "0.1 * (i - j)"});
  }
  const auto sub = [&] { return "(" + smooth_expression(depth - 1, random) + ")"; };
  switch (random() % 9) {
    case 0:
      return sub() + pick({" + ", " - "}) + sub();
    case 1:
      return sub() + " * " + sub();
    case 2:
      return pick({"tanh", "sigmoid", "sin", "cos"}) + sub();
    case 3:
      return pick({"exp", "exp2"}) + "(tanh" + sub() + ")";
    case 4: {
      const std::string x = sub();
      return pick({"log", "sqrt", "rsqrt"}) + "(1.0 + " + x + " * " + x + ")";
    }
    case 5: {
      const std::string x = sub();
      return sub() + " / (1.0 + " + x + " * " + x + ")";
    }
    case 6:
      return "(" + expression(Type::kBool, 0, random) + ") ? " + sub() + " : " + sub();
    case 7: {
      const std::string x = sub();
      return x + " * tanh" + x;
    }
    default:
      return "-" + sub();
  }
}

namespace {

std::string pick(std::initializer_list<const char*> from, std::mt19937_64& random) {
  return std::data(from)[random() % from.size()];
}

std::string exact_integer(int depth, std::mt19937_64& random) {
  if (depth == 0) {
    return pick({"i", "j", "h", "h_kv", "b", "q_pos", "len_k", "len_q", "prefix", "2", "-7", "id[b, j]", "doc[b, i]"},
                random);
  }
  const auto sub = [&] { return "(" + exact_integer(depth - 1, random) + ")"; };
  switch (random() % 4) {
    case 0:
      return sub() + pick({" // 3", " % 5", " >> 2", " << 3", " // -4", " % -6"}, random);
    case 1:
      return pick({"min", "max"}, random) + "(" + sub() + ", " + sub() + ")";
    case 2:
      return pick({"abs", "-", "~"}, random) + sub();
    default:
      return sub() + pick({" + ", " - ", " * ", " & ", " | ", " ^ "}, random) + sub();
  }
}

}  // namespace

std::string exact_condition(int depth, std::mt19937_64& random) {
  if (depth == 0) {
    return pick({"keep[b, j]", "j <= q_pos", "i == j", "doc[b, i] == doc[b, j]", "j < used[b]", "abs(i - j) < width"},
                random);
  }
  const auto sub = [&] { return "(" + exact_condition(depth - 1, random) + ")"; };
  switch (random() % 3) {
    case 0:
      return exact_integer(depth - 1, random) + pick({" < ", " <= ", " == ", " != ", " > ", " >= "}, random) +
             exact_integer(depth - 1, random);
    case 1:
      return sub() + pick({" && ", " || ", " ^ "}, random) + sub();
    default:
      return "!" + sub();
  }
}

std::string bytes(std::mt19937_64& random) {
  static const std::string parts[] = {"s",   "+",        "(", ")", "?",  ":", "tanh", ",", "[", "]",
                                      "1.5", "7",        "i", "-", "&&", "<", "=",    ";", "#", "\n",
                                      "x",   "relative", "h", ".", "e",  "~", "^",    "//"};
  std::string text;
  for (uint64_t length = random() % 24; length > 0; --length) {
    if (random() % 8 == 0) {
      text += static_cast<char>(random());
    } else {
      text += parts[random() % std::size(parts)];
    }
  }
  return text;
}

}  // namespace tessera::testing
