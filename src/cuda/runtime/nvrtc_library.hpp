// NVRTC's functions, in a library that is found and opened at run time. nvrtc.hpp is the interface for other code.
#pragma once

#include <cstddef>

#include "cuda/runtime/nvrtc.hpp"

namespace tessera::cuda {

inline constexpr const char* kHowToGetNvrtc = "pip install nvidia-cuda-nvrtc, or set TESSERA_NVRTC to libnvrtc.so";

using nvrtcProgram = struct _nvrtcProgram*;
using nvrtcResult = int;

struct NvrtcFunctions {
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(nvrtcResult result);
  nvrtcResult (*nvrtcGetNumSupportedArchs)(int* count);
  nvrtcResult (*nvrtcGetSupportedArchs)(int* archs);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram* program, const char* source, const char* name, int num_headers,
                                    const char* const* headers, const char* const* include_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram* program);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram program, int num_options, const char* const* options);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram program, size_t* size);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram program, char* log);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram program, size_t* size);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram program, char* cubin);
  nvrtcResult (*nvrtcGetPTXSize)(nvrtcProgram program, size_t* size);
  nvrtcResult (*nvrtcGetPTX)(nvrtcProgram program, char* ptx);
};

// The functions of the compiler that open_compiler() opens.
tessera_status opened_nvrtc(NvrtcFunctions& functions, CompilerInfo& info);

}  // namespace tessera::cuda
