// Pairs each pointer of a call with its layout in the problem.
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

// Calls check(name, layout, pointer) for each buffer that has elements, until one returns an error.
template <class Check>
tessera_status for_each_buffer(std::initializer_list<NamedBuffer> buffers, const Check& check) {
  for (const NamedBuffer& buffer : buffers) {
    if (!present(buffer.layout) || elements(buffer.layout) == 0) continue;
    TESSERA_RETURN_IF_ERROR(check(buffer.name, buffer.layout, buffer.pointer));
  }
  return ok();
}

// The same for the buffers that the problem's direction reads or writes.
template <class Check>
tessera_status for_each_buffer(const tessera_problem& p, const tessera_buffers& buffers, const Check& check) {
  const bool backward = p.direction == TESSERA_BACKWARD;
  for (const TensorField& field : kTensorFields) {
    if (!takes_part(field, backward)) continue;
    TESSERA_RETURN_IF_ERROR(for_each_buffer({{field.name, p.*field.layout, field.pointer(buffers)}}, check));
  }
  return ok();
}

// The same for the buffers that a validated tessera_combine reads or writes.
template <class Check>
tessera_status for_each_buffer(const tessera_combine_call& call, const Check& check) {
  const auto buffer = [](const char* name, const tessera_tensor& tensor) -> NamedBuffer {
    return {name, tensor.layout, tensor.data};
  };
  return for_each_buffer(
      {buffer("o_parts", call.o_parts), buffer("lse_parts", call.lse_parts), buffer("o", call.o),
       buffer("lse", call.lse), buffer("lse_low_parts", call.lse_low_parts), buffer("lse_low", call.lse_low)},
      check);
}

}  // namespace tessera::core
