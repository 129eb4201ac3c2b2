#include "gpu_call.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace tessera::testing {
namespace {

constexpr size_t kAlignment = 256;  // that of the driver's allocations; no load or copy needs more
constexpr size_t kExactAlignment = 16;
constexpr size_t kWorkspaceAlignment = 64;
constexpr size_t kGuard = 256;
constexpr unsigned char kGuardByte = 0xA5;

bool exact_memory() {
  const char* wish = std::getenv("TESSERA_TEST_EXACT_MEMORY");
  return wish && *wish == '1';
}

}  // namespace

GpuCall::GpuCall(Call& call, tessera_direction direction, size_t workspace_bytes, unsigned char workspace_fill,
                 Gpu& gpu)
    : gpu_(gpu), exact_(exact_memory()), workspace_bytes_(workspace_bytes), workspace_fill_(workspace_fill) {
  add_outputs(outputs(call, direction));
  for (const Tensor* input : call.inputs()) add("an input", *input, false);
  if (direction == TESSERA_BACKWARD) {
    add("o", call.o, false);
    add("lse", call.lse, false);
    add("lse_low", call.lse_low, false);
  }
  place();
  buffers_ = call.buffers([this](const Tensor& tensor) -> void* { return address(tensor); });
}

GpuCall::GpuCall(const std::vector<NamedTensor>& outputs, const std::vector<NamedTensor>& inputs)
    : gpu_(Gpu::get()), exact_(exact_memory()), workspace_bytes_(0), workspace_fill_(0) {
  add_outputs(outputs);
  for (const NamedTensor& input : inputs) add(input.name, *input.tensor, false);
  place();
}

void GpuCall::add_outputs(const std::vector<NamedTensor>& outputs) {
  for (const NamedTensor& output : outputs) {
    const_cast<Tensor*>(output.tensor)->poison();
    add(output.name, *output.tensor, true);
  }
}

void GpuCall::add(const std::string& name, const Tensor& tensor, bool written) {
  if (!tensor.present()) return;
  Region region{name, tensor.storage(), static_cast<size_t>(tensor.storage_bytes()), nullptr, written};
  if (exact_) {
    region.host += kGuardBytes;
    region.bytes -= 2 * kGuardBytes;
  }
  for (const Region& other : regions_)
    if (other.host == region.host) return;
  regions_.push_back(region);
}

void GpuCall::place() {
  if (!exact_) {
    size_t bytes = workspace_bytes_ + 2 * kGuard + 2 * kAlignment;
    for (const Region& region : regions_) bytes += region.bytes + kAlignment;
    blocks_.push_back(std::make_unique<GpuBlock>(bytes, true, gpu_));
  }
  for (Region& region : regions_) {
    const size_t alignment = exact_ ? kExactAlignment : kAlignment;
    region.device = take(region.bytes, reinterpret_cast<uintptr_t>(region.host) % alignment, alignment);
  }
  // Aligned to 64 bytes and no more.
  if (exact_) {
    workspace_ = take(workspace_bytes_, kWorkspaceAlignment, kAlignment);
  } else {
    workspace_ = take(workspace_bytes_ + 2 * kGuard, kWorkspaceAlignment, kAlignment) + kGuard;
  }
}

// Memory whose address is `residue` more than a multiple of `alignment`.
std::byte* GpuCall::take(size_t bytes, size_t residue, size_t alignment) {
  if (exact_) {
    blocks_.push_back(std::make_unique<GpuBlock>(bytes + residue, false, gpu_));
    return blocks_.back()->data() + residue;
  }
  std::byte* const base = blocks_.front()->data();
  const size_t now = (reinterpret_cast<uintptr_t>(base) + used_) % alignment;
  used_ += (residue + alignment - now) % alignment;
  std::byte* const address = base + used_;
  used_ += bytes;
  return address;
}

std::byte* GpuCall::address(const Tensor& tensor) const {
  if (!tensor.present()) return nullptr;
  std::byte* const storage = tensor.storage() + (exact_ ? kGuardBytes : 0);
  const auto region =
      std::ranges::find_if(regions_, [&](const Region& candidate) { return candidate.host == storage; });
  // A forward pass has no gradients.
  return region == regions_.end() ? nullptr : region->device + (tensor.data_as<std::byte>() - storage);
}

void GpuCall::fill_workspace(void* stream) {
  if (exact_) return;
  gpu_.fill(workspace_ - kGuard, kGuardByte, kGuard, stream);
  gpu_.fill(workspace_, workspace_fill_, workspace_bytes_, stream);
  gpu_.fill(workspace_ + workspace_bytes_, kGuardByte, kGuard, stream);
}

void GpuCall::upload(void* stream) {
  for (const Region& region : regions_) gpu_.upload(region.device, region.host, region.bytes, stream);
  fill_workspace(stream);
}

std::string GpuCall::download(void* stream) {
  std::string harm;
  std::vector<std::byte> copy;
  for (const Region& region : regions_) {
    copy.resize(region.bytes);
    gpu_.download(copy.data(), region.device, region.bytes, stream);
    if (region.written) {
      std::ranges::copy(copy, region.host);
    } else if (!std::equal(copy.begin(), copy.end(), region.host)) {
      harm = region.name + " was written to";
    }
  }
  if (exact_) return harm;
  copy.resize(kGuard);
  for (const std::byte* guard : {workspace_ - kGuard, workspace_ + workspace_bytes_}) {
    gpu_.download(copy.data(), guard, kGuard, stream);
    if (std::ranges::any_of(copy, [](std::byte byte) { return byte != std::byte{kGuardByte}; }))
      harm = "wrote outside the workspace";
  }
  return harm;
}

tessera_status execute(const tessera_plan& plan, const GpuCall& call, void* stream) {
  const tessera_executor executor{.run = nullptr, .context = nullptr, .stream = stream};
  const auto run = plan.problem.direction == TESSERA_FORWARD ? tessera_forward : tessera_backward;
  return run(&plan, &call.buffers(), call.workspace(), tessera_workspace_bytes(&plan), &executor);
}

}  // namespace tessera::testing
