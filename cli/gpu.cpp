#include "gpu.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>

#include "error.hpp"

namespace tessera::cli {
namespace {

using Result = int;                  // CUresult
using Address = unsigned long long;  // CUdeviceptr
constexpr void* kStream = nullptr;   // the default stream

template <class F>
F* symbol(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const found = library ? dlsym(library, name) : nullptr;
  if (!found) throw Failure(fmt::format("CUDA: libcuda.so.1 has no {}", name));
  return reinterpret_cast<F*>(found);
}

// result_of<arguments>("cuName", values...): the result of the driver's function of that name.
template <class... Arguments, class... Values>
Result result_of(const char* name, Values... values) {
  return symbol<Result(Arguments...)>(name)(static_cast<Arguments>(values)...);
}

template <class... Arguments, class... Values>
void call(const char* name, Values... values) {
  const Result result = result_of<Arguments...>(name, values...);
  if (result == 0) return;
  const char* words = nullptr;
  result_of<Result, const char**>("cuGetErrorString", result, &words);
  throw Failure(fmt::format("{}: {}", name, words ? words : "unknown error"));
}

struct FreeAndTotal {
  std::size_t free = 0, total = 0;
};
FreeAndTotal memory_of_context() {
  FreeAndTotal memory;
  call<std::size_t*, std::size_t*>("cuMemGetInfo_v2", &memory.free, &memory.total);
  return memory;
}

Address address_of(const std::byte* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
std::size_t size_of(const Memory& memory) { return static_cast<std::size_t>(memory.size_bytes()); }

class Event {
 public:
  Event() { call<void**, unsigned>("cuEventCreate", &event_, 0U); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { result_of<void*>("cuEventDestroy_v2", event_); }

  void record() const { call<void*, void*>("cuEventRecord", event_, kStream); }
  double seconds_since(const Event& start) const {
    call<void*>("cuEventSynchronize", event_);
    float milliseconds = 0;
    call<float*, void*, void*>("cuEventElapsedTime", &milliseconds, start.event_, event_);
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  void* event_ = nullptr;
};

}  // namespace

Gpu::Gpu(std::int32_t ordinal) {
  int device = 0;
  void* context = nullptr;
  call<unsigned>("cuInit", 0U);
  call<int*, int>("cuDeviceGet", &device, ordinal);
  call<void**, int>("cuDevicePrimaryCtxRetain", &context, device);
  call<void*>("cuCtxSetCurrent", context);
}

Memory Gpu::allocate(std::int64_t size_bytes, const std::string& what) const {
  Address address = 0;
  if (result_of<Address*, std::size_t>("cuMemAlloc_v2", &address, std::max<std::int64_t>(size_bytes, 1)) != 0) {
    throw Failure(
        fmt::format("{}: needs {} bytes, {} are available on the GPU", what, size_bytes, memory_of_context().free));
  }
  const auto give_back = [](std::byte* data) { result_of<Address>("cuMemFree_v2", address_of(data)); };
  return Memory({reinterpret_cast<std::byte*>(address), give_back}, size_bytes);
}

Memory Gpu::copy_of(const Memory& host, const std::string& what) const {
  Memory device = allocate(host.size_bytes(), what);
  if (host.size_bytes() > 0) {
    call<Address, const void*, std::size_t>("cuMemcpyHtoD_v2", address_of(device.data()), host.data(), size_of(host));
  }
  return device;
}

void Gpu::download(const Memory& host, const Memory& device) const {
  if (host.size_bytes() == 0) return;
  call<void*, Address, std::size_t>("cuMemcpyDtoH_v2", host.data(), address_of(device.data()), size_of(host));
}

void Gpu::fill(const Memory& device, std::uint8_t byte) const {
  if (device.size_bytes() == 0) return;
  call<Address, unsigned char, std::size_t>("cuMemsetD8_v2", address_of(device.data()), byte, size_of(device));
}

double Gpu::seconds(int calls, const std::function<void()>& timed) const {
  const Event start, end;
  start.record();
  for (int i = 0; i < calls; ++i) timed();
  end.record();
  return end.seconds_since(start) / calls;
}

std::int64_t Gpu::memory_bytes() const { return static_cast<std::int64_t>(memory_of_context().total); }

bool Gpu::fits(std::int64_t size_bytes) const {
  constexpr std::int64_t kDriverBytes = std::int64_t{256} << 20;
  return size_bytes + kDriverBytes <= static_cast<std::int64_t>(memory_of_context().free);
}

}  // namespace tessera::cli
