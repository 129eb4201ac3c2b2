// Text that came from outside, such as a name in a file, as it may stand in a message: what would steer a terminal
// stands there escaped.
#pragma once

#include <string>
#include <string_view>

namespace tessera::cli {

// Control characters (C0, DEL, C1), characters that change the direction of text and bytes that are no UTF-8 become
// escapes: \n, \x1b, \u202e. All else stays. Applied twice it changes nothing more.
std::string printable(std::string_view text);

}  // namespace tessera::cli
