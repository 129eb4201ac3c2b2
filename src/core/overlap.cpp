#include "core/overlap.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace tessera::core {
namespace {

int64_t element_bytes(const tessera_layout& layout) { return static_cast<int64_t>(tessera_dtype_bytes(layout.dtype)); }

// One term of sum of stride * x with 0 <= x <= most. The axes of both tensors are terms of one such sum. The second
// tensor's axes are reversed (x becomes most - x), so that all strides are positive: the tensors share a byte if the
// sum can equal the distance between them.
struct Term {
  int64_t stride, most;
};

class Sum {
 public:
  void add(int64_t stride, int64_t most) {
    if (stride == 0 || most == 0) return;
    for (int term = 0; term < count_; ++term) {  // views of one tensor have the same strides
      if (terms_[term].stride == stride) {
        terms_[term].most += most;
        return;
      }
    }
    terms_[count_++] = {stride, most};
  }

  bool reaches(int64_t target) {
    std::sort(terms_.begin(), terms_.begin() + count_,
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    rest_[count_] = 0;
    for (int term = count_; term-- > 0;) rest_[term] = rest_[term + 1] + terms_[term].stride * terms_[term].most;
    steps_left_ = kMostSteps;
    return search(0, target);
  }

 private:
  // Tries the largest stride first: the remaining range of the smaller ones leaves few choices of x, one or two if
  // strides nest.
  bool search(int term, int64_t target) {
    if (target < 0 || target > rest_[term]) return false;
    if (target == 0) return true;
    if (term == count_ || --steps_left_ < 0) return false;
    const auto [stride, most] = terms_[term];
    const int64_t beyond = target - rest_[term + 1];
    const int64_t lowest = beyond <= 0 ? 0 : (beyond + stride - 1) / stride;
    for (int64_t x = std::min(most, target / stride); x >= lowest; --x) {
      if (search(term + 1, target - stride * x)) return true;
      if (steps_left_ < 0) return false;
    }
    return false;
  }

  static constexpr int kMostSteps = 10000;
  static constexpr int kMostTerms = 2 * TESSERA_MAX_RANK + 2;
  std::array<Term, kMostTerms> terms_{};
  std::array<int64_t, kMostTerms + 1> rest_{};
  int count_ = 0;
  int steps_left_ = 0;
};

}  // namespace

Extent extent_of(const tessera_layout& layout, const void* data) {
  int64_t below = 0, above = 1;  // in elements
  for (int axis = 0; axis < layout.rank; ++axis) {
    const int64_t reach = (layout.shape[axis] - 1) * layout.strides[axis];
    (reach < 0 ? below : above) += reach;
  }
  const int64_t bytes = element_bytes(layout);
  const char* first = static_cast<const char*>(data);
  return {first + below * bytes, first + above * bytes};
}

bool overlap(const tessera_layout& a, const void* a_data, const tessera_layout& b, const void* b_data) {
  const Extent a_bytes = extent_of(a, a_data), b_bytes = extent_of(b, b_data);
  if (a_bytes.end <= b_bytes.begin || b_bytes.end <= a_bytes.begin) return false;
  // A byte of a is at a_bytes.begin + (its terms); a byte of b is at b_bytes.end - 1 - (its reversed terms).
  Sum sum;
  for (const tessera_layout* layout : {&a, &b}) {
    sum.add(1, element_bytes(*layout) - 1);
    for (int axis = 0; axis < layout->rank; ++axis) {
      const int64_t stride = layout->strides[axis] * element_bytes(*layout);
      sum.add(stride < 0 ? -stride : stride, layout->shape[axis] - 1);
    }
  }
  return sum.reaches(b_bytes.end - 1 - a_bytes.begin);
}

}  // namespace tessera::core
