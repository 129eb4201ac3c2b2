// The CUDA backend, as the core sees it: detect, refuse or configure, run. No toolkit is needed to build it, and no
// driver to load it: both libraries are opened when the first call needs them.
#pragma once

#include <string>
#include <vector>

#include "core/buffers.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// GPU number `ordinal`.
tessera_status detect(int32_t ordinal, tessera_device& device);

// The usual GPU of an architecture, here or not. Its ordinal is -1.
tessera_status describe(int32_t arch, tessera_device& device);

// Every tensor that the problem describes, and the workspace, lies in memory that the plan's GPU can reach.
tessera_status check_memory(const tessera_plan& plan, const tessera_buffers& buffers, const void* workspace);
tessera_status check_memory(const tessera_combine_call& call, const tessera_device& device);

// The index tensors on the host, for the checks that look into them. Waits for the stream.
struct HostIndices {
  tessera_buffers buffers{};  // the index tensors' pointers alone, as the plan's layouts say
  std::vector<char> storage[9];
};
tessera_status fetch_indices(const tessera_plan& plan, const tessera_buffers& buffers, void* stream, HostIndices& host);

// Compiles or loads the kernels of a plan, so that its first call finds them. A GPU that is not here: compiles them into
// the cache on disk.
tessera_status prepare(const tessera_plan& plan);

// Puts a checked plan's kernels into the stream. `workspace` is aligned to 64 bytes.
tessera_status run(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, void* stream);

// What a checked plan launches, onto the list. Without buffers: by which kernels.
class LaunchList;
tessera_status lower(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, LaunchList& launches);

// The same in words and numbers, for people: where every row of the data starts at a multiple of 16 bytes, or elsewhere.
std::vector<tessera_launch> planned_launches(const tessera_plan& plan, bool aligned);

// Puts the merge of checked partial results into the stream: tessera_combine.
tessera_status combine(const tessera_combine_call& call, const tessera_device& device, void* stream);

// Puts a checked tessera_append into the stream; every tensor of it lies in memory that the GPU can reach.
tessera_status check_memory(const tessera_append_call& call, const tessera_device& device);
tessera_status append(const tessera_append_call& call, const tessera_device& device, void* stream);

}  // namespace tessera::cuda
