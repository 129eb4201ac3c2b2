#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <map>
#include <mutex>

#include "device.hpp"
#include "stream.hpp"

namespace tessera::emulated {
namespace {

constexpr size_t kAlignment = 256;  // that of the driver

struct Pages {
  void* base;
  size_t bytes;
};

struct Memory {
  std::mutex mutex;
  struct Entry {
    Allocation allocation;
    Pages pages;
  };
  std::map<uintptr_t, Entry> entries;  // by first address
  size_t used[kMostDevices] = {};
};
Memory& memory() {
  static Memory& it = *new Memory;
  return it;
}

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Allocates so that the end, rounded up to the alignment, lies before an inaccessible page; another such page lies
// before the start.
CUresult allocate(size_t bytes, Context& context, uintptr_t& address) {
  const size_t page = page_bytes(), taken = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t usable = (taken + page - 1) / page * page, all = usable + 2 * page;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  size_t& used = m.used[context.device];
  if (bytes > kMemoryBytes || used + usable > kMemoryBytes) return kOutOfMemory;
  void* const base = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return kOutOfMemory;
  const uintptr_t first = reinterpret_cast<uintptr_t>(base) + page;
  if (mprotect(reinterpret_cast<void*>(first), usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, all);
    return kOutOfMemory;
  }
  used += usable;
  address = first + usable - taken;
  m.entries[address] = {{address, bytes, context.device}, {base, all}};
  return kSuccess;
}

}  // namespace

bool find_allocation(uintptr_t address, Allocation& found) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto at = m.entries.upper_bound(address);
  if (at == m.entries.begin()) return false;
  found = std::prev(at)->second.allocation;
  return address - found.address < found.bytes;
}

std::vector<Allocation> allocations() {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  std::vector<Allocation> all;
  for (const auto& [address, entry] : m.entries) all.push_back(entry.allocation);
  return all;
}

bool is_mapped(uintptr_t address, size_t bytes) {
  Allocation found;
  return find_allocation(address, found) && bytes <= found.bytes - (address - found.address);
}

}  // namespace tessera::emulated

using namespace tessera::emulated;
using tessera::cuda::CUdeviceptr;
using tessera::cuda::CUpointerAttribute;

// Declared in launch.hpp.
extern "C" __attribute__((visibility("default"))) bool emulated_is_mapped(uint64_t address, size_t bytes) {
  return is_mapped(address, bytes);
}

EMULATED_DRIVER cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  if (bytes == 0) return kInvalidValue;
  if (const CUresult result = check_context(); result != kSuccess) return result;
  if (refuses_while_captured()) return kCaptureUnsupported;
  uintptr_t found = 0;
  const CUresult result = allocate(bytes, *current_context(), found);
  return *address = found, result;
}
EMULATED_DRIVER cuMemFree_v2(CUdeviceptr address) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  if (refuses_while_captured()) return kCaptureUnsupported;
  if (const CUresult result = finish_context(); result != kSuccess) return result;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto at = m.entries.find(address);
  if (at == m.entries.end()) return kInvalidValue;
  const Memory::Entry entry = at->second;
  m.entries.erase(at);
  m.used[entry.allocation.device] -= entry.pages.bytes - 2 * page_bytes();
  munmap(entry.pages.base, entry.pages.bytes);
  return kSuccess;
}
EMULATED_DRIVER cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  *total = kMemoryBytes, *free = kMemoryBytes - m.used[current_context()->device];
  return kSuccess;
}

namespace {

CUresult attribute_of(const Allocation& allocation, CUpointerAttribute attribute, void* value) {
  switch (attribute) {
    case tessera::cuda::kPointerMemoryType:
      return *static_cast<unsigned*>(value) = tessera::cuda::kMemoryDevice, kSuccess;
    case tessera::cuda::kPointerIsManaged:
      return *static_cast<int*>(value) = 0, kSuccess;
    case tessera::cuda::kPointerDeviceOrdinal:
      return *static_cast<int*>(value) = allocation.device, kSuccess;
  }
  return kInvalidValue;
}

}  // namespace

EMULATED_DRIVER cuPointerGetAttribute(void* value, CUpointerAttribute attribute, CUdeviceptr pointer) {
  Allocation found;
  return find_allocation(pointer, found) ? attribute_of(found, attribute, value) : kInvalidValue;
}
// An address unknown to CUDA is not an error: its attributes are zero, and its ordinal is -2.
EMULATED_DRIVER cuPointerGetAttributes(unsigned count, CUpointerAttribute* attributes, void** values,
                                       CUdeviceptr pointer) {
  Allocation found;
  const bool ours = find_allocation(pointer, found);
  for (unsigned i = 0; i < count; ++i) {
    constexpr int kNobodys = -2;
    if (!ours) *static_cast<int*>(values[i]) = attributes[i] == tessera::cuda::kPointerDeviceOrdinal ? kNobodys : 0;
    if (ours && attribute_of(found, attributes[i], values[i]) != kSuccess) return kInvalidValue;
  }
  return kSuccess;
}
