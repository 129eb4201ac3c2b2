/* One query, two keys with equal scores: the output is the mean of their values. The structs are surrounded by guards
 * that the library may neither read nor write. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tessera/tessera.h>

/* Where each struct begins, as every version has it. */
#define BEGINS_AT(type, member, bytes) typedef char begins_##type##_##member[offsetof(type, member) == (bytes) ? 1 : -1]
BEGINS_AT(tessera_problem, direction, 8);
BEGINS_AT(tessera_problem, q, 16);
BEGINS_AT(tessera_problem, d_sink, 16 + 20 * sizeof(tessera_layout));
BEGINS_AT(tessera_problem, scale, 16 + 21 * sizeof(tessera_layout));
BEGINS_AT(tessera_problem, window_left, 32 + 21 * sizeof(tessera_layout));
BEGINS_AT(tessera_problem, max_seqlen_k, 104 + 21 * sizeof(tessera_layout));
BEGINS_AT(tessera_buffers, q, 8);
BEGINS_AT(tessera_buffers, d_o, 120);
BEGINS_AT(tessera_executor, stream, 24);
BEGINS_AT(tessera_combine_call, lse, 8 + 3 * sizeof(tessera_tensor));
BEGINS_AT(tessera_device, name, 72);
BEGINS_AT(tessera_device, family, 136);
BEGINS_AT(tessera_plan, problem, 24);
BEGINS_AT(tessera_plan, device, 24 + 8192);
BEGINS_AT(tessera_plan, workspace_bytes, 8584);
BEGINS_AT(tessera_plan, steps, 8632);
BEGINS_AT(tessera_plan, program, 8632 + 4 * 360);
BEGINS_AT(tessera_plan_step, config, 104);
typedef char device_size[sizeof(tessera_device) == 256 ? 1 : -1];
typedef char plan_size[sizeof(tessera_plan) == 16384 ? 1 : -1];

enum { kGuardBytes = 256, kGuard = 0xAB };
#define GUARDED(type)                 \
  struct {                            \
    type value;                       \
    unsigned char guard[kGuardBytes]; \
  }

static int failures = 0;

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  ++failures;
}

static void expect_ok(tessera_status status) { expect(status.code == TESSERA_OK, status.message); }

static void expect_whole(const unsigned char* guard, const char* what) {
  for (int i = 0; i < kGuardBytes; ++i) {
    if (guard[i] == kGuard) continue;
    expect(0, what);
    return;
  }
}

#if defined(HEADER_OF_NEWER)
static void expect_refused(tessera_status status, const char* name) {
  expect(status.code == TESSERA_INVALID_ARGUMENT && strncmp(status.message, name, strlen(name)) == 0 &&
             strstr(status.message, "does not know") != NULL,
         status.message);
}
#endif

static tessera_layout contiguous(int64_t rows, int64_t columns) {
  tessera_layout layout = {TESSERA_FLOAT32, 4, {1, rows, 1, columns}, {rows * columns, columns, columns, 1}};
  return layout;
}

int main(void) {
  const float q[] = {1, 2}, k[] = {3, 4, 3, 4}, v[] = {1, 4};
  float o[] = {0};
  GUARDED(tessera_problem) problem;
  GUARDED(tessera_device) device;
  GUARDED(tessera_plan) plan;
  GUARDED(tessera_buffers) buffers;
  GUARDED(tessera_executor) executor;
  const tessera_buffers no_buffers = {.struct_size = sizeof(tessera_buffers)};
  const tessera_executor no_executor = {.struct_size = sizeof(tessera_executor)};
  memset(&problem, kGuard, sizeof problem);
  memset(&device, kGuard, sizeof device);
  memset(&plan, kGuard, sizeof plan);
  memset(&buffers, kGuard, sizeof buffers);
  memset(&executor, kGuard, sizeof executor);

  tessera_problem_init(&problem.value);
  problem.value.q = contiguous(1, 2);
  problem.value.k = contiguous(2, 2);
  problem.value.v = contiguous(2, 1);
  problem.value.o = contiguous(1, 1);
  expect_ok(tessera_device_cpu(&device.value));
  expect_ok(tessera_make_plan(&problem.value, &device.value, &plan.value));
  expect(plan.value.problem.struct_size <= sizeof(tessera_problem), "the plan's problem is larger than its header's");
  expect_ok(tessera_make_plan(&plan.value.problem, &plan.value.device, &plan.value));

  size_t bytes = tessera_workspace_bytes(&plan.value);
  void* workspace = malloc(bytes);
  buffers.value = no_buffers;
  buffers.value.q = q;
  buffers.value.k = k;
  buffers.value.v = v;
  buffers.value.o = o;
  executor.value = no_executor;
  expect_ok(tessera_forward(&plan.value, &buffers.value, workspace, bytes, &executor.value));
  expect(o[0] == 2.5f, "the output is not 2.5");

  /* Two parts of equal LSE: the mean of their outputs. */
  const float o_parts[] = {1, 4}, lse_parts[] = {5, 5};
  GUARDED(tessera_combine_call) merge;
  const tessera_combine_call no_merge = {.struct_size = sizeof(tessera_combine_call)};
  const tessera_layout parts = {TESSERA_FLOAT32, 5, {2, 1, 1, 1, 1}, {1, 1, 1, 1, 1}};
  memset(&merge, kGuard, sizeof merge);
  merge.value = no_merge;
  merge.value.o_parts.layout = parts, merge.value.o_parts.data = (void*)o_parts;
  merge.value.lse_parts.layout = parts, merge.value.lse_parts.data = (void*)lse_parts;
  merge.value.lse_parts.layout.rank = 4;
  merge.value.o.layout = contiguous(1, 1), merge.value.o.data = o;
  o[0] = 0;
  expect_ok(tessera_combine(&merge.value, NULL, NULL));
  expect(o[0] == 2.5f, "the merged output is not 2.5");

#if defined(HEADER_OF_NEWER)
  {
    tessera_plan other;
    problem.value.option_of_tomorrow = 1;
    expect_refused(tessera_make_plan(&problem.value, &device.value, &other), "problem: ");
    problem.value.option_of_tomorrow = 0;
    device.value.knob_of_tomorrow = 1;
    expect_refused(tessera_make_plan(&problem.value, &device.value, &other), "device: ");
    buffers.value.tensor_of_tomorrow = q;
    expect_refused(tessera_forward(&plan.value, &buffers.value, workspace, bytes, &executor.value), "buffers: ");
    buffers.value.tensor_of_tomorrow = NULL;
    merge.value.tensor_of_tomorrow.data = o;
    expect_refused(tessera_combine(&merge.value, NULL, NULL), "call: ");
    executor.value.hook_of_tomorrow = workspace;
    expect_refused(tessera_forward(&plan.value, &buffers.value, workspace, bytes, &executor.value), "executor: ");
  }
#endif

  free(workspace);
  expect_whole(problem.guard, "written past the problem");
  expect_whole(device.guard, "written past the device");
  expect_whole(plan.guard, "written past the plan");
  expect_whole(buffers.guard, "written past the buffers");
  expect_whole(merge.guard, "written past the merge's call");
  expect_whole(executor.guard, "written past the executor");
  return failures == 0 ? 0 : 1;
}
