// The keyword arguments of forward, backward and plan: the fields of a problem (core/fields.hpp), and how a call runs.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "array.hpp"
#include "core/fields.hpp"
#include "score.hpp"
#include "tessera/tessera.h"

namespace tessera::python {

// One call: the problem, its data, and the objects that keep the data alive.
struct Call {
  explicit Call(tessera_direction direction);

  tessera_problem problem;
  tessera_buffers buffers{};
  int32_t kernel = 0;
  int32_t threads = 0;       // 0 = the device's number
  int32_t cores = 0;         // GPU: multiprocessors to plan for; 0 = the device's number
  bool openmp = false;       // on the process's OpenMP threads, if it has them
  bool heads_first = false;  // the arrays are [B, H, S, D]; the problem's layouts are [B, S, H, D] once options are set
  CommonPlace place;
  const char* without_data = nullptr;  // the name of a tensor without data; there may be others
  nanobind::object allocate;           // GPU: (number of float32 elements) -> an array of them, for the workspace

  std::array<nanobind::ndarray<nanobind::ro>, core::kNumTensors> owners;
  ProgramHandle program;                                         // the program of the problem
  std::vector<nanobind::ndarray<nanobind::ro>> captured_owners;  // of its captured tensors
  std::vector<nanobind::object> captured;                        // likewise
};

// Sets that tensor. None: absent.
void set_tensor(Call& call, core::TensorName name, nanobind::handle value);
// Exchanges the axes of rows and heads: [B, S, H, D] and [B, H, S, D], packed [T, H, D] and [H, T, D].
void swap_rows_and_heads(tessera_layout& layout);
// Sets every option that was given, after the tensors. Throws Error for a wrong value, TypeError for a name that
// `function` does not have.
void set_options(Call& call, const char* function, const nanobind::kwargs& options);

// Sets the only family that a call's device considers: number `kernel` of kernel_names(), 0 for any.
void set_family(tessera_device& device, int32_t kernel);

// "auto" and every family's name.
nanobind::list kernel_names();

// The fields that are options, for stubs, schemas and their tests: a list of {"name", "kind", ...}.
nanobind::list option_fields();

}  // namespace tessera::python
