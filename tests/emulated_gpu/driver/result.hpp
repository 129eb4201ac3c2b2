// Return values of the emulated driver's functions, with the names and numbers of cuda.h, and the macro that exports
// functions.
#pragma once

#include "cuda/runtime/driver.hpp"

#define EMULATED_DRIVER extern "C" __attribute__((visibility("default"))) tessera::cuda::CUresult

namespace tessera::emulated {

using cuda::CUresult;

inline constexpr CUresult kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100,
                          kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400,
                          kNotFound = 500, kLaunchFailed = 719, kNotSupported = 801, kCaptureUnsupported = 900,
                          kCaptureInvalidated = 901;

}  // namespace tessera::emulated
