// Tensor maps, by which TMA accesses q, k, v and o.
#pragma once

#include <string>

#include "cuda/runtime/driver.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// Alignment of the data that a tensor map describes.
inline constexpr int64_t kTensorMapAlignment = 16;

// Why no tensor map can describe a tensor of 16-bit elements, [batch, row, head, column] or packed [row, head, column],
// with no extent 0; "" if one can.
std::string refuse_tensor_map(const char* name, const tessera_layout& layout);
// The same of a tensor's rows: none cannot be described.
std::string refuse_no_rows(const char* name, int64_t rows);

inline constexpr int64_t kSwizzledRowBytes = 128;  // the widest swizzle

// The layout in shared memory of a box of the map, which is some rows of one head.
enum class BoxLayout {
  kSwizzled,  // 64 columns, 128 bytes, swizzled: kernels/tessera/tile/wgmma_tile.cuh
  kPadded,    // all columns and a row's padding, which lies outside the tensor; columns count in twos:
              // kernels/tessera/tile/shared_tile.cuh
};

// The map of such a tensor as column, row, head, batch (packed: one), in boxes of `rows` rows of `row_bytes` in shared
// memory. Elements outside the tensor read as 0. Needs a current context. `name` is for the error message.
struct Box {
  BoxLayout layout;
  int rows;
  int64_t row_bytes;
  int heads = 1;  // more: the map is column, head, row, batch, and a box has as many heads of each row
};
tessera_status make_tensor_map(const Driver& driver, const tessera_device& device, const char* name,
                               const tessera_layout& layout, const void* data, const Box& box, TensorMap& map);

}  // namespace tessera::cuda
