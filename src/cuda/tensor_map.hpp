// Tensor maps: how TMA finds q, k, v and o.
#pragma once

#include <string>

#include "cuda/driver.hpp"
#include "tessera/params.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// Where data that a tensor map describes may start.
inline constexpr int64_t kTensorMapAlignment = 16;

// Why no tensor map describes a tensor of 16-bit elements, [batch, row, head, column] or packed [row, head, column], of
// which no extent is 0; "" when one does.
std::string refuse_tensor_map(const char* name, const tessera_layout& layout);

// The map of such a tensor as column, row, head, batch (packed: one), in boxes of 64 columns and `box_rows` rows of one
// head, swizzled by 128 bytes (kernels/tessera/tile/wgmma_tile.cuh); what lies outside the tensor reads as 0. A context is
// current. `name` is for the error's text.
tessera_status make_tensor_map(const Driver& driver, const char* name, const tessera_layout& layout, const void* data,
                               int box_rows, TensorMap& map);

}  // namespace tessera::cuda
