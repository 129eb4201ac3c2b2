/* A libcuda.so.1 whose answers are set by FAKE_CUDA_VERSION, FAKE_CUDA_INIT, FAKE_CUDA_MAJOR, FAKE_CUDA_MINOR and
   FAKE_CUDA_DEVICES (by default one GPU, at most two). It runs nothing; fake_cuda_log() lists what would have run. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int number(const char* name) {
  const char* value = getenv(name);
  return value ? atoi(value) : 0;
}

enum { kMajor = 75, kMinor = 76 };

int cuDriverGetVersion(int* version) { return (*version = number("FAKE_CUDA_VERSION"), 0); }
int cuInit(unsigned flags) { return (void)flags, number("FAKE_CUDA_INIT"); }
int cuGetErrorName(int error, const char** name) { return (void)error, *name = "CUDA_ERROR_PRETENDED", 0; }
int cuGetErrorString(int error, const char** text) { return (void)error, *text = "the driver's words", 0; }
int cuDeviceGetCount(int* count) { return (*count = number("FAKE_CUDA_DEVICES") == 2 ? 2 : 1, 0); }
int cuDeviceGet(int* device, int ordinal) { return (*device = ordinal, 0); }
int cuDeviceGetName(char* name, int size, int device) {
  return snprintf(name, (size_t)size, "Pretended %d", device) < 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == kMajor ? number("FAKE_CUDA_MAJOR") : attribute == kMinor ? number("FAKE_CUDA_MINOR") : 1 << 17;
  return 0;
}

#define UNUSED(name) \
  int name(void) { return 1; }
UNUSED(cuStreamSynchronize)
UNUSED(cuPointerGetAttribute)
UNUSED(cuPointerGetAttributes)
UNUSED(cuMemcpyDtoHAsync_v2)
UNUSED(cuMemcpyHtoDAsync_v2)
UNUSED(cuMemAlloc_v2)
UNUSED(cuMemFree_v2)
UNUSED(cuStreamCreate)
UNUSED(cuStreamDestroy_v2)
UNUSED(cuStreamWaitEvent)
UNUSED(cuEventCreate)
UNUSED(cuEventDestroy_v2)
UNUSED(cuEventRecord)

/* ---- what a test asks for ---- */

static char text[1 << 16];
static char refused[64];
static void* captured;

/* What was put into streams since the last call, a line a launch. */
const char* fake_cuda_log(void) {
  static char told[sizeof text];
  memcpy(told, text, sizeof text);
  text[0] = 0;
  return told;
}
/* The function of that name fails from now on; "": none. */
void fake_cuda_refuse(const char* name) { snprintf(refused, sizeof refused, "%s", name); }
/* The stream is captured from now on; NULL: none. */
void fake_cuda_capture(void* stream) { captured = stream; }

enum { kInvalidValue = 1, kUnsupported = 900 };
#define REFUSE_IF_ASKED() \
  if (strcmp(refused, __func__) == 0) return kInvalidValue

#define TELL(...) (void)snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__)

/* A map tells where its tensor is, in its first 8 bytes. */
int cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* data, const uint64_t* extents,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  (void)type, (void)steps, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  REFUSE_IF_ASKED();
  if (rank != 4) return kInvalidValue;
  *map = (uintptr_t)data;
  TELL("map of %d: %d x %d x %d x %d", (int)(uintptr_t)data, (int)extents[0], (int)extents[1], (int)extents[2],
       (int)extents[3]);
  TELL(", steps of %d, %d, %d bytes", (int)strides[0], (int)strides[1], (int)strides[2]);
  return TELL(", boxes of %u x %u x %u x %u\n", box[0], box[1], box[2], box[3]), 0;
}

/* ---- libraries of tests/fake_nvrtc: the name of a target. Loaded are those of the GPU's architecture, of an older one
   of its family, and PTX of no newer one ---- */

static int loadable(const char* target) {
  const int arch = 10 * number("FAKE_CUDA_MAJOR") + number("FAKE_CUDA_MINOR");
  int of = 0;
  if (sscanf(target, "compute_%d", &of) == 1) return of <= arch;
  if (sscanf(target, "sm_%d", &of) != 1) return 0;
  return strchr(target, 'a') ? of == arch : of / 10 == arch / 10 && of <= arch;
}
int cuLibraryLoadData(void** library, const void* code, int* jit_options, void** jit_values, unsigned jit_count,
                      int* options, void** values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
  enum { kNoBinaryForGpu = 209 };
  static char loaded;
  if (!loadable(code)) return kNoBinaryForGpu;
  return *library = &loaded, TELL("loads %s\n", (const char*)code), 0;
}
int cuLibraryUnload(void* library) { return (void)library, 0; }
int cuLibraryGetKernel(void** kernel, void* library, const char* name) { return (void)name, *kernel = library, 0; }
int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  return (void)attribute, (void)value, (void)kernel, (void)device, 0;
}

/* ---- a context for each GPU. The first GPU's is current in every thread from the start; streams from 1000 on belong
   to the second GPU, the default stream to the current one ---- */

static char contexts[2];
static _Thread_local struct {
  void* pushed[8];
  int depth;
} stack;

static char* current(void) { return stack.depth ? stack.pushed[stack.depth - 1] : contexts; }
static char* context_of(void* stream) {
  return !stream ? current() : (uintptr_t)stream < 1000 ? &contexts[0] : &contexts[1];
}

int cuDevicePrimaryCtxRetain(void** context, int device) { return (*context = &contexts[device], 0); }
int cuCtxGetCurrent(void** context) { return (*context = current(), 0); }
int cuCtxPushCurrent_v2(void* context) { return (stack.pushed[stack.depth++] = context, 0); }
int cuCtxPopCurrent_v2(void** context) {
  if (stack.depth == 0) return kInvalidValue;
  return *context = stack.pushed[--stack.depth], 0;
}
int cuCtxGetDevice(int* device) { return (*device = (int)(current() - contexts), 0); }
int cuStreamGetCtx(void* stream, void** context) { return (*context = context_of(stream), 0); }
int cuStreamGetId(void* stream, uint64_t* id) { return (*id = (uintptr_t)stream, 0); }
int cuStreamGetPriority(void* stream, int* priority) { return (*priority = -(int)(uintptr_t)stream, 0); }
int cuStreamIsCapturing(void* stream, int* status) { return (*status = captured && stream == captured, 0); }
int cuThreadExchangeStreamCaptureMode(int* mode) { return (void)mode, 0; }

/* ---- launches ---- */

typedef struct {
  void* function;
  unsigned grid[3], block[3], smem_bytes;
  void** params;
  void** extra;
  void* kernel;
  void* context;
} KernelParams;
typedef struct {
  uint64_t address;
  size_t pitch;
  unsigned value, element_bytes;
  size_t width, height;
} MemsetParams;

/* 0: the current context is not the stream's. */
static int tell_stream(void* stream) {
  if (context_of(stream) != current()) return 0;
  if (current() != contexts) TELL("GPU %d, ", (int)(current() - contexts));
  return TELL("%d:", (int)(uintptr_t)stream), 1;
}
static void tell_kernel(void* kernel, unsigned grid, const void* argument) {
  int first;
  memcpy(&first, argument, sizeof first);
  TELL(" kernel %d(%d) x %u", (int)(uintptr_t)kernel, first, grid);
}

int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void* stream) {
  REFUSE_IF_ASKED();
  if (!tell_stream(stream)) return kInvalidValue;
  return TELL(" %zu words at %d become %u\n", count, (int)address, value), 0;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned smem_bytes, void* stream, void** params, void** extra) {
  (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)smem_bytes, (void)extra;
  REFUSE_IF_ASKED();
  if (!tell_stream(stream)) return kInvalidValue;
  tell_kernel(function, grid_x, params[0]);
  return TELL("\n"), 0;
}

typedef struct {
  unsigned grid[3], block[3], smem_bytes;
  void* stream;
  const int* attributes;
  unsigned attribute_count;
} LaunchConfig;
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void** extra) {
  (void)extra;
  REFUSE_IF_ASKED();
  if (!tell_stream(config->stream)) return kInvalidValue;
  tell_kernel(function, config->grid[0], params[0]);
  for (unsigned n = 0; n < config->attribute_count; ++n) TELL(" attribute %d", config->attributes[18 * n]);
  return TELL("\n"), 0;
}

/* ---- graphs: chains of nodes, whose names are good as long as their graph is ---- */

typedef struct Node {
  struct Graph* graph;
  int priority, clears;
  uint64_t cleared;
  void* kernel;
  unsigned grid;
  int argument;
} Node;
typedef struct Graph {
  Node nodes[4];
  int count, alive;
  void* context;
} Graph;
typedef struct {
  Graph* of;
  Graph own; /* of nodes as they were when it was made, and as they were set since */
  int number;
} Executable;

static int executables;

/* Never freed: so a test sees what is used too late. Chained, so that no tool calls it lost. */
static void* allocate(size_t bytes) {
  static void** last;
  void** block = calloc(1, sizeof(void*) * 2 + bytes);
  block[0] = last;
  last = block;
  return block + 2;
}

static void set_kernel(Node* node, const KernelParams* params) {
  node->kernel = params->kernel, node->grid = params->grid[0];
  memcpy(&node->argument, params->params[0], sizeof node->argument);
}

int cuGraphCreate(Graph** graph, unsigned flags) {
  REFUSE_IF_ASKED();
  *graph = allocate(sizeof **graph);
  (*graph)->alive = 1, (*graph)->context = current();
  return (void)flags, 0;
}
int cuGraphDestroy(Graph* graph) { return (graph->alive = 0, 0); }

static Node* add(Graph* graph, Node* const* dependencies, size_t count) {
  if (count != (graph->count > 0) || (count && *dependencies != &graph->nodes[graph->count - 1])) return NULL;
  Node* node = &graph->nodes[graph->count++];
  node->graph = graph;
  return node;
}
int cuGraphAddKernelNode_v2(Node** node, Graph* graph, Node* const* dependencies, size_t count,
                            const KernelParams* params) {
  REFUSE_IF_ASKED();
  if (!(*node = add(graph, dependencies, count))) return kInvalidValue;
  return set_kernel(*node, params), 0;
}
int cuGraphAddMemsetNode(Node** node, Graph* graph, Node* const* dependencies, size_t count, const MemsetParams* params,
                         void* of) {
  REFUSE_IF_ASKED();
  if (of != graph->context || !(*node = add(graph, dependencies, count))) return kInvalidValue;
  return (*node)->clears = 1, (*node)->cleared = params->address, 0;
}
int cuGraphKernelNodeSetAttribute(Node* node, int attribute, const int* value) {
  enum { kPriority = 8 };
  if (attribute == kPriority) node->priority = *value;
  return 0;
}
int cuGraphInstantiateWithFlags(Executable** executable, Graph* graph, unsigned long long flags) {
  REFUSE_IF_ASKED();
  *executable = allocate(sizeof **executable);
  (*executable)->of = graph, (*executable)->own = *graph, (*executable)->number = ++executables;
  TELL("graph %d made, priority %d\n", executables, graph->nodes[graph->count - 1].priority);
  return (void)flags, 0;
}
static Node* own(Executable* executable, const Node* node) {
  if (!node->graph->alive || node->graph != executable->of || node->graph->context != current()) return NULL;
  return &executable->own.nodes[node - executable->of->nodes];
}
int cuGraphExecKernelNodeSetParams_v2(Executable* executable, const Node* node, const KernelParams* params) {
  REFUSE_IF_ASKED();
  Node* mine = own(executable, node);
  if (!mine || mine->clears) return kInvalidValue;
  return set_kernel(mine, params), 0;
}
int cuGraphExecMemsetNodeSetParams(Executable* executable, const Node* node, const MemsetParams* params, void* of) {
  REFUSE_IF_ASKED();
  Node* mine = own(executable, node);
  if (!mine || !mine->clears || of != executable->own.context) return kInvalidValue;
  return mine->cleared = params->address, 0;
}
int cuGraphUpload(Executable* executable, void* stream) {
  REFUSE_IF_ASKED();
  if (captured && stream == captured) return kUnsupported;
  if (executable->own.context != current() || context_of(stream) != current()) return kInvalidValue;
  return TELL("graph %d uploaded\n", executable->number), 0;
}
int cuGraphExecDestroy(Executable* executable) { return TELL("graph %d destroyed\n", executable->number), 0; }
int cuGraphLaunch(Executable* executable, void* stream) {
  REFUSE_IF_ASKED();
  if (captured && stream == captured) return kUnsupported;
  if (executable->own.context != current() || !tell_stream(stream)) return kInvalidValue;
  TELL(" graph %d:", executable->number);
  for (int i = 0; i < executable->own.count; ++i) {
    const Node* node = &executable->own.nodes[i];
    if (node->clears) {
      TELL(" 0 at %d", (int)node->cleared);
    } else {
      tell_kernel(node->kernel, node->grid, &node->argument);
    }
  }
  return TELL("\n"), 0;
}
