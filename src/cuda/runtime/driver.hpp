// libcuda, opened when it is first needed: the types and functions that are used here, so that building needs no CUDA
// header. https://docs.nvidia.com/cuda/cuda-driver-api/
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphNode = struct CUgraphNode_st*;
using CUgraphExec = struct CUgraphExec_st*;

inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaErrorNotInitialized = 3;
inline constexpr CUresult kCudaErrorNoDevice = 100;

enum CUdeviceAttribute : int {
  kDeviceMultiprocessors = 16,
  kDeviceL2Bytes = 38,
  kDeviceCapabilityMajor = 75,
  kDeviceCapabilityMinor = 76,
  kDeviceSmemPerMultiprocessor = 81,
  kDeviceSmemPerBlockOptin = 97,
};

enum CUpointerAttribute : int {
  kPointerMemoryType = 2,
  kPointerIsManaged = 8,
  kPointerDeviceOrdinal = 9,
};
enum CUmemorytype : unsigned { kMemoryHost = 1, kMemoryDevice = 2 };

enum CUfunctionAttribute : int {
  kFunctionMaxDynamicSmemBytes = 8,
};

enum CUstreamFlags : unsigned { kStreamNonBlocking = 1 };
enum CUeventFlags : unsigned { kEventDisableTiming = 2 };
enum CUcaptureStatus : int { kCaptureNone = 0 };
enum CUcaptureMode : int { kCaptureRelaxed = 2 };

enum CUlaunchAttributeID : int { kLaunchProgrammaticSerialization = 6, kLaunchPriority = 8 };
union CUlaunchAttributeValue {
  char bytes[64];
  int priority;
  int programmatic_serialization;
};
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char padding[4];
  CUlaunchAttributeValue value;
};
struct CUlaunchConfig {
  unsigned grid[3], block[3], smem_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

struct CUkernelNodeParams {
  CUfunction function;  // null: use `kernel`
  unsigned grid[3], block[3], smem_bytes;
  void** params;
  void** extra;
  CUkernel kernel;
  CUcontext context;  // null: the current context
};
struct CUmemsetNodeParams {
  CUdeviceptr address;
  size_t pitch;
  unsigned value, element_bytes;
  size_t width, height;
};

enum CUtensorMapDataType : int { kTensorMapUInt32 = 2, kTensorMapFloat16 = 6, kTensorMapBFloat16 = 9 };
enum CUtensorMapInterleave : int { kTensorMapNotInterleaved = 0 };
enum CUtensorMapSwizzle : int { kTensorMapNotSwizzled = 0, kTensorMapSwizzle128B = 3 };
enum CUtensorMapL2promotion : int { kTensorMapL2Promotion128B = 2 };
enum CUtensorMapFloatOOBfill : int { kTensorMapZeroFill = 0 };

// The functions, under the driver's own names. All of them exist in version 12.0, the oldest supported.
struct Driver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);  // 1000 * major + 10 * minor
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);

  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int size, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, CUdeviceAttribute attribute, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);

  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxGetDevice)(CUdevice* device);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);

  CUresult (*cuStreamCreate)(CUstream* stream, unsigned flags);
  CUresult (*cuStreamDestroy)(CUstream stream);
  CUresult (*cuStreamWaitEvent)(CUstream stream, CUevent event, unsigned flags);
  CUresult (*cuEventCreate)(CUevent* event, unsigned flags);
  CUresult (*cuEventDestroy)(CUevent event);
  CUresult (*cuEventRecord)(CUevent event, CUstream stream);
  CUresult (*cuStreamGetCtx)(CUstream stream, CUcontext* context);
  CUresult (*cuStreamGetId)(CUstream stream, uint64_t* id);
  CUresult (*cuStreamGetPriority)(CUstream stream, int* priority);
  CUresult (*cuStreamIsCapturing)(CUstream stream, CUcaptureStatus* status);
  CUresult (*cuStreamSynchronize)(CUstream stream);
  CUresult (*cuThreadExchangeStreamCaptureMode)(CUcaptureMode* mode);

  CUresult (*cuPointerGetAttribute)(void* value, CUpointerAttribute attribute, CUdeviceptr pointer);
  CUresult (*cuPointerGetAttributes)(unsigned count, CUpointerAttribute* attributes, void** values,
                                     CUdeviceptr pointer);
  CUresult (*cuMemAlloc)(CUdeviceptr* device, size_t bytes);
  CUresult (*cuMemFree)(CUdeviceptr device);
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr device, const void* host, size_t bytes, CUstream stream);
  CUresult (*cuMemcpyDtoHAsync)(void* host, CUdeviceptr device, size_t bytes, CUstream stream);
  CUresult (*cuMemsetD32Async)(CUdeviceptr device, unsigned value, size_t count, CUstream stream);

  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, int* jit_options, void** jit_values,
                                unsigned jit_count, int* options, void** values, unsigned count);
  CUresult (*cuLibraryUnload)(CUlibrary library);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelGetFunction)(CUfunction* function, CUkernel kernel);
  CUresult (*cuKernelSetAttribute)(CUfunctionAttribute attribute, int value, CUkernel kernel, CUdevice device);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned smem_bytes, CUstream stream, void** params,
                             void** extra);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** params, void** extra);

  CUresult (*cuGraphCreate)(CUgraph* graph, unsigned flags);
  CUresult (*cuGraphDestroy)(CUgraph graph);
  CUresult (*cuGraphAddKernelNode)(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                   const CUkernelNodeParams* params);
  CUresult (*cuGraphAddMemsetNode)(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                   const CUmemsetNodeParams* params, CUcontext context);
  CUresult (*cuGraphKernelNodeSetAttribute)(CUgraphNode node, CUlaunchAttributeID attribute,
                                            const CUlaunchAttributeValue* value);
  CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec* executable, CUgraph graph, unsigned long long flags);
  CUresult (*cuGraphUpload)(CUgraphExec executable, CUstream stream);
  CUresult (*cuGraphExecKernelNodeSetParams)(CUgraphExec executable, CUgraphNode node,
                                             const CUkernelNodeParams* params);
  CUresult (*cuGraphExecMemsetNodeSetParams)(CUgraphExec executable, CUgraphNode node, const CUmemsetNodeParams* params,
                                             CUcontext context);
  CUresult (*cuGraphExecDestroy)(CUgraphExec executable);
  CUresult (*cuGraphLaunch)(CUgraphExec executable, CUstream stream);

  // `map`: 128 bytes, aligned to 64. Extents, strides (in bytes, from the second dimension on) and boxes are ordered
  // from the innermost dimension outwards.
  CUresult (*cuTensorMapEncodeTiled)(void* map, CUtensorMapDataType type, uint32_t rank, void* data,
                                     const uint64_t* extents, const uint64_t* strides, const uint32_t* box,
                                     const uint32_t* steps, CUtensorMapInterleave interleave,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                     CUtensorMapFloatOOBfill fill);

  int version;  // 1000 * major + 10 * minor, as above
  int devices;
};

// The driver, opened and initialised by the first call. UNSUPPORTED, with the reason, if this machine lacks a usable
// one: no libcuda, one older than CUDA 12.0, no GPU. INTERNAL in the child of a process that had initialised it. The
// next call retries after a failure, except that a library once opened stays open.
tessera_status open_driver(const Driver*& driver);

// OK, or INTERNAL: "`what`: CUDA_ERROR_..., the driver's message".
tessera_status check(const Driver& driver, CUresult result, const char* what);

// For the duration of a call: makes its context current, and restores the previous one at the end.
class ContextScope {
 public:
  ContextScope() = default;
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  // Enters the stream's context. For the default stream: the current context if it belongs to GPU `ordinal`, otherwise
  // that GPU's primary context, which frameworks use. INVALID_ARGUMENT if the stream belongs to another GPU.
  tessera_status enter(int32_t ordinal, void* stream);

  const Driver& driver() const { return *driver_; }
  CUcontext current() const { return current_; }  // valid after enter()

 private:
  const Driver* driver_ = nullptr;
  CUcontext current_ = nullptr;
  bool pushed_ = false;
};

// While one exists, its thread may make allocating calls, which a capture on another of its streams would otherwise
// refuse.
class CaptureRelaxed {
 public:
  explicit CaptureRelaxed(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureRelaxed() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  CaptureRelaxed(const CaptureRelaxed&) = delete;
  CaptureRelaxed& operator=(const CaptureRelaxed&) = delete;

 private:
  const Driver& driver_;
  CUcaptureMode mode_ = kCaptureRelaxed;
};

}  // namespace tessera::cuda
