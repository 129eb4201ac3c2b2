// tessera_combine on the CPU: layouts to byte strides, then the kernel of the device's instruction set.
#include <algorithm>

#include "core/geometry.hpp"
#include "cpu/cpu.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {

CombineParams combine_params(const core::CombineTensors& t) {
  CombineParams p{};
  const auto [parts, batch, rows, heads, head_dim_v] = t.o_parts_layout.shape;
  p.parts = parts, p.batch = batch, p.rows = rows, p.heads = heads, p.head_dim_v = head_dim_v;
  p.part_dtype = t.o_parts_layout.dtype, p.dtype = t.o_layout.dtype;
  const int64_t part_bytes = static_cast<int64_t>(tessera_dtype_bytes(p.part_dtype));
  const int64_t bytes = static_cast<int64_t>(tessera_dtype_bytes(p.dtype));
  p.o_parts = static_cast<const char*>(t.o_parts);
  p.o_part = t.o_parts_layout.strides[0] * part_bytes, p.o_part_batch = t.o_parts_layout.strides[1] * part_bytes;
  p.o_part_row = t.o_parts_layout.strides[2] * part_bytes, p.o_part_head = t.o_parts_layout.strides[3] * part_bytes;
  p.lse_parts = reinterpret_cast<const char*>(t.lse_parts);
  p.lse_part = t.lse_parts_layout.strides[0] * 4, p.lse_part_batch = t.lse_parts_layout.strides[1] * 4;
  p.lse_part_head = t.lse_parts_layout.strides[2] * 4, p.lse_part_row = t.lse_parts_layout.strides[3] * 4;
  p.o = static_cast<char*>(t.o);
  p.o_batch = t.o_layout.strides[0] * bytes, p.o_row = t.o_layout.strides[1] * bytes,
  p.o_head = t.o_layout.strides[2] * bytes;
  if (core::present(t.lse_layout)) {
    p.lse = reinterpret_cast<char*>(t.lse);
    p.lse_batch = t.lse_layout.strides[0] * 4, p.lse_head = t.lse_layout.strides[1] * 4,
    p.lse_row = t.lse_layout.strides[2] * 4;
  }
  return p;
}

void combine(const core::CombineTensors& t, const tessera_device& device, core::Cancel& cancel) {
  const CombineParams p = combine_params(t);
  constexpr int64_t kRowsAtOnce = 1024;
  const int64_t rows_total = p.batch * p.rows * p.heads;
  for (int64_t row = 0; row < rows_total && !cancel.asked(); row += kRowsAtOnce) {
    kernel_table(device.isa).combine(p, row, std::min(rows_total, row + kRowsAtOnce));
  }
}

}  // namespace tessera::cpu
