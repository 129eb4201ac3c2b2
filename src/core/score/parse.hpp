// Text to program. The grammar (whitespace separates; # begins a comment up to the end of its line):
//
//   program    := { name "=" expression ";" } expression
//   expression := either [ "?" expression ":" expression ]
//   either     := operands of || && comparison | ^ & << >> + - * / // %, from loosest to tightest; comparisons do not
//                 chain
//   operand    := ("-" | "+" | "!" | "~") operand | number | true | false | inf | nan | name | name "[" [ indices ] "]"
//                 | function "(" operands ")" | "(" expression ")"
//
// An integer becomes a float where one is needed. Nothing else is converted implicitly: write float(x), int(x), x != 0.
// `/` divides floats; `//` and `%` are for integers and round down. `& | ^ ~` of booleans are `&& ||`, `!=` and `!`.
#pragma once

#include <span>
#include <string_view>

#include "core/score/program.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

// Parses the texts of a score and of a mask (either may be empty), with the names that they may use, into one program.
// INVALID_ARGUMENT names the text, the column (from 1), what was found and what is accepted.
tessera_status parse(std::string_view score, std::string_view mask, std::span<const Name> names, Program& program);

}  // namespace tessera::core::score
