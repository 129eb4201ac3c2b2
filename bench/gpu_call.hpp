// Helpers of programs that time the library's GPU calls: the driver, opened at run time, the clock, layouts of dense
// tensors. They use the C interface alone.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "tessera/tessera.h"

namespace bench {

using Clock = std::chrono::steady_clock;

inline double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

inline void check(const tessera_status& status) {
  if (status.code != TESSERA_OK) throw std::runtime_error(status.message);
}

inline void* driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const function = library ? dlsym(library, name) : nullptr;
  if (!function) throw std::runtime_error(std::string("libcuda.so.1: no ") + name);
  return function;
}

template <class... Arguments>
void driver(const char* name, Arguments... arguments) {
  const int result = reinterpret_cast<int (*)(Arguments...)>(driver_function(name))(arguments...);
  if (result != 0) throw std::runtime_error(std::string(name) + ": error " + std::to_string(result));
}

// GPU 0's primary context, current in this thread.
inline void make_context() {
  int device = 0;
  void* context = nullptr;
  driver("cuInit", 0u);
  driver("cuDeviceGet", &device, 0);
  driver("cuDevicePrimaryCtxRetain", &context, device);
  driver("cuCtxSetCurrent", context);
}

inline void* make_stream() {
  void* stream = nullptr;
  driver("cuStreamCreate", &stream, 1u);  // does not wait for the default stream
  return stream;
}

inline tessera_layout layout(std::int32_t dtype, std::initializer_list<std::int64_t> shape) {
  tessera_layout result{};
  result.dtype = dtype;
  result.rank = static_cast<std::int32_t>(shape.size());
  std::ranges::copy(shape, result.shape);
  std::int64_t stride = 1;
  for (std::int32_t i = result.rank; i-- > 0; stride *= result.shape[i]) result.strides[i] = stride;
  return result;
}

inline std::size_t bytes_of(const tessera_layout& tensor) {
  std::size_t bytes = tessera_dtype_bytes(tensor.dtype);
  for (std::int32_t i = 0; i < tensor.rank; ++i) bytes *= static_cast<std::size_t>(tensor.shape[i]);
  return bytes;
}

}  // namespace bench
