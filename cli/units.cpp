#include "units.hpp"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <iterator>

namespace tessera::cli {

std::string text_of(const char* format, ...) {
  char text[128];
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  return text;
}

std::string number_text(double value) {
  const int digits = value > 0 ? static_cast<int>(std::floor(std::log10(value))) : 0;
  return text_of("%.*f", std::clamp(2 - digits, 0, 4), value);
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  if (bytes >= 100 || unit == 0) return text_of("%.0f %s", bytes, kUnits[unit]);
  return text_of("%.*f %s", bytes >= 10 ? 1 : 2, bytes, kUnits[unit]);
}

}  // namespace tessera::cli
