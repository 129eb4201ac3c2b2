// Device memory: pages of the host. Each allocation lies between inaccessible pages, so that an access past its end
// faults.
#pragma once

#include <cstddef>
#include <cstdint>

#include "result.hpp"

namespace tessera::emulated {

struct Allocation {
  uintptr_t address = 0;
  size_t bytes = 0;
  int device = 0;
};

// That which has this address in it; false: none.
bool find_allocation(uintptr_t address, Allocation& found);
// Whether bytes [address, address + bytes) are of one allocation.
bool is_mapped(uintptr_t address, size_t bytes);

}  // namespace tessera::emulated
