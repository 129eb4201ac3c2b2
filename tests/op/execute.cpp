#include "execute.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

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

// The problem of one direction: the forward pass has no gradients.
tessera_problem problem_of(const Call& call, tessera_direction direction) {
  tessera_problem problem = call.problem;
  problem.direction = direction;
  if (direction == TESSERA_BACKWARD) return problem;
  for (tessera_layout* layout :
       {&problem.d_o, &problem.d_q, &problem.d_k, &problem.d_v, &problem.d_lse, &problem.d_bias, &problem.d_sink})
    *layout = {};
  return problem;
}

}  // namespace

std::vector<NamedTensor> outputs(const Call& call, tessera_direction direction) {
  std::vector<NamedTensor> all = {{"o", &call.o}, {"lse", &call.lse}};
  if (direction == TESSERA_BACKWARD) {
    all = {
        {"d_q", &call.d_q}, {"d_k", &call.d_k}, {"d_v", &call.d_v}, {"d_bias", &call.d_bias}, {"d_sink", &call.d_sink}};
  }
  std::erase_if(all, [](const NamedTensor& named) { return !named.tensor->present(); });
  return all;
}

tessera_device cpu_device() {
  tessera_device device;
  const tessera_status status = tessera_device_cpu(&device);
  if (status.code != TESSERA_OK) {
    std::fprintf(stderr, "%s\n", status.message);
    std::exit(1);
  }
  return device;
}

std::vector<int32_t> isas() {
  const tessera_device device = cpu_device();
  if (std::getenv("TESSERA_ISA")) return {device.isa};
  std::vector<int32_t> all;
  for (int32_t isa = TESSERA_ISA_BASELINE; isa <= device.isa_limit; ++isa) all.push_back(isa);
  return all;
}

RunResult run(Call& call, tessera_direction direction, const RunOptions& options) {
  RunResult result;
  tessera_device device = cpu_device();
  device.kernel = options.kernel;
  device.isa = options.isa;
  device.threads = options.threads;
  device.cores = options.cores;
  const tessera_problem problem = problem_of(call, direction);
  tessera_plan plan;
  result.status = tessera_make_plan(&problem, &device, &plan);
  if (result.status.code != TESSERA_OK) return result;
  result.kernel = plan.kernel;

  for (const NamedTensor& output : outputs(call, direction)) const_cast<Tensor*>(output.tensor)->poison();
  Workspace workspace(tessera_workspace_bytes(&plan), options.workspace_fill);
  const tessera_buffers buffers = call.buffers();
  const auto execute = direction == TESSERA_FORWARD ? tessera_forward : tessera_backward;
  result.status = execute(&plan, &buffers, workspace.data(), tessera_workspace_bytes(&plan), options.executor);

  if (!workspace.unharmed()) result.harm = "wrote outside the workspace";
  for (const NamedTensor& output : outputs(call, direction))
    if (!output.tensor->unharmed_outside()) result.harm = std::string("wrote outside ") + output.name;
  return result;
}

std::vector<std::vector<std::byte>> output_bytes(const Call& call, tessera_direction direction) {
  std::vector<std::vector<std::byte>> all;
  for (const NamedTensor& output : outputs(call, direction)) all.push_back(output.tensor->bytes());
  return all;
}

}  // namespace tessera::testing
