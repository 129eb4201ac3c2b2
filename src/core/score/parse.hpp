// Text to program. The grammar (whitespace separates; a # comments the rest of its line out):
//
//   program    := { name "=" expression ";" } expression
//   expression := either [ "?" expression ":" expression ]
//   either     := operands of || && comparison | ^ & << >> + - * / // %, from loosest to tightest; comparisons do not chain
//   operand    := ("-" | "+" | "!" | "~") operand | number | true | false | inf | nan | name | name "[" [ indices ] "]"
//                 | function "(" operands ")" | "(" expression ")"
//
// An integer becomes a float where one is needed; nothing becomes an integer or a truth value by itself: float(x), int(x), x != 0.
// `/` is of floats; `//` and `%` are of integers and round down. `& | ^ ~` of truth values are `&& ||`, `!=` and `!`.
#pragma once

#include <span>
#include <string_view>

#include "core/score/program.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

// The texts of a score and of a mask (either may be empty) and the names that they may use, to one program.
// INVALID_ARGUMENT says which text, which column (from 1), what was found and what is accepted.
tessera_status parse(std::string_view score, std::string_view mask, std::span<const Name> names, Program& program);

}  // namespace tessera::core::score
