// The names that tessera_kernel's numbers are aliases of. All families' names: tessera_family_at.
#pragma once

#include <iterator>

#include "tessera/tessera.h"

namespace tessera::core {

struct KernelName {
  tessera_kernel kernel;
  const char* name;
};

inline constexpr KernelName kKernelNames[] = {
    {TESSERA_KERNEL_AUTO, "auto"},
    {TESSERA_KERNEL_REFERENCE, "reference"},
    {TESSERA_KERNEL_DECODE, "decode"},
    {TESSERA_KERNEL_TILED, "tiled"},
    {TESSERA_KERNEL_FWD_SM80, "fwd_sm80"},
    {TESSERA_KERNEL_BWD_SM80, "bwd_sm80"},
    {TESSERA_KERNEL_FWD_SM90, "fwd_sm90"},
    {TESSERA_KERNEL_BWD_SM90, "bwd_sm90"},
    {TESSERA_KERNEL_FWD_FA1, "fwd_fa1"},
    {TESSERA_KERNEL_BWD_FA1, "bwd_fa1"},
    {TESSERA_KERNEL_FWD_STANDARD, "fwd_standard"},
    {TESSERA_KERNEL_BWD_STANDARD, "bwd_standard"},
    {TESSERA_KERNEL_DECODE_SM90, "decode_sm90"},
    {TESSERA_KERNEL_MIXED_SM90, "mixed_sm90"},
    {TESSERA_KERNEL_SHARED_PREFIX, "shared_prefix"},
};
inline constexpr int32_t kNumKernels = std::size(kKernelNames);

static_assert(
    [] {
      for (int32_t kernel = 0; kernel < kNumKernels; ++kernel) {
        if (kKernelNames[kernel].kernel != kernel) return false;
      }
      return true;
    }(),
    "a row stands at its kernel's number");

// The name of a value of the C interface in an error message, or its number if it has no name: "unknown (99)".
struct NameText {
  char text[24];
};
NameText dtype_text(int32_t dtype);
NameText isa_text(int32_t isa);

}  // namespace tessera::core
