// Graphs: their nodes in order, and the changes of nodes that are allowed afterwards.
#include <utility>

#include "device.hpp"
#include "memory.hpp"
#include "stream.hpp"

namespace tessera::emulated {
namespace {

// A graph in the state in which it was instantiated. `nodes`: the original graph's nodes, which identify its parts.
struct Executable {
  Graph own;
  std::vector<const Node*> nodes;

  Node* find(const Node* node) {
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i] == node) return own.nodes[i].get();
    }
    return nullptr;
  }
};

}  // namespace
}  // namespace tessera::emulated

using namespace tessera::emulated;
using tessera::cuda::CUcontext;
using tessera::cuda::CUgraph;
using tessera::cuda::CUgraphExec;
using tessera::cuda::CUgraphNode;
using tessera::cuda::CUkernelNodeParams;
using tessera::cuda::CUmemsetNodeParams;
using tessera::cuda::CUstream;

namespace {

Graph* own(CUgraph graph) { return reinterpret_cast<Graph*>(graph); }
Executable* own(CUgraphExec executable) { return reinterpret_cast<Executable*>(executable); }
Node* own(CUgraphNode node) { return reinterpret_cast<Node*>(node); }

CUresult add(Graph& graph, const CUgraphNode* dependencies, size_t count, Work work, CUgraphNode* node) {
  for (size_t i = 0; i < count; ++i) {
    bool found = false;
    for (const auto& other : graph.nodes) found |= other.get() == own(dependencies[i]);
    if (!found) return kInvalidValue;
  }
  graph.nodes.push_back(std::make_unique<Node>(Node{std::move(work)}));
  return *node = reinterpret_cast<CUgraphNode>(graph.nodes.back().get()), kSuccess;
}

CUresult kernel_work(const CUkernelNodeParams& p, KernelWork& work) {
  const void* const kernel = p.function ? static_cast<const void*>(p.function) : static_cast<const void*>(p.kernel);
  if (p.extra) return kNotSupported;
  return make_kernel_work(kernel, p.grid, p.block, p.smem_bytes, p.params, work);
}
CUresult memset_work(const CUmemsetNodeParams& p, MemsetWork& work) {
  if (p.height != 1) return kNotSupported;
  if (!is_mapped(p.address, p.element_bytes * p.width)) return kInvalidValue;
  work = {p.address, p.value, p.element_bytes, p.width};
  return kSuccess;
}

// Replaces a node's work by other work of the same kind.
CUresult replace(CUgraphExec executable, CUgraphNode node, Work work) {
  Node* const mine = own(executable)->find(own(node));
  if (!mine || mine->work.index() != work.index()) return kInvalidValue;
  mine->work = std::move(work);
  return kSuccess;
}

}  // namespace

EMULATED_DRIVER cuGraphCreate(CUgraph* graph, unsigned flags) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  if (flags != 0) return kInvalidValue;
  auto* const made = new Graph;
  made->context = current_context();
  return *graph = reinterpret_cast<CUgraph>(made), kSuccess;
}
EMULATED_DRIVER cuGraphDestroy(CUgraph graph) { return delete own(graph), kSuccess; }
EMULATED_DRIVER cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                        const CUkernelNodeParams* params) {
  KernelWork work;
  if (const CUresult result = kernel_work(*params, work); result != kSuccess) return result;
  return add(*own(graph), dependencies, count, std::move(work), node);
}
EMULATED_DRIVER cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                     const CUmemsetNodeParams* params, CUcontext) {
  MemsetWork work;
  if (const CUresult result = memset_work(*params, work); result != kSuccess) return result;
  return add(*own(graph), dependencies, count, work, node);
}
EMULATED_DRIVER cuGraphKernelNodeSetAttribute(CUgraphNode node, int, const void*) {
  return std::holds_alternative<KernelWork>(own(node)->work) ? kSuccess : kInvalidValue;
}
EMULATED_DRIVER cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  if (refuses_while_captured()) return kCaptureUnsupported;
  auto* const made = new Executable;
  made->own.context = own(graph)->context;
  for (const auto& node : own(graph)->nodes) {
    made->own.nodes.push_back(std::make_unique<Node>(*node));
    made->nodes.push_back(node.get());
  }
  return *executable = reinterpret_cast<CUgraphExec>(made), kSuccess;
}
EMULATED_DRIVER cuGraphUpload(CUgraphExec executable, CUstream handle) {
  return with_stream(handle, [&](const Stream& stream) -> CUresult {
    if (stream.captured) return kCaptureUnsupported;
    return own(executable)->own.context == current_context() ? check_context() : kInvalidValue;
  });
}
EMULATED_DRIVER cuGraphExecKernelNodeSetParams_v2(CUgraphExec executable, CUgraphNode node,
                                                  const CUkernelNodeParams* params) {
  KernelWork work;
  if (const CUresult result = kernel_work(*params, work); result != kSuccess) return result;
  return replace(executable, node, std::move(work));
}
EMULATED_DRIVER cuGraphExecMemsetNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                               const CUmemsetNodeParams* params, CUcontext) {
  MemsetWork work;
  if (const CUresult result = memset_work(*params, work); result != kSuccess) return result;
  return replace(executable, node, work);
}
EMULATED_DRIVER cuGraphExecDestroy(CUgraphExec executable) { return delete own(executable), kSuccess; }
EMULATED_DRIVER cuGraphLaunch(CUgraphExec executable, CUstream handle) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  return with_stream(handle, [&](const Stream& stream) -> CUresult {
    if (stream.captured) return kCaptureUnsupported;
    if (const CUresult result = finish_context(); result != kSuccess) return result;
    Graph& graph = own(executable)->own;
    if (graph.context != current_context() || stream.context != current_context()) return kInvalidValue;
    for (const auto& node : graph.nodes) {
      if (const CUresult result = execute(node->work, *stream.context); result != kSuccess) return result;
    }
    return kSuccess;
  });
}
