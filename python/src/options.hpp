// What forward, backward and plan take by keyword: one table of tensors, one of values.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "array.hpp"
#include "tessera/tessera.h"

namespace tessera::python {

inline constexpr size_t kMaxTensors = 21;  // of tessera_buffers

// One call: the problem, its data, and what keeps the data alive.
struct Call {
  explicit Call(tessera_direction direction);

  tessera_problem problem;
  tessera_buffers buffers{};
  int32_t kernel = TESSERA_KERNEL_AUTO;
  int32_t threads = 0;  // 0 = the device's
  bool openmp = false;  // on the process's OpenMP threads, where it has them
  CommonPlace place;
  nanobind::object allocate;  // GPU: (number of float32 elements) -> an array of them, for the workspace

  std::array<nanobind::ndarray<nanobind::ro>, kMaxTensors> owners;
};

// Sets the tensor of that name, which is one of tessera_buffers. None: absent.
void set_tensor(Call& call, const char* name, nanobind::handle value);
// Every option that was given. Throws Error for a wrong value, TypeError for a name that `function` does not take.
void set_options(Call& call, const char* function, const nanobind::kwargs& options);

}  // namespace tessera::python
