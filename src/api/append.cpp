// tessera_append: checks a call and passes it to a back end.
#include "core/append.hpp"

#include "api/device_here.hpp"
#include "core/caller_struct.hpp"
#include "core/cancel.hpp"
#include "core/dtypes.hpp"
#include "core/guarded.hpp"
#include "core/status.hpp"
#include "cpu/cpu.hpp"
#include "cuda/cuda.hpp"

namespace tessera::api {
using namespace core;  // the core's fields, layouts and rules
namespace {

tessera_status append(const tessera_append_call* given, const tessera_device* given_device,
                      const tessera_executor* given_executor) {
  tessera_append_call call;
  TESSERA_RETURN_IF_ERROR(read_append_call(given, call));
  tessera_executor executor;
  TESSERA_RETURN_IF_ERROR(read_executor(given_executor, executor));
  TESSERA_RETURN_IF_ERROR(validate_append(call));
  TESSERA_RETURN_IF_ERROR(check_append_pointers(call));
  tessera_device device;
  TESSERA_RETURN_IF_ERROR(device_here(given_device, device));
  if (device.backend == TESSERA_BACKEND_CUDA) {
    if (call.k_cache.layout.dtype == TESSERA_INT8) {
      return unsupported("k_cache: dtype int8, accepted on a GPU that of k: %s, float8_e4m3 and float8_e5m2",
                         tessera_dtype_name(call.k.layout.dtype));
    }
    TESSERA_RETURN_IF_ERROR(cuda::check_memory(call, device));
    return cuda::append(call, device, executor.stream);
  }
  TESSERA_RETURN_IF_ERROR(check_append_indices(call));
  Cancel cancel(executor);
  cpu::append(call, device, executor, cancel);
  return cancel.asked() ? cancelled() : ok();
}

}  // namespace
}  // namespace tessera::api

extern "C" {

tessera_status tessera_append(const tessera_append_call* call, const tessera_device* device,
                              const tessera_executor* executor) {
  return tessera::core::guarded("tessera_append", [&] { return tessera::api::append(call, device, executor); });
}

}  // extern "C"
