// Helpers of printers: printf-style text, numbers with units, JSON, and copying text to a caller's buffer.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "core/status.hpp"

namespace tessera::core {

TESSERA_PRINTF_LIKE inline std::string print(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

// 1536 -> "1.50 KiB", 3.2e9 with a step of 1000 -> "3.20 G"
inline std::string scaled(double value, double step, const char* const (&units)[6]) {
  size_t unit = 0;
  while (std::fabs(value) >= step && unit + 1 < std::size(units)) {
    value /= step;
    ++unit;
  }
  const bool whole = unit == 0 && value == std::floor(value);
  return print(whole ? "%.0f %s" : "%.2f %s", value, units[unit]);
}
inline std::string bytes_text(double bytes) {
  return scaled(bytes, 1024, {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"});
}
inline std::string flops_text(double flops) {
  return scaled(flops, 1000, {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"});
}

class JsonWriter {
 public:
  void open(const char* key, char bracket) {
    prefix(key);
    text_ += bracket;
    first_ = true;
  }
  void close(char bracket) {
    text_ += bracket;
    first_ = false;
  }
  void add(const char* key, const char* value) {
    prefix(key);
    quote(value);
  }
  void add(const char* key, bool value) {
    prefix(key);
    text_ += value ? "true" : "false";
  }
  void add(const char* key, int64_t value) {
    prefix(key);
    text_ += print("%" PRId64, value);
  }
  void add(const char* key, int32_t value) { add(key, int64_t{value}); }
  void add(const char* key, uint64_t value) {
    prefix(key);
    text_ += print("%" PRIu64, value);
  }
  void add(const char* key, double value) {
    prefix(key);
    text_ += std::isfinite(value) ? print("%.17g", value) : "null";
  }
  std::string take() { return std::move(text_); }

 private:
  void prefix(const char* key) {
    if (!first_) text_ += ", ";
    first_ = false;
    if (!key) return;
    quote(key);
    text_ += ": ";
  }
  void quote(const char* value) {
    text_ += '"';
    for (; *value; ++value) {
      const unsigned char c = static_cast<unsigned char>(*value);
      if (c == '"' || c == '\\') text_ += '\\';
      text_ += c < 0x20 ? print("\\u%04x", c) : std::string(1, *value);
    }
    text_ += '"';
  }

  std::string text_;
  bool first_ = true;
};

// Like snprintf: writes at most `size` bytes including the terminating zero, and returns the length without it of the
// whole text.
inline size_t copy_out(const std::string& from, char* text, size_t size) {
  if (text && size > 0) {
    const size_t length = std::min(from.size(), size - 1);
    std::memcpy(text, from.data(), length);
    text[length] = '\0';
  }
  return from.size();
}

}  // namespace tessera::core
