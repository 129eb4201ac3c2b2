// The library's own call, for the harness: plain dense attention by the kernel that is named, through the C interface.
//   c++ -std=c++20 -O2 -shared -fPIC -Iinclude lab/d512/library.cpp -o library.so -L... -ltessera
#include <cmath>
#include <cstdio>
#include <cstring>

#include "tessera/tessera.h"

namespace {

struct Call {
  tessera_plan plan;
};

tessera_layout layout(int32_t dtype, int64_t batch, int64_t rows, int64_t heads, int64_t columns) {
  tessera_layout result{};
  result.dtype = dtype, result.rank = 4;
  const int64_t shape[] = {batch, rows, heads, columns};
  const int64_t strides[] = {rows * heads * columns, heads * columns, columns, 1};
  std::memcpy(result.shape, shape, sizeof shape), std::memcpy(result.strides, strides, sizeof strides);
  return result;
}

}  // namespace

// A plan, or NULL, with what was wrong on standard error.
extern "C" void* library_plan(int backward, int float16, int batch, int sq, int sk, int heads_q, int heads_kv,
                              int head_dim, int causal, int kernel, int64_t* workspace_bytes) {
  tessera_problem p;
  tessera_problem_init(&p);
  const int32_t dtype = float16 ? TESSERA_FLOAT16 : TESSERA_BFLOAT16;
  p.direction = backward ? TESSERA_BACKWARD : TESSERA_FORWARD;
  p.causal = causal;
  p.q = layout(dtype, batch, sq, heads_q, head_dim);
  p.o = p.q;
  p.k = layout(dtype, batch, sk, heads_kv, head_dim);
  p.v = p.k;
  p.lse.dtype = TESSERA_FLOAT32, p.lse.rank = 3;
  const int64_t shape[] = {batch, heads_q, sq}, strides[] = {int64_t{heads_q} * sq, sq, 1};
  std::memcpy(p.lse.shape, shape, sizeof shape), std::memcpy(p.lse.strides, strides, sizeof strides);
  if (backward) p.d_o = p.q, p.d_q = p.q, p.d_k = p.k, p.d_v = p.v;
  tessera_device device;
  tessera_status status = tessera_device_cuda(0, &device);
  if (status.code == TESSERA_OK) {
    device.kernel = kernel;
    auto* call = new Call;
    status = tessera_make_plan(&p, &device, &call->plan);
    *workspace_bytes = call->plan.workspace_bytes;
    if (status.code == TESSERA_OK) return call;
    delete call;
  }
  std::fprintf(stderr, "%s\n", status.message);
  return nullptr;
}

extern "C" int library_run(void* handle, const void* q, const void* k, const void* v, void* o, float* lse,
                           const void* d_o, void* d_q, void* d_k, void* d_v, void* workspace, void* stream) {
  const auto* call = static_cast<const Call*>(handle);
  tessera_buffers b{};
  b.struct_size = sizeof b;
  b.q = q, b.k = k, b.v = v, b.o = o, b.lse = lse, b.d_o = d_o, b.d_q = d_q, b.d_k = d_k, b.d_v = d_v;
  tessera_executor executor{};
  executor.struct_size = sizeof executor, executor.stream = stream;
  const tessera_status status =
      call->plan.problem.direction == TESSERA_BACKWARD
          ? tessera_backward(&call->plan, &b, workspace, call->plan.workspace_bytes, &executor)
          : tessera_forward(&call->plan, &b, workspace, call->plan.workspace_bytes, &executor);
  if (status.code != TESSERA_OK) std::fprintf(stderr, "%s\n", status.message);
  return status.code;
}
