// Which pointer of a call belongs to which layout of its problem.
#pragma once

#include <initializer_list>

#include "core/fields.hpp"
#include "core/geometry.hpp"
#include "core/status.hpp"
#include "core/validate.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

struct NamedBuffer {
  const char* name;
  const tessera_layout& layout;
  const void* pointer;
};

// check(name, layout, pointer) for each that has elements, until one answers with an error.
template <class Check>
tessera_status for_each_buffer(std::initializer_list<NamedBuffer> buffers, const Check& check) {
  for (const NamedBuffer& buffer : buffers) {
    if (!present(buffer.layout) || elements(buffer.layout) == 0) continue;
    TESSERA_RETURN_IF_ERROR(check(buffer.name, buffer.layout, buffer.pointer));
  }
  return ok();
}

// The same for what the problem's direction reads or writes.
template <class Check>
tessera_status for_each_buffer(const tessera_problem& p, const tessera_buffers& buffers, const Check& check) {
  const bool backward = p.direction == TESSERA_BACKWARD;
  for (const TensorField& field : kTensorFields) {
    if (!takes_part(field, backward)) continue;
    TESSERA_RETURN_IF_ERROR(for_each_buffer({{field.name, p.*field.layout, field.pointer(buffers)}}, check));
  }
  return ok();
}

// What tessera_combine reads and writes, its layouts validated; lse of rank 0: not wanted.
struct CombineTensors {
  tessera_layout o_parts_layout;  // [N, B, S, H, Dv]
  const void* o_parts;
  tessera_layout lse_parts_layout;  // [N, B, H, S]
  const float* lse_parts;
  tessera_layout o_layout;  // [B, S, H, Dv]
  void* o;
  tessera_layout lse_layout;  // [B, H, S]
  float* lse;
};

// The same for these.
template <class Check>
tessera_status for_each_buffer(const CombineTensors& t, const Check& check) {
  return for_each_buffer({{"o_parts", t.o_parts_layout, t.o_parts},
                          {"lse_parts", t.lse_parts_layout, t.lse_parts},
                          {"o", t.o_layout, t.o},
                          {"lse", t.lse_layout, t.lse}},
                         check);
}

}  // namespace tessera::core
