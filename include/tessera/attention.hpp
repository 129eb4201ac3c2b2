// Execution: reads the caller's pointers and workspace, writes the caller's outputs, and allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/plan.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"
#include "tessera/tessera.h"

namespace tessera {

// One pointer for each tensor that the problem describes, aligned to its element: {.q = q, .k = k, .v = v, .o = o}. The
// others are ignored; each is NULL by default. See tessera_buffers.
using Buffers = tessera_buffers;

// Runs a call on your own threads, or stops it; see tessera_executor. NULL means the library's threads.
using Executor = tessera_executor;

// An Executor over `run`, which is called as run(workers, task) and calls task(w) once for each w in 0 .. workers - 1.
// `run` must outlive it.
template <typename Run>
Executor make_executor(Run& run) {
  Executor executor{};
  executor.context = &run;
  executor.run = [](void* context, std::int32_t workers, void (*task)(void* argument, std::int32_t worker),
                    void* argument) {
    (*static_cast<Run*>(context))(workers, [task, argument](std::int32_t worker) { task(argument, worker); });
  };
  return executor;
}

// `executor`, for a call that ends with Code::cancelled, its outputs undefined, once cancelled() is true. cancelled()
// is called about a thousand times a second by every working thread, so it should be fast (an atomic load). It must
// outlive the executor.
//   std::atomic<bool> stop = false;
//   auto cancelled = [&stop] { return stop.load(); };
//   const tessera::Executor executor = tessera::cancelled_by(cancelled);
template <typename Cancelled>
Executor cancelled_by(Cancelled& cancelled, Executor executor = {}) {
  executor.cancel_context = &cancelled;
  executor.cancel = [](void* context) { return (*static_cast<Cancelled*>(context))() ? 1 : 0; };
  return executor;
}

// Computes o (and lse). `workspace` holds at least plan.workspace_bytes bytes. Returns invalid_argument if a pointer is
// NULL or misaligned, an output shares memory with any other buffer, the workspace is too small, or cu_seqlens,
// seqused_k or a page table hold values that the layouts do not allow; outputs are then unchanged.
inline Status try_forward(const tessera_plan& plan, const Buffers& buffers, std::span<std::byte> workspace,
                          const Executor* executor = nullptr) {
  return tessera_forward(&plan, &buffers, workspace.data(), workspace.size(), executor);
}

// The same, throwing Error.
inline void forward(const tessera_plan& plan, const Buffers& buffers, std::span<std::byte> workspace,
                    const Executor* executor = nullptr) {
  throw_if_error(try_forward(plan, buffers, workspace, executor));
}

// Computes d_q, d_k, d_v (and d_bias, d_sink) from q, k, v, o, lse, d_o (and d_lse). Errors are those of try_forward.
inline Status try_backward(const tessera_plan& plan, const Buffers& buffers, std::span<std::byte> workspace,
                           const Executor* executor = nullptr) {
  return tessera_backward(&plan, &buffers, workspace.data(), workspace.size(), executor);
}

// The same, throwing Error.
inline void backward(const tessera_plan& plan, const Buffers& buffers, std::span<std::byte> workspace,
                     const Executor* executor = nullptr) {
  throw_if_error(try_backward(plan, buffers, workspace, executor));
}

// A tensor argument of a call: call.k = tensor(layout(bfloat16, {T, Hkv, D}), k). Data of an input may be const.
inline tessera_tensor tensor(const Layout& layout, const void* data) { return {layout, const_cast<void*>(data)}; }

// Partial results and the tensors into which they are merged, as plain data. A new one has every tensor absent. See
// tessera_combine_call.
struct CombineCall : tessera_combine_call {
  CombineCall() : tessera_combine_call{} {}
  CombineCall(const tessera_combine_call& call) : tessera_combine_call(call) {}  // NOLINT: the same plain data
};

// Merges N partial results over disjoint sets of keys exactly: with m = max_n LSE_n,
//   LSE = m + log sum_n exp(LSE_n - m),   o = sum_n exp(LSE_n - LSE) o_n.
// `device` NULL: this machine's CPU. On a GPU, the data pointers are device pointers, and the kernel is launched in
// executor->stream.
inline Status try_combine(const CombineCall& call, const tessera_device* device = nullptr,
                          const Executor* executor = nullptr) {
  return tessera_combine(&call, device, executor);
}

// The same, throwing Error.
inline void combine(const CombineCall& call, const tessera_device* device = nullptr,
                    const Executor* executor = nullptr) {
  throw_if_error(try_combine(call, device, executor));
}

// New tokens and the cache that they are appended to, as plain data. A new one has every tensor absent. See
// tessera_append_call.
struct AppendCall : tessera_append_call {
  AppendCall() : tessera_append_call{} {}
  AppendCall(const tessera_append_call& call) : tessera_append_call(call) {}  // NOLINT: the same plain data
};

// Rotates q and the new keys (rotary embedding), and writes the new keys and values at each sequence's end. On the CPU
// nothing is written if anything is out of range; on a GPU only the tokens out of range are not written.
inline Status try_append(const AppendCall& call, const tessera_device* device = nullptr,
                         const Executor* executor = nullptr) {
  return tessera_append(&call, device, executor);
}

// The same, throwing Error.
inline void append(const AppendCall& call, const tessera_device* device = nullptr, const Executor* executor = nullptr) {
  throw_if_error(try_append(call, device, executor));
}

}  // namespace tessera
