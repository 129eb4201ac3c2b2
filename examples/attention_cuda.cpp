// Attention on a GPU: the same calls on device memory, in a stream. Tessera itself needs no CUDA toolkit; this program
// uses CUDA's runtime for its memory and its stream.
//
//   nvcc -std=c++20 attention_cuda.cpp $(pkg-config --cflags --libs tessera) -o attention_cuda && ./attention_cuda
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr int kSkipped = 77;  // no GPU here
constexpr std::int64_t B = 2, S = 1024, H = 16, D = 128;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct DeviceMemory {
  explicit DeviceMemory(std::size_t bytes) : size(bytes) { check(cudaMalloc(&data, bytes)); }
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data); }
  void* data = nullptr;
  std::size_t size;
};

// bfloat16 bits, by truncation.
std::vector<std::uint16_t> wave(std::int64_t size, float step) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = std::sin(step * static_cast<float>(i));
    std::uint32_t bits = 0;
    static_assert(sizeof bits == sizeof value);
    __builtin_memcpy(&bits, &value, sizeof bits);
    values[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  return values;
}

void upload(const DeviceMemory& memory, const std::vector<std::uint16_t>& values) {
  check(cudaMemcpy(memory.data, values.data(), memory.size, cudaMemcpyHostToDevice));
}

}  // namespace

int main() try {
  tessera::Device gpu;
  if (const tessera::Status status = tessera::try_cuda(0, gpu); !status.ok()) {
    std::printf("skipped: %s\n", status.message().data());
    return kSkipped;
  }
  constexpr std::int64_t kElements = B * S * H * D;
  const DeviceMemory q(kElements * 2), k(kElements * 2), v(kElements * 2), o(kElements * 2);
  const std::vector<std::uint16_t> values = wave(kElements, 0.37f);
  upload(q, wave(kElements, 0.11f));
  upload(k, wave(kElements, 0.23f));
  upload(v, values);

  tessera::Problem problem;
  problem.q = problem.k = problem.v = problem.o = tessera::layout(tessera::bfloat16, {B, S, H, D});
  problem.causal = true;
  const tessera::Plan plan = tessera::plan(problem, gpu);
  std::printf("%s", tessera::describe(plan).c_str());

  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  tessera::Executor executor{};
  executor.stream = stream;
  const DeviceMemory workspace(tessera::workspace_bytes(plan));
  // Returns at once; the first call of a configuration may compile its kernel, see tessera_prepare.
  tessera::forward(plan, {.q = q.data, .k = k.data, .v = v.data, .o = o.data},
                   {static_cast<std::byte*>(workspace.data), workspace.size}, &executor);
  std::vector<std::uint16_t> result(kElements);
  check(cudaMemcpyAsync(result.data(), o.data, o.size, cudaMemcpyDeviceToHost, stream));
  check(cudaStreamSynchronize(stream));
  check(cudaStreamDestroy(stream));

  // The first query of each sequence sees the first key alone: its output is that value.
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t i = 0; i < H * D; ++i) {
      if (result[b * S * H * D + i] != values[b * S * H * D + i]) return 1;
    }
  }
  std::printf("the first query's output is the first value, as it should be\n");
  return 0;
} catch (const tessera::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
