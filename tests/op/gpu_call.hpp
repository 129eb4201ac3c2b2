// A call's tensors and workspace in a GPU's memory: copied there with all that surrounds their elements, and back.
//
// Normally everything lies in one block, guard bands included, and each byte that is no output is compared afterwards.
// With TESSERA_TEST_EXACT_MEMORY=1 each tensor has an allocation of its own that ends where it ends, and the workspace
// is left as the driver gives it: what compute-sanitizer needs to see a byte too far, or one that nobody wrote.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "execute.hpp"
#include "gpu_memory.hpp"
#include "inputs.hpp"

namespace tessera::testing {

class GpuCall {
 public:
  // Outputs are poisoned first. The call's tensors must stay alive.
  GpuCall(Call& call, tessera_direction direction, size_t workspace_bytes, unsigned char workspace_fill,
          Gpu& gpu = Gpu::get());
  // Tensors of a call that is none of attention's, without workspace.
  GpuCall(const std::vector<NamedTensor>& outputs, const std::vector<NamedTensor>& inputs);

  const tessera_buffers& buffers() const { return buffers_; }
  void* workspace() const { return workspace_; }
  std::byte* address(const Tensor& tensor) const;  // of its elements

  void upload(void* stream);  // everything, again
  // Outputs, to the call's tensors. Says what was written that should not have been; "" is good.
  std::string download(void* stream);

 private:
  // A tensor's storage, in this machine's memory and in the GPU's.
  struct Region {
    const char* name;
    std::byte* host;
    size_t bytes;
    std::byte* device;
    bool written;
  };
  void add_outputs(const std::vector<NamedTensor>& outputs);
  void add(const char* name, const Tensor& tensor, bool written);
  void place();
  std::byte* take(size_t bytes, size_t residue, size_t alignment);
  void fill_workspace(void* stream);

  Gpu& gpu_;
  const bool exact_;
  const size_t workspace_bytes_;
  const unsigned char workspace_fill_;
  std::vector<Region> regions_;
  std::vector<std::unique_ptr<GpuBlock>> blocks_;
  size_t used_ = 0;
  std::byte* workspace_ = nullptr;
  tessera_buffers buffers_;
};

// Calls the library for a direction, its work put into `stream`.
tessera_status execute(const tessera_plan& plan, const GpuCall& call, void* stream);

}  // namespace tessera::testing
