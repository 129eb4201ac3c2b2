// A call's tensors and workspace in a GPU's memory: copied there with the memory around their elements, and back.
//
// Normally everything is in one block, guard bands included, and each byte outside the outputs is compared afterwards.
// With TESSERA_TEST_EXACT_MEMORY=1 each tensor has an allocation of its exact size, and the workspace is not
// initialised: compute-sanitizer then notices a byte too far, or one that was never written.
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
  // Tensors of a call other than attention, without workspace.
  GpuCall(const std::vector<NamedTensor>& outputs, const std::vector<NamedTensor>& inputs);

  const tessera_buffers& buffers() const { return buffers_; }
  void* workspace() const { return workspace_; }
  std::byte* address(const Tensor& tensor) const;  // of its elements

  void upload(void* stream);  // everything, again
  // Copies outputs to the call's tensors. Returns forbidden writes, "" if none.
  std::string download(void* stream);

 private:
  // A tensor's storage, in this machine's memory and in the GPU's.
  struct Region {
    std::string name;
    std::byte* host;
    size_t bytes;
    std::byte* device;
    bool written;
  };
  void add_outputs(const std::vector<NamedTensor>& outputs);
  void add(const std::string& name, const Tensor& tensor, bool written);
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
