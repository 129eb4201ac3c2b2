/* One query, two keys with equal scores: the output is the mean of their values, 1 and 4. */
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

static tessera_layout contiguous(int64_t rows, int64_t columns) {
  tessera_layout layout = {TESSERA_FLOAT32, 4, {1, rows, 1, columns}, {rows * columns, columns, columns, 1}};
  return layout;
}

static void check(tessera_status status) {
  if (status.code != TESSERA_OK) {
    fprintf(stderr, "%s\n", status.message);
    exit(1);
  }
}

int main(void) {
  const float q[] = {1, 2}, k[] = {3, 4, 3, 4}, v[] = {1, 4};
  float o[] = {0};
  tessera_problem problem;
  tessera_device device;
  tessera_plan plan;
  tessera_buffers buffers = {.struct_size = sizeof buffers};
  void* workspace;

  tessera_problem_init(&problem);
  problem.q = contiguous(1, 2);
  problem.k = contiguous(2, 2);
  problem.v = contiguous(2, 1);
  problem.o = contiguous(1, 1);
  check(tessera_device_cpu(&device));
  check(tessera_make_plan(&problem, &device, &plan));
  workspace = malloc(tessera_workspace_bytes(&plan));
  buffers.q = q;
  buffers.k = k;
  buffers.v = v;
  buffers.o = o;
  check(tessera_forward(&plan, &buffers, workspace, tessera_workspace_bytes(&plan), NULL));
  free(workspace);
  printf("tessera %s: %g\n", tessera_version(), (double)o[0]);
  return 0;
}
