// A progress bar on standard error, shown only where that is a terminal.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

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
    constexpr int kWidth = 32;
    const double share = total_ > 0 ? std::clamp(done_ / total_, 0.0, 1.0) : 1.0;
    const int filled = static_cast<int>(share * kWidth);
    std::string bar;
    for (int i = 0; i < kWidth; ++i) bar += i < filled ? "█" : "░";
    fmt::print(stderr, "\r\033[K{} {:3.0f} %  {}", bar, share * 100, what);
    std::fflush(stderr);
  }

  // Takes the bar away, so that a line can be printed in its place.
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
