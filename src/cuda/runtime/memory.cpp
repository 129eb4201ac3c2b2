// Checks that pointers belong to the GPU, and copies index tensors to the host.
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "core/append.hpp"
#include "core/buffers.hpp"
#include "core/fields.hpp"
#include "core/geometry.hpp"
#include "core/status.hpp"
#include "core/validate.hpp"
#include "cuda/cuda.hpp"
#include "cuda/runtime/driver.hpp"

namespace tessera::cuda {
namespace {

// `ordinal`: the call's GPU. Every GPU can access pinned host memory and managed memory.
tessera_status check_kind(const Driver& cu, const char* name, const void* pointer, int32_t ordinal) {
  CUmemorytype type{};
  int managed = 0, owner = -1;
  CUpointerAttribute attributes[] = {kPointerMemoryType, kPointerIsManaged, kPointerDeviceOrdinal};
  void* values[] = {&type, &managed, &owner};
  const CUresult result = cu.cuPointerGetAttributes(3, attributes, values, reinterpret_cast<CUdeviceptr>(pointer));
  if (result != kCudaSuccess) return check(cu, result, name);
  if (type == CUmemorytype{}) {
    return invalid("%s: %p is not memory of CUDA (the host's, or freed), must be GPU %d's", name, pointer, ordinal);
  }
  if (type == kMemoryDevice && !managed && owner != ordinal) {
    return invalid("%s: %p is GPU %d's memory, must be GPU %d's, the call's device", name, pointer, owner, ordinal);
  }
  return ok();
}

// For the GPU's own memory, which is the usual case, one attribute is sufficient; memory unknown to CUDA lacks it.
tessera_status check_pointer(const Driver& cu, const char* name, const void* pointer, int32_t ordinal) {
  int owner = -1;
  const CUresult result =
      cu.cuPointerGetAttribute(&owner, kPointerDeviceOrdinal, reinterpret_cast<CUdeviceptr>(pointer));
  return result == kCudaSuccess && owner == ordinal ? ok() : check_kind(cu, name, pointer, ordinal);
}

// Offsets of the first and last byte of a layout's elements from its pointer; the first is negative for negative
// strides.
struct Extent {
  int64_t first, end;
};
Extent extent_of(const tessera_layout& layout) {
  const auto size = static_cast<int64_t>(tessera_dtype_bytes(layout.dtype));
  Extent extent{0, size};
  for (int axis = 0; axis < layout.rank; ++axis) {
    const int64_t reach = (layout.shape[axis] - 1) * layout.strides[axis] * size;
    (reach < 0 ? extent.first : extent.end) += reach;
  }
  return extent;
}

// The tensors whose values are checked.
constexpr core::TensorName kIndexTensors[] = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k",   "page_table",
                                              "page_indptr",  "page_indices", "causal_seqs", "prefix_groups",
                                              "prefix_lens",  "places"};
static_assert(std::size(kIndexTensors) == std::extent_v<decltype(HostIndices::storage)>);

// Starts a copy of a tensor to the host. Returns where its elements then are, relative to storage.
tessera_status fetch(const Driver& cu, const char* name, const tessera_layout& layout, const void* data,
                     CUstream stream, std::vector<char>& storage, const char*& elements) {
  const Extent extent = extent_of(layout);
  storage.resize(static_cast<size_t>(extent.end - extent.first));
  elements = storage.data() - extent.first;
  const auto from = reinterpret_cast<CUdeviceptr>(data) + static_cast<CUdeviceptr>(extent.first);
  return check(cu, cu.cuMemcpyDtoHAsync(storage.data(), from, storage.size(), stream), name);
}

}  // namespace

tessera_status check_memory(const tessera_plan& plan, const tessera_buffers& buffers,
                            const std::vector<core::score::CapturedBuffer>& captured, const void* workspace) {
  const Driver* driver = nullptr;
  TESSERA_RETURN_IF_ERROR(open_driver(driver));
  const int32_t ordinal = plan.device.ordinal;
  TESSERA_RETURN_IF_ERROR(
      core::for_each_buffer(plan.problem, buffers, [&](const char* name, const tessera_layout&, const void* pointer) {
        return check_pointer(*driver, name, pointer, ordinal);
      }));
  for (const core::score::CapturedBuffer& buffer : captured) {
    if (core::elements(*buffer.layout) == 0) continue;
    TESSERA_RETURN_IF_ERROR(check_pointer(*driver, buffer.name.c_str(), buffer.pointer, ordinal));
  }
  return plan.workspace_bytes > 0 ? check_pointer(*driver, "workspace", workspace, ordinal) : ok();
}

tessera_status check_memory(const tessera_combine_call& call, const tessera_device& device) {
  const Driver* driver = nullptr;
  TESSERA_RETURN_IF_ERROR(open_driver(driver));
  return core::for_each_buffer(call, [&](const char* name, const tessera_layout&, const void* pointer) {
    return check_pointer(*driver, name, pointer, device.ordinal);
  });
}

tessera_status check_memory(const char* name, const void* pointer, const tessera_device& device) {
  const Driver* driver = nullptr;
  TESSERA_RETURN_IF_ERROR(open_driver(driver));
  return check_pointer(*driver, name, pointer, device.ordinal);
}

tessera_status check_memory(const tessera_append_call& call, const tessera_device& device) {
  const Driver* driver = nullptr;
  TESSERA_RETURN_IF_ERROR(open_driver(driver));
  tessera_status status = ok();
  core::for_each_tensor(call, [&](const char* name, const tessera_tensor& tensor, bool) {
    if (status.code != TESSERA_OK || !core::present(tensor) || core::elements(tensor.layout) == 0) return;
    status = check_pointer(*driver, name, tensor.data, device.ordinal);
  });
  return status;
}

tessera_status fetch_indices(const tessera_plan& plan, const tessera_buffers& buffers, void* stream,
                             HostIndices& host) {
  ContextScope context;
  TESSERA_RETURN_IF_ERROR(context.enter(plan.device.ordinal, stream));
  const Driver& cu = context.driver();
  const auto queue = static_cast<CUstream>(stream);
  CUcaptureStatus capture = kCaptureNone;
  TESSERA_RETURN_IF_ERROR(check(cu, cu.cuStreamIsCapturing(queue, &capture), "executor.stream"));
  if (capture != kCaptureNone) {
    return invalid("device.check_indices: 1, must be 0 while the stream is captured: the check waits for it");
  }
  for (size_t i = 0; i < std::size(kIndexTensors); ++i) {
    const core::TensorField& field = core::kTensorFields[kIndexTensors[i].index];
    const tessera_layout& layout = plan.problem.*field.layout;
    if (!core::present(layout) || core::elements(layout) == 0) continue;
    const char* elements = nullptr;
    TESSERA_RETURN_IF_ERROR(fetch(cu, field.name, layout, field.pointer(buffers), queue, host.storage[i], elements));
    field.set_pointer(host.buffers, elements);
  }
  for (int n = 0; n < plan.program.num_tensors; ++n) {
    const int slot = plan.program.tensors[n];
    const tessera_layout& layout = plan.problem.captured[slot];
    if (core::elements(layout) == 0) continue;
    const char* elements = nullptr;
    TESSERA_RETURN_IF_ERROR(
        fetch(cu, "captured", layout, buffers.captured[slot], queue, host.captured[slot], elements));
    host.buffers.captured[slot] = elements;
  }
  std::copy(std::begin(buffers.scalars), std::end(buffers.scalars), std::begin(host.buffers.scalars));
  return check(cu, cu.cuStreamSynchronize(queue), "cuStreamSynchronize");
}

}  // namespace tessera::cuda
