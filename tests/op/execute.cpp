#include "execute.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "gpu_call.hpp"

namespace tessera::testing {
namespace {

constexpr size_t kWorkspaceAlignment = 64;

// Memory of exactly the size asked for, aligned to 64 and no more, between two guard bands.
class Workspace {
 public:
  Workspace(size_t bytes, unsigned char fill) : bytes_(bytes) {
    const size_t total = kGuardBytes + bytes + kGuardBytes + 2 * kWorkspaceAlignment;
    storage_ = std::make_unique<unsigned char[]>(total);
    const size_t address = reinterpret_cast<size_t>(storage_.get()) + kGuardBytes;
    size_t lead = (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
    if ((address + lead) % (2 * kWorkspaceAlignment) == 0) lead += kWorkspaceAlignment;
    memory_ = storage_.get() + kGuardBytes + lead;
    std::memset(storage_.get(), kGuard, total);
    std::memset(memory_, fill, bytes);
    total_ = total;
  }
  void* data() { return memory_; }
  bool unharmed() const {
    const auto guards = [](const unsigned char* from, const unsigned char* to) {
      return std::all_of(from, to, [](unsigned char byte) { return byte == kGuard; });
    };
    return guards(storage_.get(), memory_) && guards(memory_ + bytes_, storage_.get() + total_);
  }

 private:
  static constexpr unsigned char kGuard = 0xA5;
  std::unique_ptr<unsigned char[]> storage_;
  unsigned char* memory_;
  size_t bytes_, total_;
};

}  // namespace

std::vector<NamedTensor> outputs(const Call& call, tessera_direction direction) {
  std::vector<NamedTensor> all = {{"o", &call.o}, {"lse", &call.lse}, {"lse_low", &call.lse_low}};
  if (direction == TESSERA_BACKWARD) {
    all = {
        {"d_q", &call.d_q}, {"d_k", &call.d_k}, {"d_v", &call.d_v}, {"d_bias", &call.d_bias}, {"d_sink", &call.d_sink}};
    for (size_t n = 0; n < call.d_captured.size(); ++n) all.push_back({call.captured_names[n], &call.d_captured[n]});
  }
  std::erase_if(all, [](const NamedTensor& named) { return !named.tensor->present(); });
  return all;
}

tessera_problem problem_of(const Call& call, tessera_direction direction) {
  tessera_problem problem = call.problem;
  problem.direction = direction;
  if (direction == TESSERA_BACKWARD) return problem;
  for (tessera_layout* layout :
       {&problem.d_o, &problem.d_q, &problem.d_k, &problem.d_v, &problem.d_lse, &problem.d_bias, &problem.d_sink})
    *layout = {};
  std::ranges::fill(problem.d_captured, tessera_layout{});
  return problem;
}

tessera_status make_plan(const Call& call, tessera_direction direction, const RunOptions& options, tessera_plan& plan) {
  const bool on_gpu = options.place.backend == TESSERA_BACKEND_CUDA;
  tessera_device device = on_gpu ? gpu_device() : cpu_device();
  device.kernel = options.kernel;
  if (!on_gpu || options.cores != Case{}.cores) device.cores = options.cores;
  if (!on_gpu) {
    device.isa = options.place.isa;
    device.vector_isa = options.place.vector_isa;
    // AMX's tiles evaluate no score programs; vectors beside them do.
    if (call.program && device.isa == TESSERA_ISA_AMX_BF16) device.vector_isa = TESSERA_ISA_AVX512_BF16;
    device.threads = options.threads;
  }
  const tessera_problem problem = problem_of(call, direction);
  return tessera_make_plan(&problem, &device, &plan);
}

std::vector<tessera_kernel> gpu_kernels(tessera_direction direction) {
  if (direction == TESSERA_FORWARD) {
    return {TESSERA_KERNEL_DECODE_SM90, TESSERA_KERNEL_MIXED_SM90, TESSERA_KERNEL_FWD_SM90, TESSERA_KERNEL_FWD_SM80};
  }
  return {TESSERA_KERNEL_BWD_SM90, TESSERA_KERNEL_BWD_SM80};
}

namespace {

RunResult run_on_gpu(Call& call, tessera_direction direction, const tessera_plan& plan, const RunOptions& options) {
  RunResult result{.kernel = plan.kernel};
  try {
    Gpu& gpu = Gpu::get();
    GpuCall on_gpu(call, direction, tessera_workspace_bytes(&plan), options.workspace_fill);
    on_gpu.upload(gpu.stream());
    result.status = execute(plan, on_gpu, gpu.stream());
    gpu.synchronize(gpu.stream());
    result.harm = on_gpu.download(gpu.stream());
  } catch (const std::exception& error) {
    result.harm = error.what();
  }
  return result;
}

RunResult run_on_cpu(Call& call, tessera_direction direction, const tessera_plan& plan, const RunOptions& options) {
  RunResult result{.kernel = plan.kernel};
  for (const NamedTensor& output : outputs(call, direction)) const_cast<Tensor*>(output.tensor)->poison();
  Workspace workspace(tessera_workspace_bytes(&plan), options.workspace_fill);
  const tessera_buffers buffers = call.buffers();
  const auto execute = direction == TESSERA_FORWARD ? tessera_forward : tessera_backward;
  result.status = execute(&plan, &buffers, workspace.data(), tessera_workspace_bytes(&plan), options.executor);
  if (!workspace.unharmed()) result.harm = "wrote outside the workspace";
  return result;
}

}  // namespace

RunResult run(Call& call, tessera_direction direction, const RunOptions& options) {
  tessera_plan plan;
  if (const tessera_status status = make_plan(call, direction, options, plan); status.code != TESSERA_OK)
    return {.status = status};
  const bool on_gpu = options.place.backend == TESSERA_BACKEND_CUDA;
  RunResult result = (on_gpu ? run_on_gpu : run_on_cpu)(call, direction, plan, options);
  for (const NamedTensor& output : outputs(call, direction))
    if (!output.tensor->unharmed_outside()) result.harm = "wrote outside " + output.name;
  return result;
}

std::vector<std::vector<std::byte>> output_bytes(const Call& call, tessera_direction direction) {
  std::vector<std::vector<std::byte>> all;
  for (const NamedTensor& output : outputs(call, direction)) all.push_back(output.tensor->bytes());
  return all;
}

}  // namespace tessera::testing
