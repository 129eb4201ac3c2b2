// A progress bar on standard error, shown only if that is a terminal.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "terminal.hpp"

namespace tessera::cli {

class Progress {
 public:
  explicit Progress(double total) : total_(total), shown_(isatty(STDERR_FILENO) == 1) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(double amount) { done_ += amount; }

  void show(const std::string& what) const {
    if (!shown_) return;
    constexpr int kMost = 32;
    const int width = terminal_width(STDERR_FILENO).value_or(0);
    const double share = total_ > 0 ? std::clamp(done_ / total_, 0.0, 1.0) : 1.0;
    const int length = std::min(kMost, width / 4), filled = static_cast<int>(share * length);
    std::string line;
    for (int i = 0; i < length; ++i) line += i < filled ? "█" : "░";
    line += fmt::format(" {:3.0f} %  {}", share * 100, what);
    // A line that wraps could not be erased again.
    fmt::print(stderr, "\r\033[K{}", cut(line, width - 1));
    std::fflush(stderr);
  }

  // Erases the bar, so that a line can be printed instead.
  void clear() const {
    if (!shown_) return;
    fmt::print(stderr, "\r\033[K");
    std::fflush(stderr);
  }

 private:
  double total_;
  double done_ = 0;
  bool shown_;
};

}  // namespace tessera::cli
