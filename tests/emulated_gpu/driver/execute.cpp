// Executes work. If a kernel fails (it accesses unmapped memory, its blocks deadlock), its context is lost, as on a
// GPU.
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "device.hpp"
#include "kernel.hpp"
#include "work.hpp"

namespace tessera::emulated {
namespace {

// EMULATED_GPU_SEED determines the order of threads and everything else that a GPU leaves unspecified; by default 0: in
// order, and copies at once. Each launch of a process derives another order from the seed.
unsigned next_seed() {
  static const char* const text = std::getenv("EMULATED_GPU_SEED");
  static const unsigned first = text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : 0;
  static unsigned launches = 0;
  constexpr unsigned kOdd = 0x9E3779B9;  // 2^32 / golden ratio
  return first == 0 ? 0 : (first + ++launches * kOdd) | 1u;
}

// Prints the reason of a failure to standard error.
CUresult run(KernelWork& work) {
  const Kernel& kernel = *work.kernel;
  std::vector<void*> params = work.arguments.pointers();
  EmulatedLaunch launch;
  for (int i = 0; i < 3; ++i) launch.grid[i] = work.grid[i], launch.block[i] = work.block[i];
  launch.cluster[0] = kernel.bounds.cluster;
  launch.smem_bytes = work.smem_bytes;
  launch.params = params.data();
  launch.multiprocessors = static_cast<unsigned>(multiprocessors()) * kernel.bounds.min_blocks;
  launch.seed = next_seed();
  return kernel.run(&launch) == 0 ? kSuccess : kLaunchFailed;
}

CUresult run(const MemsetWork& work) {
  auto* const at = reinterpret_cast<std::byte*>(work.address);
  if (work.element_bytes == 1) {
    std::memset(at, static_cast<int>(work.value), work.count);
  } else {
    for (size_t i = 0; i < work.count; ++i) std::memcpy(at + i * work.element_bytes, &work.value, work.element_bytes);
  }
  return kSuccess;
}

CUresult run(const CopyWork& work) { return std::memcpy(work.to, work.from, work.bytes), kSuccess; }

}  // namespace

CUresult execute(Work& work, Context& context) {
  static std::mutex one;
  const std::lock_guard lock(one);
  if (context.lost != kSuccess) return context.lost;
  const CUresult result = std::visit([](auto& of) { return run(of); }, work);
  context.lost = result;  // reported by the next call, not by the one that launched the kernel
  return kSuccess;
}

}  // namespace tessera::emulated
