// The device code below kernels/, embedded as text, so that it can be compiled without installed sources.
#pragma once

#include <string_view>

#include "cuda/runtime/hash.hpp"

namespace tessera::cuda {

struct KernelHeader {
  const char* name;  // as it is included: "tessera/config.hpp"
  const char* text;
};
extern const KernelHeader kKernelHeaders[];
extern const int kNumKernelHeaders;

// Of the embedded headers that `source` includes, directly or by another: so a kernel's key does not depend on other
// kernels' headers.
Digest headers_digest(std::string_view source);

}  // namespace tessera::cuda
