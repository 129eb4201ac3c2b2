// The CUDA back end: detect, refuse or configure, run. Building it needs no toolkit, and loading it needs no driver:
// both libraries are opened when the first call needs them.
#pragma once

#include <string>
#include <vector>

#include "core/buffers.hpp"
#include "core/score/bound.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// Describes GPU number `ordinal`.
tessera_status detect(int32_t ordinal, tessera_device& device);

// Describes a typical GPU of an architecture, which need not be in this machine. Its ordinal is -1.
tessera_status describe(int32_t arch, tessera_device& device);

// Checks that the workspace and every tensor that the problem describes, or its program names, are in memory that the
// plan's GPU can access.
tessera_status check_memory(const tessera_plan& plan, const tessera_buffers& buffers,
                            const std::vector<core::score::CapturedBuffer>& captured, const void* workspace);
tessera_status check_memory(const tessera_combine_call& call, const tessera_device& device);

// The same for one pointer.
tessera_status check_memory(const char* name, const void* pointer, const tessera_device& device);

// Copies on the host of the index tensors and of the tensors that a score program reads, for checks of their values.
// Making them waits for the stream.
struct HostIndices {
  tessera_buffers buffers{};  // pointers of these tensors only, with the plan's layouts; and the program's scalars
  std::vector<char> storage[10], captured[TESSERA_MAX_CAPTURED_TENSORS];
};
tessera_status fetch_indices(const tessera_plan& plan, const tessera_buffers& buffers, void* stream, HostIndices& host);

// Compiles or loads a plan's kernels before its first call. For a GPU that is not in this machine: compiles them into
// the cache on disk.
tessera_status prepare(const tessera_plan& plan);

// Launches a checked plan's kernels in the stream. `bound`: the plan's score program with the buffers, NULL if it has
// none. `workspace` is aligned to 64 bytes.
tessera_status run(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                   void* workspace, void* stream);

// Adds the launches of a checked plan to the list. Without buffers, the list only names the kernels.
class LaunchList;
tessera_status lower(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, LaunchList& launches);

// The same as text and numbers. aligned: every row of the data starts at a multiple of 16 bytes.
std::vector<tessera_launch> planned_launches(const tessera_plan& plan, bool aligned);

// The bytes of the workspace that have a score program's block lists, which the GPU makes for every call; 0: none.
int64_t program_lists_bytes(const tessera_plan& plan);

// Launches the merge of checked partial results (tessera_combine) in the stream.
tessera_status combine(const tessera_combine_call& call, const tessera_device& device, void* stream);

// Launches a checked tessera_append in the stream; check_memory has accepted all its tensors.
tessera_status check_memory(const tessera_append_call& call, const tessera_device& device);
tessera_status append(const tessera_append_call& call, const tessera_device& device, void* stream);

}  // namespace tessera::cuda
