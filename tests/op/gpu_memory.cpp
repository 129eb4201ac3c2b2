#include "gpu_memory.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "place.hpp"

namespace tessera::testing {
namespace {

using Result = int;                  // CUresult
using Address = unsigned long long;  // CUdeviceptr

constexpr unsigned kStreamNonBlocking = 1;
constexpr int kCaptureGlobal = 0;  // calls that may wait or allocate are refused during a capture

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

// While one exists, its GPU's context is this thread's.
class Gpu::Scope {
 public:
  explicit Scope(const Gpu& gpu) { call<void*>("cuCtxPushCurrent_v2", gpu.context_); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() {
    void* popped = nullptr;
    symbol<Result(void**)>("cuCtxPopCurrent_v2")(&popped);
  }
};

GpuBlock::GpuBlock(size_t bytes, bool cached, Gpu& gpu)
    : gpu_(gpu), bytes_(std::max<size_t>(bytes, 1)), cached_(cached) {
  if (cached_) {
    // The smallest that is large enough.
    auto& cache = gpu_.cache_;
    auto best = cache.end();
    for (auto block = cache.begin(); block != cache.end(); ++block)
      if (block->bytes >= bytes_ && (best == cache.end() || block->bytes < best->bytes)) best = block;
    if (best != cache.end()) {
      data_ = best->data;
      bytes_ = best->bytes;
      cache.erase(best);
      return;
    }
    constexpr size_t kGranule = size_t{64} << 20;  // far above what a case takes: one allocation serves them all
    bytes_ = (bytes_ + kGranule - 1) / kGranule * kGranule;
  }
  data_ = gpu_.allocate(bytes_);
}

GpuBlock::~GpuBlock() {
  try {
    if (cached_) {
      gpu_.cache_.push_back({data_, bytes_});
    } else {
      gpu_.release(data_);
    }
  } catch (const std::exception&) {
    // The context is lost, as an earlier call has reported.
  }
}

Gpu& Gpu::get() {
  static Gpu& first = []() -> Gpu& {
    static Gpu gpu(gpu_device().ordinal);
    call<void*>("cuCtxSetCurrent", gpu.context_);
    return gpu;
  }();
  return first;
}

Gpu& Gpu::at(int index) {
  if (index == 0) return get();
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<Gpu>> gpus;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Gpu>& gpu = gpus[index];
  if (!gpu) gpu.reset(new Gpu(gpu_device().ordinal + index));
  return *gpu;
}

void* Gpu::current() {
  void* context = nullptr;
  call<void**>("cuCtxGetCurrent", &context);
  return context;
}

Gpu::Gpu(int ordinal) {
  int device = 0;
  call<unsigned>("cuInit", 0u);
  call<int*, int>("cuDeviceGet", &device, ordinal);
  call<void**, int>("cuDevicePrimaryCtxRetain", &context_, device);
  stream_ = create_stream();
}

std::byte* Gpu::allocate(size_t bytes) {
  const Scope scope(*this);
  Address address = 0;
  call<Address*, size_t>("cuMemAlloc_v2", &address, bytes);
  return reinterpret_cast<std::byte*>(address);
}

void Gpu::release(std::byte* address) {
  const Scope scope(*this);
  call<Address>("cuMemFree_v2", address_of(address));
}

size_t Gpu::free_bytes() {
  const Scope scope(*this);
  size_t free = 0, total = 0;
  call<size_t*, size_t*>("cuMemGetInfo_v2", &free, &total);
  return free;
}

void* Gpu::create_stream() {
  const Scope scope(*this);
  void* stream = nullptr;
  call<void**, unsigned>("cuStreamCreate", &stream, kStreamNonBlocking);
  return stream;
}

void Gpu::destroy_stream(void* stream) {
  const Scope scope(*this);
  call<void*>("cuStreamDestroy_v2", stream);
}

void Gpu::synchronize(void* stream) {
  const Scope scope(*this);
  call<void*>("cuStreamSynchronize", stream);
}

void Gpu::upload(std::byte* device, const void* host, size_t bytes, void* stream) {
  if (bytes == 0) return;
  const Scope scope(*this);
  call<Address, const void*, size_t, void*>("cuMemcpyHtoDAsync_v2", address_of(device), host, bytes, stream);
  synchronize(stream);
}

void Gpu::download(void* host, const std::byte* device, size_t bytes, void* stream) {
  if (bytes == 0) return;
  const Scope scope(*this);
  call<void*, Address, size_t, void*>("cuMemcpyDtoHAsync_v2", host, address_of(device), bytes, stream);
  synchronize(stream);
}

void Gpu::copy(std::byte* to, const std::byte* from, size_t bytes, void* stream) {
  const Scope scope(*this);
  call<Address, Address, size_t, void*>("cuMemcpyDtoDAsync_v2", address_of(to), address_of(from), bytes, stream);
  synchronize(stream);
}

void Gpu::fill(std::byte* device, unsigned char byte, size_t bytes, void* stream) {
  if (bytes == 0) return;
  const Scope scope(*this);
  call<Address, unsigned char, size_t, void*>("cuMemsetD8Async", address_of(device), byte, bytes, stream);
  synchronize(stream);
}

void Gpu::begin_capture(void* stream) {
  const Scope scope(*this);
  call<void*, int>("cuStreamBeginCapture_v2", stream, kCaptureGlobal);
}

void* Gpu::end_capture(void* stream) {
  const Scope scope(*this);
  void* graph = nullptr;
  void* executable = nullptr;
  call<void*, void**>("cuStreamEndCapture", stream, &graph);
  call<void**, void*, unsigned long long>("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
  call<void*>("cuGraphDestroy", graph);
  return executable;
}

void Gpu::launch_graph(void* graph, void* stream) {
  const Scope scope(*this);
  call<void*, void*>("cuGraphLaunch", graph, stream);
}

void Gpu::destroy_graph(void* graph) {
  const Scope scope(*this);
  call<void*>("cuGraphExecDestroy", graph);
}

}  // namespace tessera::testing
