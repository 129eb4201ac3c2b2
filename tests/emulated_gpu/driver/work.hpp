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

// Copies of a kernel's arguments, each as aligned as any argument must be.
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
  std::vector<size_t> first_;  // chunk of each argument
};

struct KernelWork {
  const Kernel* kernel = nullptr;
  unsigned grid[3] = {}, block[3] = {}, smem_bytes = 0;
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

// Now, one at a time in a process. The error of a kernel stays the context's.
CUresult execute(Work& work, Context& context);

// A launch as the driver takes it: its kernel, sizes that the kernel and the GPU take, and its arguments copied.
CUresult make_kernel_work(const void* function, const unsigned (&grid)[3], const unsigned (&block)[3],
                          unsigned smem_bytes, void* const* params, KernelWork& work);

}  // namespace tessera::emulated
