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
  int32_t vector_isa = 0;              // CPU with AMX; not 0: tiles serve only where they are fastest

  bool operator==(const Place&) const = default;
};

inline constexpr Place kGpu{.backend = TESSERA_BACKEND_CUDA};

std::string place_name(const Place& place);  // "avx2", "cuda"

// This machine's CPU; ends the program with a message on failure.
tessera_device cpu_device();

// The CPU's places to test: every ISA that it has, or TESSERA_ISA's.
std::vector<Place> cpu_places();

// The library's reason why there is no GPU; "" if there is one.
const std::string& gpu_missing();

// The first GPU, which must exist.
const tessera_device& gpu_device();

// A GPU of an architecture as plain data, for plans and compilation without a GPU.
tessera_device imagined_gpu(int32_t arch);

// The places of a backend, "cpu", "cuda" or "all" ("": TESSERA_TEST_BACKEND, default "cpu"); none, and the reason, if
// there is no such backend here.
std::optional<std::vector<Place>> places_of(std::string_view backend, std::string* error);

}  // namespace tessera::testing
