// Checks of the memory passed to a call, made by every call before anything is written.
#pragma once

#include <array>
#include <cstdint>

#include "core/fields.hpp"
#include "core/overlap.hpp"
#include "core/status.hpp"
#include "core/validate.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

inline tessera_status check_pointer(const char* name, const tessera_layout& layout, const void* pointer) {
  if (!present(layout) || elements(layout) == 0) return ok();
  if (!pointer) return invalid("%s: NULL, but the problem describes it with shape %s", name, shape_text(layout).text);
  const size_t bytes = tessera_dtype_bytes(layout.dtype);
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) {
    return invalid("%s: %p is not aligned to %zu bytes, one %s", name, pointer, bytes,
                   tessera_dtype_name(layout.dtype));
  }
  return ok();
}

inline tessera_status check_is_here(const tessera_device& device) {
  if (device.ordinal >= 0) return ok();
  return invalid("device.ordinal: %d, a GPU described by its architecture, accepted for execution are this machine's",
                 device.ordinal);
}

// A buffer of a call, to be compared with the call's other buffers.
struct Occupied {
  const char* name;
  const tessera_layout* layout;
  const void* pointer;
  bool is_written;
  Extent extent;
};

// An output shares memory with no other buffer: kernels read inputs until their last tile is done, and write outputs
// from many threads.
class OwnMemory {
 public:
  void add(const char* name, const tessera_layout& layout, const void* pointer, bool is_written) {
    tensors_[count_++] = {name, &layout, pointer, is_written, extent_of(layout, pointer)};
  }
  tessera_status check() const {
    for (int one = 0; one < count_; ++one) {
      for (int other = 0; other < count_ && tensors_[one].is_written; ++other) {
        const Occupied &a = tensors_[one], &b = tensors_[other];
        if (one == other || a.extent.end <= b.extent.begin || b.extent.end <= a.extent.begin) continue;
        if (!overlap(*a.layout, a.pointer, *b.layout, b.pointer)) continue;
        return invalid("%s: shares memory with %s, accepted memory of its own: it is written", a.name, b.name);
      }
    }
    return ok();
  }

 private:
  // The maximum: a problem's tensors, what its program names and their gradients, and the workspace.
  std::array<Occupied, kNumTensors + 2 * TESSERA_MAX_CAPTURED_TENSORS + 1> tensors_;
  int count_ = 0;
};

}  // namespace tessera::core
