// tessera_combine on the CPU: converts layouts to byte strides and calls the kernel of the device's instruction set.
#include <algorithm>

#include "core/geometry.hpp"
#include "cpu/cpu.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {

CombineParams combine_params(const tessera_combine_call& t) {
  CombineParams p{};
  const auto [parts, batch, rows, heads, head_dim_v] = t.o_parts.layout.shape;
  p.parts = parts, p.batch = batch, p.rows = rows, p.heads = heads, p.head_dim_v = head_dim_v;
  p.part_dtype = t.o_parts.layout.dtype, p.dtype = t.o.layout.dtype;
  const int64_t part_bytes = static_cast<int64_t>(tessera_dtype_bytes(p.part_dtype));
  const int64_t bytes = static_cast<int64_t>(tessera_dtype_bytes(p.dtype));
  p.o_parts = static_cast<const char*>(t.o_parts.data);
  p.o_part = t.o_parts.layout.strides[0] * part_bytes, p.o_part_batch = t.o_parts.layout.strides[1] * part_bytes;
  p.o_part_row = t.o_parts.layout.strides[2] * part_bytes, p.o_part_head = t.o_parts.layout.strides[3] * part_bytes;
  p.lse_parts = static_cast<const char*>(t.lse_parts.data);
  p.lse_part = t.lse_parts.layout.strides[0] * 4, p.lse_part_batch = t.lse_parts.layout.strides[1] * 4;
  p.lse_part_head = t.lse_parts.layout.strides[2] * 4, p.lse_part_row = t.lse_parts.layout.strides[3] * 4;
  if (core::present(t.lse_low_parts.layout)) {
    const auto& strides = t.lse_low_parts.layout.strides;
    p.lse_low_parts = static_cast<const char*>(t.lse_low_parts.data);
    p.lse_low_part = strides[0] * 4, p.lse_low_part_batch = strides[1] * 4;
    p.lse_low_part_head = strides[2] * 4, p.lse_low_part_row = strides[3] * 4;
  }
  p.o = static_cast<char*>(t.o.data);
  p.o_batch = t.o.layout.strides[0] * bytes, p.o_row = t.o.layout.strides[1] * bytes,
  p.o_head = t.o.layout.strides[2] * bytes;
  if (core::present(t.lse.layout)) {
    p.lse = static_cast<char*>(t.lse.data);
    p.lse_batch = t.lse.layout.strides[0] * 4, p.lse_head = t.lse.layout.strides[1] * 4,
    p.lse_row = t.lse.layout.strides[2] * 4;
  }
  if (core::present(t.lse_low.layout)) {
    const auto& strides = t.lse_low.layout.strides;
    p.lse_low = static_cast<char*>(t.lse_low.data);
    p.lse_low_batch = strides[0] * 4, p.lse_low_head = strides[1] * 4, p.lse_low_row = strides[2] * 4;
  }
  return p;
}

void combine(const tessera_combine_call& t, const tessera_device& device, core::Cancel& cancel) {
  const CombineParams p = combine_params(t);
  constexpr int64_t kRowsAtOnce = 1024;
  const int64_t rows_total = p.batch * p.rows * p.heads;
  for (int64_t row = 0; row < rows_total && !cancel.asked(); row += kRowsAtOnce) {
    kernel_table(device.isa).combine(p, row, std::min(rows_total, row + kRowsAtOnce));
  }
}

}  // namespace tessera::cpu
