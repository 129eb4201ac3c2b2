#include "result.hpp"

namespace tessera::emulated {
namespace {

struct Described {
  CUresult result;
  const char *name, *text;
};
constexpr Described kResults[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
};

const Described* find(CUresult result) {
  for (const Described& described : kResults) {
    if (described.result == result) return &described;
  }
  return nullptr;
}

}  // namespace
}  // namespace tessera::emulated

using namespace tessera::emulated;

EMULATED_DRIVER cuGetErrorName(CUresult result, const char** name) {
  const Described* const described = find(result);
  *name = described ? described->name : nullptr;
  return described ? kSuccess : kInvalidValue;
}
EMULATED_DRIVER cuGetErrorString(CUresult result, const char** text) {
  const Described* const described = find(result);
  *text = described ? described->text : nullptr;
  return described ? kSuccess : kInvalidValue;
}
