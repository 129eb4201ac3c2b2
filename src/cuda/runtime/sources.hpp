// The device code below kernels/, embedded as text, so that it can be compiled without installed sources.
#pragma once

namespace tessera::cuda {

struct KernelHeader {
  const char* name;  // as it is included: "tessera/config.hpp"
  const char* text;
};
extern const KernelHeader kKernelHeaders[];
extern const int kNumKernelHeaders;

}  // namespace tessera::cuda
