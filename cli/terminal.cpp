#include "terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

namespace tessera::cli {

std::optional<int> terminal_width(int descriptor) {
  constexpr int kUnknown = 80;  // if the terminal does not tell
  if (isatty(descriptor) != 1) return {};
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUnknown;
  return size.ws_col;
}

int shown_width(std::string_view text) {  // counts bytes that begin a UTF-8 character
  return static_cast<int>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string wrapped(std::string_view text, int width) {
  std::string result;
  int column = 0;
  for (std::size_t from = 0; from < text.size();) {
    const std::size_t end = std::min(text.find(' ', from), text.size());
    const std::string_view word = text.substr(from, end - from);
    const bool fits = column + 1 + shown_width(word) <= width;
    if (!result.empty()) result += fits ? ' ' : '\n';
    column = (fits && !result.empty() ? column + 1 : 0) + shown_width(word);
    result += word;
    from = end + 1;
  }
  return result;
}

std::string cut(std::string_view text, int width) {
  if (shown_width(text) <= width) return std::string(text);
  while (!text.empty() && shown_width(text) > width - 1) text.remove_suffix(1);
  return std::string(text) + (width > 0 ? "…" : "");
}

}  // namespace tessera::cli
