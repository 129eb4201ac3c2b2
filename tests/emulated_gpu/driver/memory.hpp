// Device memory: pages of the host. Each allocation lies between inaccessible pages, so that an access past its end
// faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "result.hpp"

namespace tessera::emulated {

struct Allocation {
  uintptr_t address = 0;
  size_t bytes = 0;
  int device = 0;
};

// Finds the allocation that contains the address; returns false if there is none.
bool find_allocation(uintptr_t address, Allocation& found);
// Every allocation, by address.
std::vector<Allocation> allocations();
// True if bytes [address, address + bytes) belong to one allocation.
bool is_mapped(uintptr_t address, size_t bytes);

}  // namespace tessera::emulated
