// The terminal's width, and text that fits into it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::cli {

// Characters of a line of the terminal that is open as `descriptor`; none if that is not a terminal.
std::optional<int> terminal_width(int descriptor);

// Characters shown: UTF-8 characters, each counted as one column.
int shown_width(std::string_view text);

// `text` in lines of at most `width` characters, broken between words. A longer word has its own line.
std::string wrapped(std::string_view text, int width);

// `text`, or its beginning and "…" if it is longer than `width` characters.
std::string cut(std::string_view text, int width);

}  // namespace tessera::cli
