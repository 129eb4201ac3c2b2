// The layers on a GPU, in one stream with Tessera's calls. The matrix product is a plain kernel that keeps a column of
// sums in a thread: here an engine calls cuBLAS or CUTLASS. Steps of decoding are recorded as a CUDA graph and
// replayed: no launch of Tessera depends on the contents of the index arrays.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "layers.hpp"
#include "model.hpp"

namespace serve {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

constexpr int kThreads = 128;

// Grid: [rows].
__global__ void embed_kernel(const std::int32_t* tokens, const float* table, float* x, std::int64_t dim) {
  const std::int64_t row = blockIdx.x, token = tokens[row];
  for (std::int64_t i = threadIdx.x; i < dim; i += kThreads) x[row * dim + i] = table[token * dim + i];
}

// Grid: [rows].
__global__ void rms_norm_kernel(const float* x, const std::int32_t* from, const float* gain, float* out,
                                std::int64_t dim) {
  const std::int64_t row = blockIdx.x;
  const float* in = x + (from ? from[row] : row) * dim;
  __shared__ float partial[kThreads];
  float squares = 0;
  for (std::int64_t i = threadIdx.x; i < dim; i += kThreads) squares += in[i] * in[i];
  partial[threadIdx.x] = squares;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  __syncthreads();
  const float factor = rsqrtf(partial[0] / static_cast<float>(dim) + static_cast<float>(kNormEpsilon));
  for (std::int64_t i = threadIdx.x; i < dim; i += kThreads) out[row * dim + i] = gain[i] * in[i] * factor;
}

__device__ float to_float(float value) { return value; }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
template <typename T>
__device__ T from_float(float value) {
  return T(value);
}

// Grid: [ceil(columns / kThreads), ceil(rows / kTileRows)]; a thread has kTileRows sums of one column.
constexpr int kTileRows = 8, kTileDepth = 32;
template <typename In, typename Out>
__global__ void matmul_kernel(const In* in, std::int64_t depth, const float* weight, Out* out, std::int64_t columns,
                              std::int64_t rows, bool add) {
  const std::int64_t column = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  const std::int64_t row = blockIdx.y * std::int64_t{kTileRows};
  __shared__ float tile[kTileRows][kTileDepth];
  float sum[kTileRows] = {};
  for (std::int64_t begin = 0; begin < depth; begin += kTileDepth) {
    const int width = static_cast<int>(depth - begin < kTileDepth ? depth - begin : kTileDepth);
    __syncthreads();
    for (int n = threadIdx.x; n < kTileRows * kTileDepth; n += kThreads) {
      const int r = n / kTileDepth, i = n % kTileDepth;
      tile[r][i] = row + r < rows && i < width ? to_float(in[(row + r) * depth + begin + i]) : 0;
    }
    __syncthreads();
    if (column >= columns) continue;
    for (int i = 0; i < width; ++i) {
      const float w = weight[(begin + i) * columns + column];
      for (int r = 0; r < kTileRows; ++r) sum[r] += tile[r][i] * w;
    }
  }
  if (column >= columns) return;
  for (int r = 0; r < kTileRows && row + r < rows; ++r) {
    Out* to = out + (row + r) * columns + column;
    *to = from_float<Out>(add ? to_float(*to) + sum[r] : sum[r]);
  }
}

// Grid: [rows].
__global__ void gate_kernel(const float* gate_up, float* out, std::int64_t hidden) {
  const std::int64_t row = blockIdx.x;
  const float *gates = gate_up + 2 * row * hidden, *up = gates + hidden;
  for (std::int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    out[row * hidden + i] = gates[i] / (1 + expf(-gates[i])) * up[i];
  }
}

// Grid: [rows].
__global__ void argmax_kernel(const float* logits, std::int32_t* token, std::int64_t vocab) {
  const float* row = logits + blockIdx.x * vocab;
  __shared__ std::int32_t best[kThreads];
  const auto better = [row](std::int32_t a, std::int32_t b) {
    return row[b] > row[a] || (row[b] == row[a] && b < a) ? b : a;
  };
  auto mine = static_cast<std::int32_t>(threadIdx.x < vocab ? threadIdx.x : 0);
  for (std::int64_t i = threadIdx.x; i < vocab; i += kThreads) mine = better(mine, static_cast<std::int32_t>(i));
  best[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) best[threadIdx.x] = better(best[threadIdx.x], best[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) token[blockIdx.x] = best[0];
}

class CudaLayers final : public Layers {
 public:
  CudaLayers() : Layers(tessera::cuda(0)) {
    check(cudaSetDevice(0));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    executor_.stream = stream_;
  }
  ~CudaLayers() override {
    cudaStreamSynchronize(stream_);
    if (graph_) cudaGraphExecDestroy(graph_);
    for (const auto& [begin, end] : intervals_) cudaEventDestroy(begin), cudaEventDestroy(end);
    for (void* memory : memory_) cudaFree(memory);
    cudaStreamDestroy(stream_);
  }

  const tessera::Executor& executor() const override { return executor_; }

  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    check(cudaMalloc(&memory, std::max(bytes, std::size_t{1})));
    memory_.push_back(memory);
    check(cudaMemsetAsync(memory, 0, bytes, stream_));
    return memory;
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
    check(cudaStreamSynchronize(stream_));
  }

  void embed(const std::int32_t* tokens, const float* table, float* x, std::int64_t rows, std::int64_t dim) override {
    embed_kernel<<<blocks(rows), kThreads, 0, stream_>>>(tokens, table, x, dim);
    check(cudaGetLastError());
  }

  void rms_norm(const float* x, const std::int32_t* from, const float* gain, float* out, std::int64_t rows,
                std::int64_t dim) override {
    rms_norm_kernel<<<blocks(rows), kThreads, 0, stream_>>>(x, from, gain, out, dim);
    check(cudaGetLastError());
  }

  void matmul(const Matrix& in, const float* weight, const Matrix& out, std::int64_t rows, bool add) override {
    using Bf16 = __nv_bfloat16;
    if (in.dtype == tessera::float32 && out.dtype == tessera::float32) {
      product<float, float>(in, weight, out, rows, add);
    } else if (in.dtype == tessera::float32) {
      product<float, Bf16>(in, weight, out, rows, add);
    } else {
      product<Bf16, float>(in, weight, out, rows, add);
    }
  }

  void gate(const float* gate_up, float* out, std::int64_t rows, std::int64_t hidden) override {
    gate_kernel<<<blocks(rows), kThreads, 0, stream_>>>(gate_up, out, hidden);
    check(cudaGetLastError());
  }

  void argmax(const float* logits, std::int32_t* token, std::int64_t rows, std::int64_t vocab) override {
    argmax_kernel<<<blocks(rows), kThreads, 0, stream_>>>(logits, token, vocab);
    check(cudaGetLastError());
  }

  void attention_begins() override { record(next_interval().first); }
  void attention_ends() override { record(timed_.back()->second); }
  double attention_seconds() override {
    double milliseconds = 0;
    for (const Interval* interval : timed_) {
      float elapsed = 0;
      check(cudaEventElapsedTime(&elapsed, interval->first, interval->second));
      milliseconds += elapsed;
    }
    timed_.clear();
    return milliseconds / 1000;
  }

  bool records() const override { return true; }

  // The first time directly, which loads every kernel; the second time as a graph, which then serves.
  void repeat(const std::function<void()>& work) override {
    if (std::exchange(warm_, true) == false) return work();
    if (!graph_) {
      recording_ = true;
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      work();
      cudaGraph_t graph = nullptr;
      check(cudaStreamEndCapture(stream_, &graph));
      recording_ = false;
      check(cudaGraphInstantiate(&graph_, graph, 0));
      check(cudaGraphDestroy(graph));
      timed_of_graph_ = std::exchange(timed_, {});
    }
    check(cudaGraphLaunch(graph_, stream_));
    timed_ = timed_of_graph_;
  }

 private:
  using Interval = std::pair<cudaEvent_t, cudaEvent_t>;

  static unsigned blocks(std::int64_t rows) { return static_cast<unsigned>(rows); }

  template <typename In, typename Out>
  void product(const Matrix& in, const float* weight, const Matrix& out, std::int64_t rows, bool add) {
    const dim3 grid(static_cast<unsigned>((out.columns + kThreads - 1) / kThreads),
                    static_cast<unsigned>((rows + kTileRows - 1) / kTileRows));
    matmul_kernel<In, Out><<<grid, kThreads, 0, stream_>>>(static_cast<const In*>(in.data), in.columns, weight,
                                                           static_cast<Out*>(out.data), out.columns, rows, add);
    check(cudaGetLastError());
  }

  // Events that no step in flight uses: the graph keeps its own.
  Interval& next_interval() {
    const bool fresh = recording_ || timed_.size() == eager_.size();
    if (fresh) {
      Interval& interval = intervals_.emplace_back();
      check(cudaEventCreate(&interval.first));
      check(cudaEventCreate(&interval.second));
      if (!recording_) eager_.push_back(&interval);
    }
    timed_.push_back(recording_ ? &intervals_.back() : eager_[timed_.size()]);
    return *timed_.back();
  }

  void record(cudaEvent_t event) {
    check(cudaEventRecordWithFlags(event, stream_, recording_ ? cudaEventRecordExternal : cudaEventRecordDefault));
  }

  cudaStream_t stream_ = nullptr;
  tessera::Executor executor_{};
  std::vector<void*> memory_;
  cudaGraphExec_t graph_ = nullptr;
  bool warm_ = false, recording_ = false;
  std::deque<Interval> intervals_;  // all events, at fixed addresses
  std::vector<Interval*> eager_, timed_, timed_of_graph_;
};

}  // namespace

std::unique_ptr<Layers> make_cuda_layers() { return std::make_unique<CudaLayers>(); }

}  // namespace serve
