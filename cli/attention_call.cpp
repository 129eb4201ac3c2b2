#include "attention_call.hpp"

#include <algorithm>
#include <chrono>

#include "interrupts.hpp"

namespace tessera::cli {
namespace {

struct Slot {
  const char* token;  // the library's name
  Tensor AttentionTensors::*tensor;
  tessera_layout tessera_problem::*layout;
};

using T = AttentionTensors;
using P = tessera_problem;
constexpr Slot kSlots[] = {
    {"q", &T::q, &P::q},
    {"k", &T::k, &P::k},
    {"v", &T::v, &P::v},
    {"o", &T::o, &P::o},
    {"lse", &T::lse, &P::lse},
    {"cu_seqlens_q", &T::cu_seqlens_q, &P::cu_seqlens_q},
    {"cu_seqlens_k", &T::cu_seqlens_k, &P::cu_seqlens_k},
    {"seqused_k", &T::seqused_k, &P::seqused_k},
    {"page_table", &T::page_table, &P::page_table},
    {"bias", &T::bias, &P::bias},
    {"mask", &T::mask, &P::mask},
    {"block_mask", &T::block_mask, &P::block_mask},
    {"alibi_slopes", &T::alibi_slopes, &P::alibi_slopes},
    {"sink", &T::sink, &P::sink},
    {"d_o", &T::d_o, &P::d_o},
    {"d_q", &T::d_q, &P::d_q},
    {"d_k", &T::d_k, &P::d_k},
    {"d_v", &T::d_v, &P::d_v},
    {"d_lse", &T::d_lse, &P::d_lse},
    {"d_bias", &T::d_bias, &P::d_bias},
    {"d_sink", &T::d_sink, &P::d_sink},
};

}  // namespace

void AttentionTensors::describe(tessera_problem& problem) const {
  for (const Slot& slot : kSlots) {
    if ((this->*slot.tensor).present()) problem.*slot.layout = (this->*slot.tensor).layout();
  }
}

tessera_buffers AttentionTensors::buffers() const {
  tessera_buffers buffers{};
  buffers.q = q.memory.data();
  buffers.k = k.memory.data();
  buffers.v = v.memory.data();
  buffers.o = o.memory.data();
  buffers.lse = lse.as<float>();
  buffers.cu_seqlens_q = cu_seqlens_q.as<std::int32_t>();
  buffers.cu_seqlens_k = cu_seqlens_k.as<std::int32_t>();
  buffers.seqused_k = seqused_k.as<std::int32_t>();
  buffers.page_table = page_table.as<std::int32_t>();
  buffers.bias = bias.memory.data();
  buffers.mask = mask.as<std::uint8_t>();
  buffers.block_mask = block_mask.as<std::uint8_t>();
  buffers.alibi_slopes = alibi_slopes.as<float>();
  buffers.sink = sink.as<float>();
  buffers.d_o = d_o.memory.data();
  buffers.d_q = d_q.memory.data();
  buffers.d_k = d_k.memory.data();
  buffers.d_v = d_v.memory.data();
  buffers.d_lse = d_lse.as<float>();
  buffers.d_bias = d_bias.as<float>();
  buffers.d_sink = d_sink.as<float>();
  return buffers;
}

std::vector<ArgumentName> AttentionTensors::names() const {
  std::vector<ArgumentName> names;
  for (const Slot& slot : kSlots) {
    const Tensor& tensor = this->*slot.tensor;
    if (tensor.present()) names.push_back({slot.token, tensor.describe()});
  }
  return names;
}

CallResult run_attention(const AttentionTensors& tensors, const AttentionOptions& options, const tessera_device& device,
                         tessera_direction direction) {
  const bool backward = direction == TESSERA_BACKWARD;
  tessera_problem problem;
  tessera_problem_init(&problem);
  problem.direction = direction;
  options.apply(problem);
  tensors.describe(problem);
  if (!backward) {
    problem.d_o = problem.d_q = problem.d_k = problem.d_v = problem.d_lse = problem.d_bias = problem.d_sink = {};
  }
  const std::vector<ArgumentName> names = tensors.names();
  CallResult result;
  check_status(tessera_make_plan(&problem, &device, &result.plan), names);
  const Memory workspace(static_cast<std::int64_t>(tessera_workspace_bytes(&result.plan)), "workspace");
  const tessera_buffers buffers = tensors.buffers();
  const tessera_executor executor = interruptible_executor();
  const auto start = std::chrono::steady_clock::now();
  const tessera_status status = (backward ? tessera_backward : tessera_forward)(
      &result.plan, &buffers, workspace.data(), static_cast<std::size_t>(workspace.size_bytes()), &executor);
  throw_if_interrupted();
  check_status(status, names);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace tessera::cli
