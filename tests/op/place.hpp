// Where a call can run: an instruction set of this machine's CPU, or a GPU.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::testing {

struct Place {
  int32_t backend = TESSERA_BACKEND_CPU;
  int32_t isa = TESSERA_ISA_BASELINE;  // CPU
  int32_t vector_isa = 0;              // CPU, with AMX: other than 0, its tiles serve what they are the fastest for

  bool operator==(const Place&) const = default;
};

inline constexpr Place kGpu{.backend = TESSERA_BACKEND_CUDA};

std::string place_name(const Place& place);  // "avx2", "cuda"

// This machine's CPU; ends the program with a message if it cannot be had.
tessera_device cpu_device();

// The CPU's places to be tested: every ISA that it has, or the one that TESSERA_ISA names.
std::vector<Place> cpu_places();

// Why there is no GPU to run on, in the library's words; "" when there is one.
const std::string& gpu_missing();

// The first GPU, which must be there.
const tessera_device& gpu_device();

// A GPU of an architecture as plain data. Plans are made for it, and kernels compiled, on a machine that has none.
tessera_device imagined_gpu(int32_t arch);

// The places of a backend, "cpu", "cuda" or "all" ("": what TESSERA_TEST_BACKEND says, else "cpu"); nothing, and why,
// if there is no such backend here.
std::optional<std::vector<Place>> places_of(std::string_view backend, std::string* error);

}  // namespace tessera::testing
