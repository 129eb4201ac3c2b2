#include "attention_call.hpp"

#include <chrono>

#include "interrupts.hpp"

namespace tessera::cli {

void AttentionTensors::describe(tessera_problem& problem) const {
  for (const core::TensorField& field : core::kTensorFields) {
    const Tensor& tensor = (*this)[field];
    const bool takes_part = core::takes_part(field, problem.direction == TESSERA_BACKWARD);
    if (takes_part && tensor.present()) problem.*field.layout = tensor.layout();
  }
  if (program) program->describe(problem);
}

tessera_buffers AttentionTensors::buffers() const {
  tessera_buffers buffers{};
  for (const core::TensorField& field : core::kTensorFields) field.set_pointer(buffers, (*this)[field].memory.data());
  if (program) program->add_to(buffers);
  return buffers;
}

std::vector<ArgumentName> AttentionTensors::names() const {
  std::vector<ArgumentName> names;
  for (const core::TensorField& field : core::kTensorFields) {
    const Tensor& tensor = (*this)[field];
    if (tensor.present()) names.push_back({field.name, tensor.describe()});
  }
  for (std::size_t n = 0; program && n < program->tensors.size(); ++n) {
    names.push_back({program->names[n], program->tensors[n].describe()});
  }
  return names;
}

CallResult run_attention(const AttentionTensors& tensors, const AttentionOptions& options, const tessera_device& device,
                         tessera_direction direction) {
  tessera_problem problem;
  tessera_problem_init(&problem);
  problem.direction = direction;
  options.apply(problem);
  tensors.describe(problem);
  const std::vector<ArgumentName> names = tensors.names();
  CallResult result;
  check_status(tessera_make_plan(&problem, &device, &result.plan), names);
  const Memory workspace(static_cast<std::int64_t>(tessera_workspace_bytes(&result.plan)), "workspace");
  const tessera_buffers buffers = tensors.buffers();
  const tessera_executor executor = interruptible_executor();
  const auto start = std::chrono::steady_clock::now();
  const tessera_status status = (direction == TESSERA_BACKWARD ? tessera_backward : tessera_forward)(
      &result.plan, &buffers, workspace.data(), static_cast<std::size_t>(workspace.size_bytes()), &executor);
  throw_if_interrupted();
  check_status(status, names);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace tessera::cli
