// The execution entry points: pointers and index tensors are checked against the plan, then the kernel runs.
#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "api/device_here.hpp"
#include "core/buffers.hpp"
#include "core/caller_struct.hpp"
#include "core/cancel.hpp"
#include "core/geometry.hpp"
#include "core/guarded.hpp"
#include "core/isa.hpp"
#include "core/own_memory.hpp"
#include "core/philox.hpp"
#include "core/score/bound.hpp"
#include "core/score/indices.hpp"
#include "core/seal.hpp"
#include "core/shared_prefix.hpp"
#include "core/status.hpp"
#include "core/validate.hpp"
#include "cpu/cpu.hpp"
#include "cuda/cuda.hpp"

namespace tessera::api {
using namespace core;  // a call is made of what is there: fields, layouts, rules
namespace {

// ---- pointers -------------------------------------------------------------------------------------------------------

constexpr tessera_layout bytes_layout(int64_t bytes) { return {TESSERA_BOOL, 1, {bytes}, {1}}; }

// Of what a program names: memory that is there, as its layouts say.
tessera_status check_captured(const std::vector<score::CapturedBuffer>& captured) {
  for (const score::CapturedBuffer& buffer : captured) {
    TESSERA_RETURN_IF_ERROR(check_pointer(buffer.name.c_str(), *buffer.layout, buffer.pointer));
  }
  return ok();
}

tessera_status check_sharing(const tessera_plan& plan, const tessera_buffers& buffers,
                             const std::vector<score::CapturedBuffer>& captured, const void* workspace) {
  OwnMemory memory;
  const bool backward = plan.problem.direction == TESSERA_BACKWARD;
  for (const TensorField& field : kTensorFields) {
    const tessera_layout& layout = plan.problem.*field.layout;
    if (!takes_part(field, backward) || !present(layout) || elements(layout) == 0) continue;
    memory.add(field.name, layout, field.pointer(buffers), written(field, backward));
  }
  for (const score::CapturedBuffer& buffer : captured) {
    if (elements(*buffer.layout) == 0) continue;
    memory.add(buffer.name.c_str(), *buffer.layout, buffer.pointer, buffer.is_written);
  }
  const tessera_layout workspace_layout = bytes_layout(plan.workspace_bytes);
  if (plan.workspace_bytes > 0) memory.add("workspace", workspace_layout, workspace, true);
  return memory.check();
}

tessera_status check_sharing(const tessera_combine_call& call) {
  OwnMemory memory;
  TESSERA_RETURN_IF_ERROR(
      for_each_buffer(call, [&](const char* name, const tessera_layout& layout, const void* pointer) {
        const auto is_one_of = [&layout](std::initializer_list<const tessera_tensor*> outputs) {
          return std::ranges::any_of(outputs, [&](const tessera_tensor* output) { return &layout == &output->layout; });
        };
        memory.add(name, layout, pointer, is_one_of({&call.o, &call.lse, &call.lse_low}));
        return ok();
      }));
  return memory.check();
}

// ---- what index tensors hold ----------------------------------------------------------------------------------------

// `longest`: what the problem said, which plans and the shapes of bias and masks rely on; 0 = it did not.
tessera_status check_offsets(const char* name, const tessera_layout& layout, const int32_t* offsets, const char* what,
                             int64_t rows, const char* longest_name, int64_t longest) {
  const int64_t stride = layout.strides[0], sequences = layout.shape[0] - 1;
  if (offsets[0] < 0 || offsets[0] > rows) {
    return invalid("%s[0]: %d, accepted 0 .. %" PRId64 ", %s", name, offsets[0], rows, what);
  }
  for (int64_t b = 0; b < sequences; ++b) {
    const int32_t begin = offsets[b * stride], end = offsets[(b + 1) * stride];
    if (end < begin) {
      return invalid("%s[%" PRId64 "]: %d after %d, must not decrease", name, b + 1, end, begin);
    }
    if (end > rows) {
      return invalid("%s[%" PRId64 "]: %d, accepted at most %" PRId64 ", %s", name, b + 1, end, rows, what);
    }
    if (longest > 0 && end - begin > longest) {
      return invalid("%s[%" PRId64 "]: sequence %" PRId64 " has %d rows, accepted at most %s = %" PRId64, name, b + 1,
                     b, end - begin, longest_name, longest);
    }
  }
  return ok();
}

tessera_status check_key_lengths(const tessera_plan& plan, const tessera_buffers& buffers) {
  const tessera_problem& problem = plan.problem;
  for (int64_t b = 0; b < plan.batch; ++b) {
    const SequenceView view = sequence(problem, buffers, b);
    int64_t most = paged(problem) ? plan.max_seqlen_k : view.k_rows;
    if (csr_pages(problem)) {
      const int64_t stride = problem.page_indptr.strides[0];
      const int64_t pages = buffers.page_indptr[(b + 1) * stride] - buffers.page_indptr[b * stride];
      most = std::min(most, pages * problem.k.shape[1]);
    }
    if (view.sk < 0 || view.sk > most) {
      return invalid("seqused_k[%" PRId64 "]: %" PRId64 ", accepted 0 .. %" PRId64 "%s", b, view.sk, most,
                     paged(problem) ? ", what its pages hold and max_seqlen_k allows" : ", the keys of that sequence");
    }
  }
  return ok();
}

tessera_status check_page_table(const tessera_plan& plan, const tessera_buffers& buffers) {
  const tessera_problem& problem = plan.problem;
  const int64_t pages = problem.k.shape[0], page_size = problem.k.shape[1];
  for (int64_t b = 0; b < plan.batch; ++b) {
    const int64_t sk = sequence(problem, buffers, b).sk;
    for (int64_t j = 0; j < sk; j += page_size) {
      const int64_t page = page_of(problem, buffers, b, j);
      if (page >= 0 && page < pages) continue;
      const int64_t number = j / page_size;
      if (csr_pages(problem)) {
        return invalid("page_indices[%" PRId64 "]: %" PRId64 ", accepted 0 .. %" PRId64 ": k has %" PRId64 " pages",
                       buffers.page_indptr[b * problem.page_indptr.strides[0]] + number, page, pages - 1, pages);
      }
      return invalid("page_table[%" PRId64 ", %" PRId64 "]: %" PRId64 ", accepted 0 .. %" PRId64 ": k has %" PRId64
                     " pages",
                     b, number, page, pages - 1, pages);
    }
  }
  return ok();
}

tessera_status check_places(const tessera_plan& plan, const tessera_buffers& buffers) {
  for (int64_t b = 0; b < plan.batch; ++b) {
    const SequenceView view = sequence(plan.problem, buffers, b);
    const Place& place = view.place;
    const struct {
      int axis;
      int64_t first, total, count;
      const char* what;
    } rows[] = {{1, place.first_q, place.total_q, view.sq, "queries"},
                {3, place.first_k, place.total_k, view.sk, "keys"}};
    for (const auto& [axis, first, total, count, what] : rows) {
      if (first < 0) return invalid("places[%" PRId64 ", %d]: %" PRId64 ", accepted at least 0", b, axis - 1, first);
      if (total >= first + count) continue;
      return invalid("places[%" PRId64 ", %d]: %" PRId64 ", accepted at least %" PRId64 ": the sequence has %" PRId64
                     " %s from %" PRId64 " on",
                     b, axis, total, first + count, count, what, first);
    }
    if (plan.problem.dropout_p > 0 && place.first_k % kDropoutKeys != 0) {
      return invalid("places[%" PRId64 ", 2]: %" PRId64 " with dropout_p, accepted multiples of %" PRId64, b,
                     place.first_k, kDropoutKeys);
    }
  }
  return ok();
}

tessera_status check_indices(const tessera_plan& plan, const tessera_buffers& buffers) {
  const tessera_problem& p = plan.problem;
  if (packed_q(p)) {
    TESSERA_RETURN_IF_ERROR(check_offsets("cu_seqlens_q", p.cu_seqlens_q, buffers.cu_seqlens_q, "the rows of q",
                                          p.q.shape[0], "max_seqlen_q", p.max_seqlen_q));
  }
  if (packed_k(p)) {
    TESSERA_RETURN_IF_ERROR(check_offsets("cu_seqlens_k", p.cu_seqlens_k, buffers.cu_seqlens_k, "the rows of k",
                                          p.k.shape[0], "max_seqlen_k", p.max_seqlen_k));
  }
  if (csr_pages(p)) {
    TESSERA_RETURN_IF_ERROR(check_offsets("page_indptr", p.page_indptr, buffers.page_indptr, "the rows of page_indices",
                                          p.page_indices.shape[0], "", 0));
  }
  if (present(p.seqused_k)) TESSERA_RETURN_IF_ERROR(check_key_lengths(plan, buffers));
  if (paged(p)) TESSERA_RETURN_IF_ERROR(check_page_table(plan, buffers));
  if (has_place(p)) TESSERA_RETURN_IF_ERROR(check_places(plan, buffers));
  if (!shares_prefixes(p)) return ok();
  TESSERA_RETURN_IF_ERROR(check_offsets("prefix_groups", p.prefix_groups, buffers.prefix_groups,
                                        "the sequences of the batch", plan.batch, "", 0));
  return check_prefixes(plan, buffers);
}

// ---- execution ------------------------------------------------------------------------------------------------------

constexpr uintptr_t kAlignment = 64;

// `bound`: the plan's score program with the buffers; NULL if it has none.
tessera_status execute_cuda(const tessera_plan& plan, const tessera_buffers& buffers, const score::Bound* bound,
                            const std::vector<score::CapturedBuffer>& captured, void* workspace, void* stream) {
  TESSERA_RETURN_IF_ERROR(check_is_here(plan.device));
  TESSERA_RETURN_IF_ERROR(cuda::check_memory(plan, buffers, captured, workspace));
  if (plan.device.check_indices) {
    cuda::HostIndices host;
    TESSERA_RETURN_IF_ERROR(cuda::fetch_indices(plan, buffers, stream, host));
    TESSERA_RETURN_IF_ERROR(check_indices(plan, host.buffers));
    if (bound) TESSERA_RETURN_IF_ERROR(score::check_indices(plan, host.buffers, score::bind(plan, &host.buffers)));
  }
  return cuda::run(plan, buffers, bound, workspace, stream);
}

tessera_status execute_cpu(const tessera_plan& plan, const tessera_buffers& buffers, const score::Bound* bound,
                           void* workspace, const tessera_executor& executor) {
  if (!core::has_isa(cpu::best_isa(), plan.device.isa)) {
    return invalid("plan: made for a CPU with %s, accepted one for this machine, which has %s",
                   tessera_isa_name(plan.device.isa), tessera_isa_name(cpu::best_isa()));
  }
  TESSERA_RETURN_IF_ERROR(check_indices(plan, buffers));
  if (bound) TESSERA_RETURN_IF_ERROR(score::check_indices(plan, buffers, *bound));
  Cancel cancel(executor);
  TESSERA_RETURN_IF_ERROR(cpu::run(plan, buffers, bound, workspace, executor, cancel));
  return cancel.asked() ? cancelled() : ok();
}

tessera_status execute(int32_t direction, const tessera_plan* plan, const tessera_buffers* given_buffers,
                       void* workspace, size_t workspace_bytes, const tessera_executor* given_executor) {
  TESSERA_RETURN_IF_ERROR(check_plan(plan));
  tessera_buffers buffers;
  TESSERA_RETURN_IF_ERROR(read_buffers(given_buffers, buffers));
  if (const int32_t slopes = plan->program.alibi_slopes) {
    buffers.alibi_slopes = static_cast<const float*>(buffers.captured[slopes - 1]);
  }
  tessera_executor executor;
  TESSERA_RETURN_IF_ERROR(read_executor(given_executor, executor));
  const bool backward = direction == TESSERA_BACKWARD;
  if (plan->problem.direction != direction) {
    return invalid("plan: made for direction %s, accepted a plan for %s", backward ? "forward" : "backward",
                   backward ? "backward" : "forward");
  }
  if (workspace_bytes < static_cast<size_t>(plan->workspace_bytes)) {
    return invalid("workspace_bytes: %zu, accepted at least %" PRId64, workspace_bytes, plan->workspace_bytes);
  }
  if (!workspace && plan->workspace_bytes > 0)
    return invalid("workspace: NULL, must hold %" PRId64 " bytes", plan->workspace_bytes);
  TESSERA_RETURN_IF_ERROR(for_each_buffer(plan->problem, buffers, check_pointer));
  std::optional<score::Bound> bound;
  std::vector<score::CapturedBuffer> captured;
  if (score::has_program(*plan)) {
    bound = score::bind(*plan, &buffers);
    captured = score::captured_buffers(*plan, *bound, buffers);
    TESSERA_RETURN_IF_ERROR(check_captured(captured));
    TESSERA_RETURN_IF_ERROR(score::check_scalars(*plan, *bound));
  }
  TESSERA_RETURN_IF_ERROR(check_sharing(*plan, buffers, captured, workspace));
  const score::Bound* const program = bound ? &*bound : nullptr;
  // The plan's bytes leave room for this.
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(workspace) % kAlignment;
  void* aligned = static_cast<char*>(workspace) + (misaligned ? kAlignment - misaligned : 0);
  if (plan->device.backend == TESSERA_BACKEND_CUDA) {
    return execute_cuda(*plan, buffers, program, captured, aligned, executor.stream);
  }
  return execute_cpu(*plan, buffers, program, aligned, executor);
}

tessera_status combine(const tessera_combine_call* given_call, const tessera_device* given_device,
                       const tessera_executor* given_executor) {
  tessera_combine_call call;
  TESSERA_RETURN_IF_ERROR(read_combine_call(given_call, call));
  tessera_executor executor;
  TESSERA_RETURN_IF_ERROR(read_executor(given_executor, executor));
  TESSERA_RETURN_IF_ERROR(validate(call));
  TESSERA_RETURN_IF_ERROR(for_each_buffer(call, check_pointer));
  TESSERA_RETURN_IF_ERROR(check_sharing(call));
  tessera_device device;
  TESSERA_RETURN_IF_ERROR(device_here(given_device, device));
  if (device.backend == TESSERA_BACKEND_CUDA) {
    TESSERA_RETURN_IF_ERROR(cuda::check_memory(call, device));
    return cuda::combine(call, device, executor.stream);
  }
  Cancel cancel(executor);
  cpu::combine(call, device, cancel);
  return cancel.asked() ? cancelled() : ok();
}

}  // namespace
}  // namespace tessera::api

extern "C" {

tessera_status tessera_prepare(const tessera_plan* plan) {
  TESSERA_RETURN_IF_ERROR(tessera::core::check_plan(plan));
  if (plan->device.backend != TESSERA_BACKEND_CUDA) return tessera::ok();
  return tessera::core::guarded("tessera_prepare", [&] { return tessera::cuda::prepare(*plan); });
}

tessera_status tessera_forward(const tessera_plan* plan, const tessera_buffers* buffers, void* workspace,
                               size_t workspace_bytes, const tessera_executor* executor) {
  return tessera::core::guarded("tessera_forward", [&] {
    return tessera::api::execute(TESSERA_FORWARD, plan, buffers, workspace, workspace_bytes, executor);
  });
}

tessera_status tessera_backward(const tessera_plan* plan, const tessera_buffers* buffers, void* workspace,
                                size_t workspace_bytes, const tessera_executor* executor) {
  return tessera::core::guarded("tessera_backward", [&] {
    return tessera::api::execute(TESSERA_BACKWARD, plan, buffers, workspace, workspace_bytes, executor);
  });
}

tessera_status tessera_combine(const tessera_combine_call* call, const tessera_device* device,
                               const tessera_executor* executor) {
  return tessera::core::guarded("tessera_combine", [&] { return tessera::api::combine(call, device, executor); });
}

}  // extern "C"
