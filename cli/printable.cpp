#include "printable.hpp"

#include <algorithm>
#include <cstdint>

#include "units.hpp"

namespace tessera::cli {
namespace {

struct Range {
  char32_t first, last;
};
constexpr Range kEscaped[] = {
    {0x00, 0x1f},      // C0, with the escape character
    {0x7f, 0x9f},      // DEL, and C1: U+009B may start an escape sequence
    {0x061c, 0x061c},  // from here on: line separators, and marks and overrides of a text's direction
    {0x200e, 0x200f}, {0x2028, 0x202e}, {0x2066, 0x2069},
};

bool steers(char32_t character) {
  return std::any_of(std::begin(kEscaped), std::end(kEscaped),
                     [&](const Range& r) { return r.first <= character && character <= r.last; });
}

struct Decoded {
  char32_t character = 0;
  std::size_t bytes = 0;  // 0: not UTF-8
};

// The first character of `text`, which is not empty. Overlong forms, surrogates and code points above U+10FFFF are not
// UTF-8 (RFC 3629).
Decoded decode(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  char32_t character = lead & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    character = character << 6 | (byte(i) & 0x3fU);
  }
  constexpr char32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = character >= 0xd800 && character <= 0xdfff;
  if (character < kLeast[bytes] || character > 0x10ffff || surrogate) return {};
  return {character, bytes};
}

std::string escape_of(char32_t character) {
  if (character == '\n') return "\\n";
  if (character == '\r') return "\\r";
  if (character == '\t') return "\\t";
  const auto code = static_cast<std::uint32_t>(character);
  return text_of(code <= 0xff ? "\\x%02x" : "\\u%04x", code);
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const Decoded next = decode(text);
    if (next.bytes == 0) {
      result += escape_of(static_cast<unsigned char>(text.front()));
      text.remove_prefix(1);
      continue;
    }
    result += steers(next.character) ? escape_of(next.character) : std::string(text.substr(0, next.bytes));
    text.remove_prefix(next.bytes);
  }
  return result;
}

}  // namespace tessera::cli
