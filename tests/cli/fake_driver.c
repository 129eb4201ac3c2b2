/* A libcuda.so.1 that answers as FAKE_CUDA_VERSION, FAKE_CUDA_INIT and FAKE_CUDA_MAJOR say: one GPU, and nothing runs. */
#include <stdio.h>
#include <stdlib.h>

static int number(const char* name) {
  const char* value = getenv(name);
  return value ? atoi(value) : 0;
}

enum { kMajor = 75, kMinor = 76 };

int cuDriverGetVersion(int* version) { return (*version = number("FAKE_CUDA_VERSION"), 0); }
int cuInit(unsigned flags) { return (void)flags, number("FAKE_CUDA_INIT"); }
int cuGetErrorName(int error, const char** name) { return (void)error, *name = "CUDA_ERROR_PRETENDED", 0; }
int cuGetErrorString(int error, const char** text) { return (void)error, *text = "the driver's words", 0; }
int cuDeviceGetCount(int* count) { return (*count = 1, 0); }
int cuDeviceGet(int* device, int ordinal) { return (*device = ordinal, 0); }
int cuDeviceGetName(char* name, int size, int device) {
  return snprintf(name, (size_t)size, "Pretended %d", device) < 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == kMajor ? number("FAKE_CUDA_MAJOR") : attribute == kMinor ? 0 : 1 << 17;
  return 0;
}

#define UNUSED(name) \
  int name(void) { return 1; }
UNUSED(cuDevicePrimaryCtxRetain)
UNUSED(cuCtxGetCurrent)
UNUSED(cuCtxGetDevice)
UNUSED(cuCtxPushCurrent_v2)
UNUSED(cuCtxPopCurrent_v2)
UNUSED(cuStreamGetCtx)
UNUSED(cuStreamGetId)
UNUSED(cuStreamGetPriority)
UNUSED(cuStreamIsCapturing)
UNUSED(cuStreamSynchronize)
UNUSED(cuThreadExchangeStreamCaptureMode)
UNUSED(cuPointerGetAttribute)
UNUSED(cuPointerGetAttributes)
UNUSED(cuMemcpyDtoHAsync_v2)
UNUSED(cuMemsetD32Async)
UNUSED(cuLibraryLoadData)
UNUSED(cuLibraryUnload)
UNUSED(cuLibraryGetKernel)
UNUSED(cuKernelGetFunction)
UNUSED(cuKernelSetAttribute)
UNUSED(cuLaunchKernel)
UNUSED(cuGraphCreate)
UNUSED(cuGraphDestroy)
UNUSED(cuGraphAddKernelNode_v2)
UNUSED(cuGraphAddMemsetNode)
UNUSED(cuGraphKernelNodeSetAttribute)
UNUSED(cuGraphInstantiateWithFlags)
UNUSED(cuGraphExecKernelNodeSetParams_v2)
UNUSED(cuGraphExecMemsetNodeSetParams)
UNUSED(cuGraphExecDestroy)
UNUSED(cuGraphLaunch)
UNUSED(cuTensorMapEncodeTiled)
