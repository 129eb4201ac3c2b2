/* The same from C on a GPU: forward, causal, float32, on device memory in a stream. Memory and stream are those of
 * CUDA's runtime.
 *
 *   cc attention_cuda.c $(pkg-config --cflags --libs tessera) -lcudart -lm -o attention_cuda && ./attention_cuda
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

enum { B = 1, S = 128, H = 4, D = 32, kSkipped = 77 };

static float q[B * S * H * D], k[B * S * H * D], v[B * S * H * D], o[B * S * H * D];

static void check(tessera_status status) {
  if (status.code == TESSERA_OK) return;
  fprintf(stderr, "%s\n", status.message);
  exit(1);
}

static void check_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  exit(1);
}

/* Device memory with a tensor's values. */
static void* upload(const float* values) {
  void* memory = NULL;
  check_cuda(cudaMalloc(&memory, sizeof q));
  check_cuda(cudaMemcpy(memory, values, sizeof q, cudaMemcpyHostToDevice));
  return memory;
}

int main(void) {
  tessera_layout layout = {TESSERA_FLOAT32, 4, {B, S, H, D}, {S * H * D, H * D, D, 1}};
  tessera_buffers buffers = {.struct_size = sizeof buffers};
  tessera_executor executor = {.struct_size = sizeof executor};
  tessera_problem problem;
  tessera_device device;
  tessera_plan plan;
  tessera_status found;
  cudaStream_t stream;
  void* workspace;
  size_t bytes;
  int i;

  found = tessera_device_cuda(0, &device);
  if (found.code != TESSERA_OK) {
    printf("skipped: %s\n", found.message);
    return kSkipped;
  }
  for (i = 0; i < B * S * H * D; ++i) {
    q[i] = sinf((float)i);
    k[i] = cosf((float)(3 * i));
    v[i] = (float)(i % 7);
  }

  tessera_problem_init(&problem);
  problem.q = problem.k = problem.v = problem.o = layout;
  problem.causal = 1;
  check(tessera_make_plan(&problem, &device, &plan));

  buffers.q = upload(q);
  buffers.k = upload(k);
  buffers.v = upload(v);
  buffers.o = upload(o);
  bytes = tessera_workspace_bytes(&plan);
  check_cuda(cudaMalloc(&workspace, bytes > 0 ? bytes : 1));
  check_cuda(cudaStreamCreate(&stream));
  executor.stream = stream;
  check(tessera_forward(&plan, &buffers, workspace, bytes, &executor)); /* put into the stream, not waited for */
  check_cuda(cudaMemcpyAsync(o, buffers.o, sizeof o, cudaMemcpyDeviceToHost, stream));
  check_cuda(cudaStreamSynchronize(stream));

  /* The first query sees the first key alone. */
  for (i = 0; i < H * D; ++i) {
    if (fabsf(o[i] - v[i]) > 1e-6f) return 1;
  }
  printf("kernel %s, o[0, 0, 0, 1] = %g\n", plan.family, (double)o[1]);
  return 0;
}
