// The work that streams execute and graphs consist of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "result.hpp"

namespace tessera::emulated {

struct Context;
struct Kernel;

// Copies of a kernel's arguments, with the strictest alignment that an argument may need.
class Arguments {
 public:
  Arguments() = default;
  Arguments(std::span<const size_t> bytes, void* const* params);
  std::vector<void*> pointers();

 private:
  struct alignas(128) Chunk {
    std::byte bytes[128];
  };
  std::vector<Chunk> chunks_;
  std::vector<size_t> first_;  // first chunk of each argument
};

struct KernelWork {
  const Kernel* kernel = nullptr;
  unsigned grid[3] = {}, block[3] = {}, smem_bytes = 0;
  bool early = false;  // it may start before the previous kernel has ended (programmatic stream serialization)
  Arguments arguments;
};
struct MemsetWork {
  uintptr_t address = 0;
  unsigned value = 0, element_bytes = 0;
  size_t count = 0;
};
struct CopyWork {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};
using Work = std::variant<KernelWork, MemsetWork, CopyWork>;

// Executes the work now, one at a time per process. A kernel's error remains the context's state.
CUresult execute(Work& work, Context& context);

// A launch accepted by the driver: its kernel, sizes within the limits of the kernel and the GPU, and copies of its
// arguments.
CUresult make_kernel_work(const void* function, const unsigned (&grid)[3], const unsigned (&block)[3],
                          unsigned smem_bytes, void* const* params, KernelWork& work);

}  // namespace tessera::emulated
