// What of a program is an option of the library under another name: a mask that is a range of positions, softcap,
// ALiBi. Such parts are served by the options' own code, which skips hidden tiles and costs less; the rest stays a
// program.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>

#include "core/score/checked.hpp"

namespace tessera::core::score {

// low <= j - position <= high.
struct PositionRange {
  static constexpr int64_t kNoLow = std::numeric_limits<int64_t>::min();
  static constexpr int64_t kNoHigh = std::numeric_limits<int64_t>::max();

  bool from_q_pos = true;  // position is q_pos (bottom-right alignment); false: i (top-left)
  int64_t low = kNoLow, high = kNoHigh;

  bool any() const { return low != kNoLow || high != kNoHigh; }
};

// What is known of a problem when its program is recognised.
struct Surroundings {
  int64_t longest = INT32_MAX;  // len_q and len_k are at most this: what might wrap is not recognised
  bool equal_lengths = false;   // len_q = len_k in each sequence: i is q_pos
  bool causal = false;          // no key after q_pos is visible by the problem's own options
  // Options that the problem has itself. They come before the program, so that only what follows in the order softcap,
  // bias, ALiBi may still be taken over from the program.
  bool softcap = false, bias = false, alibi = false;
  // Bit n: tensors[n] of the program cannot be ALiBi's slopes, since its gradient is needed or by its type or shape.
  uint32_t no_slopes = 0;
  // Whether the problem's options can say a range beside what they say already; empty: any.
  std::function<bool(const PositionRange&)> can_say;
};

struct Recognised {
  PositionRange range;
  double softcap = 0;  // 0: none
  int slopes = -1;     // ALiBi's: the tensor of the recognised program that is read at [h] or [b, h]; -1: no ALiBi
  // What is left to do after these, in the order of the program; its names are those of them that it still uses. It is
  // evaluated for pairs within `range` alone: for others it may take loads that the program did not take.
  Program rest;

  bool any() const { return range.any() || softcap != 0 || slopes >= 0; }
};

// Recognised is what is exactly equal over real numbers for every pair, given the surroundings, with constants only: of
//
//   mask     a conjunction, of which any terms are comparisons of j with i or q_pos, plus or minus constants and what
//            cancels out: j <= q_pos, i - j < 16, abs(q_pos - j) <= 8, !(j > q_pos)
//   score    c * tanh(s / c) with c > 0; then s - slope[h] * abs(q_pos - j) and, where no key after q_pos is visible,
//            s + slope[h] * (j - q_pos); any further function of that stays a program
Recognised recognise(const Program& program, const Surroundings& surroundings);

}  // namespace tessera::core::score
