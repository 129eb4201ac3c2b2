// tessera_combine on the CPU: layouts to byte strides, then the kernel of this machine's best instruction set.
#include "core/geometry.hpp"
#include "cpu/cpu.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {

void combine(const tessera_layout& o_parts_layout, const void* o_parts, const tessera_layout& lse_parts_layout,
             const float* lse_parts, const tessera_layout& o_layout, void* o, const tessera_layout* lse_layout,
             float* lse) {
  tessera_device device;
  if (detect(device).code != TESSERA_OK)
    device.isa = TESSERA_ISA_BASELINE;  // the environment asks for what is not there
  CombineParams p{};
  p.parts = o_parts_layout.shape[0], p.batch = o_parts_layout.shape[1], p.rows = o_parts_layout.shape[2];
  p.heads = o_parts_layout.shape[3], p.head_dim_v = o_parts_layout.shape[4];
  p.part_dtype = o_parts_layout.dtype, p.dtype = o_layout.dtype;
  const int64_t part_bytes = static_cast<int64_t>(tessera_dtype_bytes(p.part_dtype));
  const int64_t bytes = static_cast<int64_t>(tessera_dtype_bytes(p.dtype));
  p.o_parts = static_cast<const char*>(o_parts);
  p.o_part = o_parts_layout.strides[0] * part_bytes, p.o_part_batch = o_parts_layout.strides[1] * part_bytes;
  p.o_part_row = o_parts_layout.strides[2] * part_bytes, p.o_part_head = o_parts_layout.strides[3] * part_bytes;
  p.lse_parts = reinterpret_cast<const char*>(lse_parts);
  p.lse_part = lse_parts_layout.strides[0] * 4, p.lse_part_batch = lse_parts_layout.strides[1] * 4;
  p.lse_part_head = lse_parts_layout.strides[2] * 4, p.lse_part_row = lse_parts_layout.strides[3] * 4;
  p.o = static_cast<char*>(o);
  p.o_batch = o_layout.strides[0] * bytes, p.o_row = o_layout.strides[1] * bytes,
  p.o_head = o_layout.strides[2] * bytes;
  if (lse_layout) {
    p.lse = reinterpret_cast<char*>(lse);
    p.lse_batch = lse_layout->strides[0] * 4, p.lse_head = lse_layout->strides[1] * 4,
    p.lse_row = lse_layout->strides[2] * 4;
  }
  kernel_table(device.isa).combine(p, 0, p.batch * p.rows * p.heads);
}

}  // namespace tessera::cpu
