// Work, executed. A kernel that touches what is no memory faults, which is reported with its name, and its context is lost, as
// on a GPU.
#include <signal.h>
#include <unistd.h>

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "device.hpp"
#include "kernel.hpp"
#include "memory.hpp"
#include "work.hpp"

namespace tessera::emulated {
namespace {

// Order among threads and what else a GPU leaves open: EMULATED_GPU_SEED, 0 unless told, in order and at once. Each launch of a
// process has another of the orders that a seed stands for.
unsigned next_seed() {
  static const char* const text = std::getenv("EMULATED_GPU_SEED");
  static const unsigned first = text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : 0;
  static unsigned launches = 0;
  constexpr unsigned kOdd = 0x9E3779B9;  // 2^32 / golden ratio
  return first == 0 ? 0 : (first + ++launches * kOdd) | 1u;
}

thread_local sigjmp_buf* faulted = nullptr;  // where a kernel's fault leads, NULL: none runs
thread_local volatile uintptr_t fault_address = 0;

void on_fault(int number, siginfo_t* info, void*) {
  if (!faulted) {
    signal(number, SIG_DFL);
    return;
  }
  fault_address = reinterpret_cast<uintptr_t>(info->si_addr);
  siglongjmp(*faulted, 1);
}

// Faults of this thread lead to `where` while one exists. On a stack of its own, since a fiber's may be what has overflowed.
class FaultScope {
 public:
  explicit FaultScope(sigjmp_buf& where) {
    constexpr size_t kStack = size_t{64} << 10;
    thread_local const std::unique_ptr<std::byte[]> stack(new std::byte[kStack]);
    stack_t own{};
    own.ss_sp = stack.get(), own.ss_size = kStack;
    sigaltstack(&own, &stack_before_);
    struct sigaction action {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &action, &before_[i]);
    faulted = &where;
  }
  ~FaultScope() {
    faulted = nullptr;
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before_[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }
  FaultScope(const FaultScope&) = delete;
  FaultScope& operator=(const FaultScope&) = delete;

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS};
  stack_t stack_before_{};
  struct sigaction before_[2];
};

void report_fault(const KernelWork& work, uintptr_t address) {
  std::fprintf(stderr, "emulated GPU: %s: illegal access to %#llx", work.kernel->name.c_str(),
               static_cast<unsigned long long>(address));
  Allocation near;
  if (allocation_before(address, near)) {
    std::fprintf(stderr, ", %lld bytes after the end of an allocation of %zu bytes at %#llx",
                 static_cast<long long>(address - near.address - near.bytes), near.bytes,
                 static_cast<unsigned long long>(near.address));
  }
  std::fprintf(stderr, "\n");
}

CUresult run(KernelWork& work) {
  const Kernel& kernel = *work.kernel;
  std::vector<void*> params = work.arguments.pointers();
  char error[1024] = "";
  EmulatedLaunch launch;
  for (int i = 0; i < 3; ++i) launch.grid[i] = work.grid[i], launch.block[i] = work.block[i];
  launch.cluster[0] = kernel.info.cluster;
  launch.smem_bytes = work.smem_bytes;
  launch.params = params.data();
  launch.multiprocessors = static_cast<unsigned>(multiprocessors()) * kernel.info.min_blocks;
  launch.seed = next_seed();
  launch.error_text = error, launch.error_bytes = sizeof error;
  sigjmp_buf where;
  const FaultScope scope(where);
  if (sigsetjmp(where, 1) != 0) {
    report_fault(work, fault_address);
    return kIllegalAddress;
  }
  if (kernel.run(&launch) == 0) return kSuccess;
  std::fprintf(stderr, "emulated GPU: %s: %s\n", kernel.name.c_str(), error);
  return kLaunchFailed;
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
  if (result == kSuccess) return result;
  context.lost = result;
  // As of a GPU, which is told of it later, by the next call that waits.
  return kSuccess;
}

}  // namespace tessera::emulated
