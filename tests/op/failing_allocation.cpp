#include "failing_allocation.hpp"

#include <cstdlib>
#include <new>

namespace {

thread_local int64_t allocations_left = -1;

void* allocate(size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) return nullptr;
  return std::malloc(bytes > 0 ? bytes : 1);
}

}  // namespace

void tessera::testing::set_allocations_left(int64_t count) { allocations_left = count; }

void* operator new(size_t bytes) {
  if (void* const memory = allocate(bytes)) return memory;
  throw std::bad_alloc();
}
// The same operator delete frees this, so it is replaced as well.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
