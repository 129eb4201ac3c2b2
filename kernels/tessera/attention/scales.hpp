// The scales of 8-bit tensors, as kernels read them.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// A scale of a sequence and KV head, or of each kScaleTokens of its tokens; row: 0 if all tokens have the same one.
// in_pages: of each token, `batch` being the stride of a page and `row` that of a token within it. NULL: every scale is
// 1.
enum : int { kScaleTokens = 128 };  // a constant of the namespace would be data in every kernel
struct ScaleTensor {
  const float* data;
  int64 batch, row, head;
  int in_pages;

  TESSERA_HOST_DEVICE constexpr float at(int of_batch, int of_row, int of_head) const {
    return data ? data[batch * of_batch + row * of_row + head * of_head] : 1.0f;
  }
};

}  // namespace tessera
