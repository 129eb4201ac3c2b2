// The meaning of a program in float64: the oracle's evaluation of one pair, and bounds over a whole block of pairs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/score/operations.hpp"
#include "core/score/program.hpp"

namespace tessera::core::score {

// The inputs of a pair: the operations kS ... kG, in their order.
struct Inputs {
  double s = 0;
  int64_t b = 0, h = 0, h_kv = 0, i = 0, j = 0, q_pos = 0, len_q = 0, len_k = 0;
  double g = 0;
};

// The named tensors and scalars of a program.
struct Bindings {
  // Element `index` of a tensor, of the rank in the program. `read` false: the index is outside, and the element counts
  // as 0.
  std::function<double(int tensor, const int64_t* index, bool& read)> element;
  std::function<double(int scalar)> scalar;
};

// Evaluates one value after another for a pair. Only values that a result needs are evaluated: the side of where, &&
// and
// | that is not selected is skipped, so that its loads are not read.
class Evaluator {
 public:
  Evaluator(const Program& program, const Bindings& bindings);

  void begin(const Inputs& inputs);
  double value(int place);
  bool read_outside() const {
    return read_outside_;
  }  // since begin(): the index of an evaluated load was outside its tensor

 private:
  double input(Op op) const;

  const Program& program_;
  const Bindings& bindings_;
  Inputs inputs_;
  std::vector<double> values_;
  std::vector<uint32_t> made_in_;  // the round in which a value was computed
  uint32_t round_ = 0;
  bool read_outside_ = false;
};

// Bounds of a block's inputs and of the named tensors and scalars.
struct Bounds {
  Interval s = Interval::everything();
  Interval b, h, h_kv, i, j, q_pos, len_q, len_k;
  Interval g = Interval::everything();
  // Bounds of a tensor's elements at indices within these bounds.
  std::function<Interval(int tensor, const Interval* index)> element;
  std::function<Interval(int scalar)> scalar;
};

// Bounds of the value at `root` over all pairs of the block. A value that depends on an input twice is bounded as if
// both uses were independent, except for differences of i, q_pos and j, which masks consist of.
Interval bound(const Program& program, int root, const Bounds& bounds);
// The same for every value of the program.
std::vector<Interval> bounds_of_values(const Program& program, const Bounds& bounds);

enum class Visible { kNone, kSome, kAll };
Visible visible(const Program& program, const Bounds& bounds);  // the visibility of a block's pairs by the mask

}  // namespace tessera::core::score
