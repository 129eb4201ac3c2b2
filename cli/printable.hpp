// Makes outside text, such as a name in a file, safe for messages: characters that control a terminal are escaped.
#pragma once

#include <string>
#include <string_view>

namespace tessera::cli {

// Control characters (C0, DEL, C1), characters that change the direction of text and bytes that are not UTF-8 become
// escapes: \n, \x1b, \u202e. All other text is unchanged. Applied twice it changes nothing more.
std::string printable(std::string_view text);

}  // namespace tessera::cli
