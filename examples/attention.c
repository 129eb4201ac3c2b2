/* The same from C: forward, causal, float32, on this machine's CPU.
 *
 *   cc attention.c $(pkg-config --cflags --libs tessera) -lm -o attention && ./attention
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

enum { B = 1, S = 128, H = 4, D = 32 };

static float q[B * S * H * D], k[B * S * H * D], v[B * S * H * D], o[B * S * H * D];

static void check(tessera_status status) {
  if (status.code == TESSERA_OK) return;
  fprintf(stderr, "%s\n", status.message); /* one line: what was wrong, what was given, what is accepted */
  exit(1);
}

/* [B, S, H, D], contiguous. */
static tessera_layout contiguous(void) {
  tessera_layout layout = {TESSERA_FLOAT32, 4, {B, S, H, D}, {S * H * D, H * D, D, 1}};
  return layout;
}

int main(void) {
  tessera_problem problem;
  tessera_device device;
  tessera_plan plan;
  tessera_buffers buffers = {.struct_size = sizeof buffers};
  void* workspace;
  size_t bytes;
  int i;

  for (i = 0; i < B * S * H * D; ++i) {
    q[i] = sinf((float)i);
    k[i] = cosf((float)(3 * i));
    v[i] = (float)(i % 7);
  }

  tessera_problem_init(&problem);
  problem.q = problem.k = problem.v = problem.o = contiguous();
  problem.causal = 1;
  check(tessera_device_cpu(&device));
  check(tessera_make_plan(&problem, &device, &plan));

  bytes = tessera_workspace_bytes(&plan);
  workspace = malloc(bytes);
  buffers.q = q;
  buffers.k = k;
  buffers.v = v;
  buffers.o = o;
  check(tessera_forward(&plan, &buffers, workspace, bytes, NULL));
  free(workspace);

  /* The first query sees the first key alone. */
  for (i = 0; i < H * D; ++i) {
    if (fabsf(o[i] - v[i]) > 1e-6f) return 1;
  }
  printf("kernel %s, o[0, 0, 0, 1] = %g\n", plan.family, (double)o[1]);
  return 0;
}
