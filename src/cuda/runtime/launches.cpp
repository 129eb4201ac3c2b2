#include "cuda/runtime/launches.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "core/status.hpp"
#include "cuda/runtime/environment.hpp"

namespace tessera::cuda {
namespace {

// TESSERA_CUDA_GRAPHS. 0: kernels are launched one by one. first: a form's calls are graphs from the first on, for
// tests. Otherwise graphs are used where they are faster.
enum class UseGraphs { kNever, kWhereItPays, kFromFirst };
UseGraphs use_graphs() {
  static const UseGraphs use = [] {
    const std::string value = environment_variable(kCudaGraphs);
    return value == "0" ? UseGraphs::kNever : value == "first" ? UseGraphs::kFromFirst : UseGraphs::kWhereItPays;
  }();
  return use;
}

// Calls of one form on one stream. Each graph has its own stream, since two launches of a graph are serialised; its own
// thread, since setting its parameters and launching it are two steps; and its own kernels, since the driver can change
// a node's kernel but may keep attributes of the old one, such as its clusters.
struct Form {
  uint64_t stream = 0;  // the driver's id of it, which is never reused
  CUcontext context = nullptr;
  std::array<CUkernel, Launches::kMaxKernels> kernels{};
  int count = 0;
  bool clears = false;
  bool operator==(const Form&) const = default;
};

CUmemsetNodeParams memset_params(CUdeviceptr word) {
  return {.address = word, .pitch = 0, .value = 0, .element_bytes = 4, .width = 1, .height = 1};
}

CUkernelNodeParams kernel_params(const Kernel& kernel, const Grid& grid, void** arguments) {
  return {.function = nullptr,
          .grid = {grid.x, grid.y, grid.z},
          .block = {static_cast<unsigned>(kernel.threads), 1, 1},
          .smem_bytes = static_cast<unsigned>(kernel.smem_bytes),
          .params = arguments,
          .extra = nullptr,
          .kernel = kernel.handle,
          .context = nullptr};  // the current context
}

class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { release(); }

  const Form& form() const { return form_; }
  bool made() const { return made_; }
  bool refused() const { return refused_; }  // by the driver: calls of this form are launched one by one

  // Counts a call; returns true once enough calls of the form were launched one by one.
  bool pays() { return ++calls_ > Launches::kCallsBeforeGraph; }

  // Reuses the object for another form. Launches of the old form that still run complete as usual.
  void become(const Form& form) {
    release();
    form_ = form, calls_ = 0, refused_ = false;
  }
  void refuse() {
    release();
    refused_ = true;
  }

  // Makes the graph in two steps, in two calls so that neither bears the whole cost: first on the host, then the upload
  // to the GPU, which the first launch would otherwise do. Addresses are valid for this call only, so a step that uses
  // them completes within it.
  bool make_a_step(const Driver& cu, CUstream stream, CUdeviceptr word, const CUkernelNodeParams* kernels) {
    const CaptureRelaxed relaxed(cu);
    if (!graph_) return make_nodes(cu, stream, word, kernels);
    made_ = cu.cuGraphUpload(executable_, stream) == kCudaSuccess;
    return made_;
  }

  // Sets the parameters of later launches; launches that still wait keep theirs.
  bool set(const Driver& cu, CUdeviceptr word, const CUkernelNodeParams* kernels) const {
    if (form_.clears) {
      const CUmemsetNodeParams params = memset_params(word);
      if (cu.cuGraphExecMemsetNodeSetParams(executable_, clear_, &params, form_.context) != kCudaSuccess) return false;
    }
    for (int i = 0; i < form_.count; ++i) {
      if (cu.cuGraphExecKernelNodeSetParams(executable_, kernels_[i], &kernels[i]) != kCudaSuccess) return false;
    }
    return true;
  }

  bool launch(const Driver& cu, CUstream stream) const { return cu.cuGraphLaunch(executable_, stream) == kCudaSuccess; }

 private:
  // A chain of the form's nodes. `priority`: kernels of a graph do not inherit the priority of their stream.
  bool make_nodes(const Driver& cu, CUstream stream, CUdeviceptr word, const CUkernelNodeParams* kernels) {
    if (cu.cuGraphCreate(&graph_, 0) != kCudaSuccess) return false;
    CUgraphNode last = nullptr;
    bool fine = true;
    if (form_.clears) {
      const CUmemsetNodeParams params = memset_params(word);
      fine = cu.cuGraphAddMemsetNode(&clear_, graph_, nullptr, 0, &params, form_.context) == kCudaSuccess;
      last = clear_;
    }
    CUlaunchAttributeValue priority{};
    fine = fine && cu.cuStreamGetPriority(stream, &priority.priority) == kCudaSuccess;
    for (int i = 0; fine && i < form_.count; ++i) {
      fine = cu.cuGraphAddKernelNode(&kernels_[i], graph_, &last, last ? 1 : 0, &kernels[i]) == kCudaSuccess &&
             cu.cuGraphKernelNodeSetAttribute(kernels_[i], kLaunchPriority, &priority) == kCudaSuccess;
      last = kernels_[i];
    }
    return fine && cu.cuGraphInstantiateWithFlags(&executable_, graph_, 0) == kCudaSuccess;
  }

  void release() {
    const Driver* cu = nullptr;
    if (graph_ && open_driver(cu).code == TESSERA_OK) {
      const CaptureRelaxed relaxed(*cu);
      if (executable_) cu->cuGraphExecDestroy(executable_);
      cu->cuGraphDestroy(graph_);
    }
    executable_ = nullptr, graph_ = nullptr, made_ = false;
  }

  Form form_;
  int calls_ = 0;  // calls of the form, launched one by one
  bool refused_ = false, made_ = false;
  CUgraph graph_ = nullptr;  // its nodes identify those of the executable graph
  CUgraphExec executable_ = nullptr;
  CUgraphNode clear_ = nullptr, kernels_[Launches::kMaxKernels] = {};
};

// A thread's graphs, most recently used first.
class Graphs {
 public:
  // The graph of a form, made or not.
  Graph& find(const Form& form) {
    auto at = std::find_if(order_.begin(), order_.end(), [&](const Graph* graph) { return graph->form() == form; });
    if (at == order_.end()) (*--at)->become(form);
    std::rotate(order_.begin(), at, at + 1);
    return *order_.front();
  }

 private:
  static constexpr size_t kMost = 16;
  std::array<Graph, kMost> graphs_;
  std::array<Graph*, kMost> order_ = [this] {
    std::array<Graph*, kMost> order;
    std::transform(graphs_.begin(), graphs_.end(), order.begin(), [](Graph& graph) { return &graph; });
    return order;
  }();
};

// If captured into a graph, the programmatic edge to the previous kernel lets this kernel start early there, too.
CUresult launch_early(const Driver& cu, const Kernel& kernel, const Grid& grid, CUstream stream, void** arguments) {
  CUlaunchAttribute attribute{.id = kLaunchProgrammaticSerialization, .padding = {}, .value = {}};
  attribute.value.programmatic_serialization = 1;
  const CUlaunchConfig config{.grid = {grid.x, grid.y, grid.z},
                              .block = {static_cast<unsigned>(kernel.threads), 1, 1},
                              .smem_bytes = static_cast<unsigned>(kernel.smem_bytes),
                              .stream = stream,
                              .attributes = &attribute,
                              .attribute_count = 1};
  return cu.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel.handle), arguments, nullptr);
}

}  // namespace

tessera_status Launches::begin() {
  TESSERA_RETURN_IF_ERROR(context_.enter(device_.ordinal, stream_));
  driver_ = &context_.driver();
  return ok();
}

tessera_status Launches::run() {
  if (count_ == 0) return ok();
  return use_graphs() != UseGraphs::kNever && run_as_graph() ? ok() : run_one_by_one();
}

// Returns false if nothing was launched: the stream is being captured (a capture accepts kernels but no graph launch),
// the form's graph is not made yet, or the driver refuses. In the last case, launching one by one finds the kernel to
// name in the error.
bool Launches::run_as_graph() {
  const Driver& cu = *driver_;
  CUcaptureStatus capture = kCaptureNone;
  if (cu.cuStreamIsCapturing(stream_, &capture) != kCudaSuccess || capture != kCaptureNone) return false;
  Form form{.context = context_.current(), .count = count_, .clears = cleared_ != 0};
  for (int i = 0; i < count_; ++i) form.kernels[i] = nodes_[i].kernel.handle;
  if (cu.cuStreamGetId(stream_, &form.stream) != kCudaSuccess) return false;
  thread_local Graphs graphs;
  Graph& graph = graphs.find(form);
  const bool at_once = use_graphs() == UseGraphs::kFromFirst;
  if (graph.refused() || (!graph.made() && !at_once && !graph.pays())) return false;
  void* arguments[kMaxKernels];
  CUkernelNodeParams kernels[kMaxKernels];
  for (int i = 0; i < count_; ++i) {
    arguments[i] = nodes_[i].params;
    kernels[i] = kernel_params(nodes_[i].kernel, nodes_[i].grid, &arguments[i]);
  }
  const auto refuse = [&graph] { return graph.refuse(), false; };
  if (!graph.made()) {
    do {
      if (!graph.make_a_step(cu, stream_, cleared_, kernels)) return refuse();
    } while (at_once && !graph.made());
    if (!at_once) return false;
  }
  return (graph.set(cu, cleared_, kernels) && graph.launch(cu, stream_)) || refuse();
}

tessera_status Launches::run_one_by_one() {
  const Driver& cu = *driver_;
  if (cleared_) TESSERA_RETURN_IF_ERROR(check(cu, cu.cuMemsetD32Async(cleared_, 0, 1, stream_), "cuMemsetD32Async"));
  for (int i = 0; i < count_; ++i) {
    Node& node = nodes_[i];
    // One pointer per argument. Passed as a buffer (CU_LAUNCH_PARAM_BUFFER_POINTER) instead, the tensor maps in the
    // params are not at the place that TMA reads, and copies return garbage: seen with driver 580.
    void* arguments[] = {node.params};
    const CUresult result =
        node.kernel.begins_early
            ? launch_early(cu, node.kernel, node.grid, stream_, arguments)
            : cu.cuLaunchKernel(reinterpret_cast<CUfunction>(node.kernel.handle), node.grid.x, node.grid.y, node.grid.z,
                                static_cast<unsigned>(node.kernel.threads), 1, 1,
                                static_cast<unsigned>(node.kernel.smem_bytes), stream_, arguments, nullptr);
    TESSERA_RETURN_IF_ERROR(check(cu, result, node.kernel.name));
  }
  return ok();
}

}  // namespace tessera::cuda
