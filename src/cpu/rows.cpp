#include "cpu/rows.hpp"

#include <algorithm>
#include <cstring>

#include "core/half.hpp"

namespace tessera::cpu {
namespace {

float to_float(int32_t dtype, const void* data, int64_t index) {
  if (dtype == TESSERA_FLOAT32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == TESSERA_FLOAT16 ? core::float16_to_float(bits) : core::bfloat16_to_float(bits);
}
void from_float(int32_t dtype, void* data, int64_t index, float value) {
  if (dtype == TESSERA_FLOAT32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] =
        dtype == TESSERA_FLOAT16 ? core::float_to_float16(value) : core::float_to_bfloat16(value);
  }
}

}  // namespace

tessera_status HostRowMoves::move(const core::RowsShape& shape, const core::Rows& from, const core::Rows& to, bool add,
                                  void*) {
  const auto from_bytes = static_cast<int64_t>(tessera_dtype_bytes(from.dtype));
  const auto to_bytes = static_cast<int64_t>(tessera_dtype_bytes(to.dtype));
  const auto* const source = static_cast<const char*>(from.data);
  auto* const target = static_cast<char*>(to.data);
  // Neighbouring heads are one range of columns.
  const bool joined = from.head == shape.columns && to.head == shape.columns;
  const int64_t heads = joined ? 1 : shape.heads, columns = joined ? shape.heads * shape.columns : shape.columns;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        const char* const x = source + from_bytes * (b * from.batch + row * from.row + head * from.head);
        char* const y = target + to_bytes * (b * to.batch + row * to.row + head * to.head);
        if (add) {
          for (int64_t c = 0; c < columns; ++c) reinterpret_cast<float*>(y)[c] += to_float(from.dtype, x, c);
        } else if (from.dtype == to.dtype) {
          std::memcpy(y, x, static_cast<size_t>(columns * to_bytes));
        } else {
          for (int64_t c = 0; c < columns; ++c) from_float(to.dtype, y, c, to_float(from.dtype, x, c));
        }
      }
    }
  }
  return ok();
}

tessera_status HostRowMoves::fill(float* data, float value, int64_t count, void*) {
  std::fill_n(data, count, value);
  return ok();
}

tessera_status HostRowMoves::write(const int32_t* values, int64_t count, int32_t* to, void*) {
  std::copy_n(values, count, to);
  return ok();
}

}  // namespace tessera::cpu
