// A tensor map of [batch, rows, heads, columns], contiguous, in boxes of 64 columns.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "tessera/types.hpp"

inline int encode(tessera::TensorMap* map, tessera::Dtype dtype, void* data, int batch, int rows, int heads,
                  int columns, int box_rows) {
  static PFN_cuTensorMapEncodeTiled_v12000 function = nullptr;
  if (!function) {
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&function), 12000,
                                     cudaEnableDefault, &result);
  }
  const cuuint64_t d = columns;
  const cuuint64_t extents[4] = {d, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads),
                                 static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {d * heads * 2, d * 2, d * heads * rows * 2};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto type =
      dtype == tessera::Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return static_cast<int>(function(reinterpret_cast<CUtensorMap*>(map), type, 4, data, extents, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}
