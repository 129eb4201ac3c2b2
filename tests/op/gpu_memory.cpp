#include "gpu_memory.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "place.hpp"

namespace tessera::testing {
namespace {

using Result = int;                  // CUresult
using Address = unsigned long long;  // CUdeviceptr

constexpr unsigned kStreamNonBlocking = 1;
constexpr int kCaptureGlobal = 0;  // what may wait for the stream, or allocate, is refused while it is captured

template <class F>
F* symbol(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const found = library ? dlsym(library, name) : nullptr;
  if (!found) throw std::runtime_error(std::string("libcuda.so.1: no ") + name);
  return reinterpret_cast<F*>(found);
}

void check(const char* name, Result result) {
  if (result == 0) return;
  const char* words = nullptr;
  symbol<Result(Result, const char**)>("cuGetErrorString")(result, &words);
  throw std::runtime_error(std::string(name) + ": " + (words ? words : "unknown error"));
}

// call<arguments>("cuName", values...): the driver's function of that name.
template <class... Arguments, class... Values>
void call(const char* name, Values... values) {
  check(name, symbol<Result(Arguments...)>(name)(static_cast<Arguments>(values)...));
}

Address address_of(const std::byte* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

GpuBlock::GpuBlock(size_t bytes, bool cached) : bytes_(std::max<size_t>(bytes, 1)), cached_(cached) {
  Gpu& gpu = Gpu::get();
  if (cached_) {
    // The smallest that is large enough.
    auto best = gpu.cache_.end();
    for (auto block = gpu.cache_.begin(); block != gpu.cache_.end(); ++block)
      if (block->bytes >= bytes_ && (best == gpu.cache_.end() || block->bytes < best->bytes)) best = block;
    if (best != gpu.cache_.end()) {
      data_ = best->data;
      bytes_ = best->bytes;
      gpu.cache_.erase(best);
      return;
    }
    constexpr size_t kGranule = size_t{64} << 20;  // far above what a case takes: one allocation serves them all
    bytes_ = (bytes_ + kGranule - 1) / kGranule * kGranule;
  }
  data_ = gpu.allocate(bytes_);
}

GpuBlock::~GpuBlock() {
  try {
    if (cached_) {
      Gpu::get().cache_.push_back({data_, bytes_});
    } else {
      Gpu::get().release(data_);
    }
  } catch (const std::exception&) {
    // The context is lost, which the call in between has reported.
  }
}

Gpu& Gpu::get() {
  static Gpu gpu;
  return gpu;
}

Gpu::Gpu() {
  int device = 0;
  call<unsigned>("cuInit", 0u);
  call<int*, int>("cuDeviceGet", &device, gpu_device().ordinal);
  call<void**, int>("cuDevicePrimaryCtxRetain", &context_, device);
  call<void*>("cuCtxSetCurrent", context_);
  stream_ = create_stream();
}

std::byte* Gpu::allocate(size_t bytes) {
  Address address = 0;
  call<Address*, size_t>("cuMemAlloc_v2", &address, bytes);
  return reinterpret_cast<std::byte*>(address);
}

void Gpu::release(std::byte* address) { call<Address>("cuMemFree_v2", address_of(address)); }

size_t Gpu::free_bytes() {
  size_t free = 0, total = 0;
  call<size_t*, size_t*>("cuMemGetInfo_v2", &free, &total);
  return free;
}

void* Gpu::create_stream() {
  void* stream = nullptr;
  call<void**, unsigned>("cuStreamCreate", &stream, kStreamNonBlocking);
  return stream;
}

void Gpu::destroy_stream(void* stream) { call<void*>("cuStreamDestroy_v2", stream); }

void Gpu::synchronize(void* stream) { call<void*>("cuStreamSynchronize", stream); }

void Gpu::upload(std::byte* device, const void* host, size_t bytes, void* stream) {
  if (bytes == 0) return;
  call<Address, const void*, size_t, void*>("cuMemcpyHtoDAsync_v2", address_of(device), host, bytes, stream);
  synchronize(stream);
}

void Gpu::download(void* host, const std::byte* device, size_t bytes, void* stream) {
  if (bytes == 0) return;
  call<void*, Address, size_t, void*>("cuMemcpyDtoHAsync_v2", host, address_of(device), bytes, stream);
  synchronize(stream);
}

void Gpu::copy(std::byte* to, const std::byte* from, size_t bytes, void* stream) {
  call<Address, Address, size_t, void*>("cuMemcpyDtoDAsync_v2", address_of(to), address_of(from), bytes, stream);
  synchronize(stream);
}

void Gpu::fill(std::byte* device, unsigned char byte, size_t bytes, void* stream) {
  if (bytes == 0) return;
  call<Address, unsigned char, size_t, void*>("cuMemsetD8Async", address_of(device), byte, bytes, stream);
  synchronize(stream);
}

void Gpu::begin_capture(void* stream) { call<void*, int>("cuStreamBeginCapture_v2", stream, kCaptureGlobal); }

void* Gpu::end_capture(void* stream) {
  void* graph = nullptr;
  void* executable = nullptr;
  call<void*, void**>("cuStreamEndCapture", stream, &graph);
  call<void**, void*, unsigned long long>("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
  call<void*>("cuGraphDestroy", graph);
  return executable;
}

void Gpu::launch_graph(void* graph, void* stream) { call<void*, void*>("cuGraphLaunch", graph, stream); }

void Gpu::destroy_graph(void* graph) { call<void*>("cuGraphExecDestroy", graph); }

}  // namespace tessera::testing
