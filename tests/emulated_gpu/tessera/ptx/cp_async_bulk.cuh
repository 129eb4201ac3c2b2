#pragma once

#include "tessera/ptx/mbarrier.cuh"
#include "tessera/tile/swizzle.hpp"

namespace tessera::ptx {

// What a tensor map says of [batch, head, row, column] of 16-bit elements, in boxes of 64 columns: in the place of the driver's.
struct EmulatedTensorMap {
  const char* data;
  int64 batch, row, head;  // strides in bytes
  int batches, rows, heads, cols, box_rows;
};
static_assert(sizeof(EmulatedTensorMap) <= sizeof(TensorMap));

// At once. What lies outside is 0.
inline void cp_async_bulk_tensor_4d(uint32 shared, const TensorMap* map, uint32 barrier, int col, int row, int head,
                                    int batch) {
  EmulatedTensorMap from;
  std::memcpy(&from, map, sizeof from);
  for (int r = 0; r < from.box_rows; ++r)
    for (int c = 0; c < kChunkCols; ++c) {
      unsigned short element = 0;
      const bool inside =
          batch < from.batches && row + r >= 0 && row + r < from.rows && head < from.heads && col + c < from.cols;
      if (inside) {
        const int64 at =
            from.batch * batch + from.row * (row + r) + from.head * head + (col + c) * int64{sizeof element};
        std::memcpy(&element, from.data + at, sizeof element);
      }
      std::memcpy(shared_memory + shared + r * kChunkRowBytes + ((c / 8) ^ (r % 8)) * 16 + c % 8 * 2, &element,
                  sizeof element);
    }
  EmulatedBarrier::at(barrier).bytes -= from.box_rows * kChunkRowBytes;
  EmulatedBarrier::at(barrier).end_phase();
}
inline void cp_async_bulk_store(float* global, uint32 shared, int bytes) {
  std::memcpy(global, shared_memory + shared, static_cast<size_t>(bytes));
}
inline void cp_reduce_async_bulk_add_f32(float* global, uint32 shared, int bytes) {
  for (int n = 0; n < bytes / 4; ++n) {
    float x;
    std::memcpy(&x, shared_memory + shared + n * 4, sizeof x);
    global[n] += x;
  }
}
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read() {}
inline void cp_async_bulk_wait_group() {}
inline void prefetch_tensormap(const TensorMap*) {}
inline void fence_proxy_async() {}

}  // namespace tessera::ptx
