// Numbers for human readers.
#pragma once

#include <string>

namespace tessera::cli {

// Three significant digits, no exponent: 0.0123, 1.23, 12.3, 123, 12345.
std::string number_text(double value);
std::string bytes_text(double bytes);  // "1.50 MiB"
// As in printf.
[[gnu::format(printf, 1, 2)]] std::string text_of(const char* format, ...);

}  // namespace tessera::cli
