// One sequence on several GPUs, one process a GPU, over NCCL: forward and backward, and a check of sampled rows against
// float64. Tessera opens NCCL itself; this program opens it, too, for a communicator, so that it builds without NCCL's
// header. A program that has the header calls ncclCommInitRank as usual.
//
//   nvcc -std=c++20 ranks_cuda.cpp $(pkg-config --cflags --libs tessera) -ldl -o ranks_cuda && ./ranks_cuda 4 131072
//
// Its arguments are the number of GPUs and of rows; it starts the processes itself.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tessera/distributed.hpp>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr int kSkipped = 77;  // not enough GPUs here, or no NCCL
constexpr std::int64_t H = 32, Hkv = 8, D = 128;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// ---- NCCL's communicator --------------------------------------------------------------------------------------------

struct UniqueId {
  char bytes[128];
};
struct Nccl {
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*init_rank)(ncclComm**, int ranks, UniqueId, int rank) = nullptr;
  int (*destroy)(ncclComm*) = nullptr;
};
bool open_nccl(Nccl& nccl) {
  const char* const given = std::getenv("TESSERA_NCCL");
  void* const library = dlopen(given ? given : "libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
  if (!library) return false;
  nccl.get_unique_id = reinterpret_cast<int (*)(UniqueId*)>(dlsym(library, "ncclGetUniqueId"));
  nccl.init_rank = reinterpret_cast<int (*)(ncclComm**, int, UniqueId, int)>(dlsym(library, "ncclCommInitRank"));
  nccl.destroy = reinterpret_cast<int (*)(ncclComm*)>(dlsym(library, "ncclCommDestroy"));
  return nccl.get_unique_id && nccl.init_rank && nccl.destroy;
}

// Memory that the processes share, for the identity of their communicator.
struct Shared {
  UniqueId id;
  std::atomic<bool> is_set;
};

// ---- data: functions of (tensor, row of the sequence, head, column), exact in bfloat16 ------------------------------

float value(int tensor, std::int64_t row, std::int64_t head, std::int64_t column) {
  std::uint64_t x = static_cast<std::uint64_t>((((row * 64 + head) * 1024 + column) << 3) + tensor);
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15u;
  return static_cast<float>(static_cast<int>((x >> 40) % 129) - 64) / 64.0f;
}
enum Tensor : int { kQ, kK, kV, kDO };

std::uint16_t to_bfloat16(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}
float from_bfloat16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float x = 0;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

struct DeviceMemory {
  explicit DeviceMemory(std::size_t bytes) : size(bytes) { check(cudaMalloc(&data, bytes > 0 ? bytes : 1)); }
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data); }
  std::vector<std::uint16_t> download() const {
    std::vector<std::uint16_t> values(size / 2);
    check(cudaMemcpy(values.data(), data, size, cudaMemcpyDeviceToHost));
    return values;
  }
  void* data = nullptr;
  std::size_t size;
};

// The rows of this rank's chunks.
void upload(const DeviceMemory& memory, int tensor, std::int64_t heads, const std::vector<tessera_chunk>& chunks) {
  std::vector<std::uint16_t> values;
  for (const tessera_chunk& chunk : chunks) {
    for (std::int64_t row = chunk.begin; row < chunk.begin + chunk.length; ++row) {
      for (std::int64_t i = 0; i < heads * D; ++i) values.push_back(to_bfloat16(value(tensor, row, i / D, i % D)));
    }
  }
  check(cudaMemcpy(memory.data, values.data(), memory.size, cudaMemcpyHostToDevice));
}

// o and dQ of a row and head in float64.
void exact_row(std::int64_t row, std::int64_t head, std::vector<double>& o, std::vector<double>& d_q) {
  const std::int64_t kv = head / (H / Hkv);
  const double scale = 1 / std::sqrt(static_cast<double>(D));
  std::vector<double> p(static_cast<std::size_t>(row) + 1), d_p(p.size());
  double most = -1e300, sum = 0, delta = 0;
  for (std::int64_t j = 0; j <= row; ++j) {
    double s = 0, g = 0;
    for (std::int64_t c = 0; c < D; ++c) {
      s += static_cast<double>(value(kQ, row, head, c)) * value(kK, j, kv, c);
      g += static_cast<double>(value(kDO, row, head, c)) * value(kV, j, kv, c);
    }
    p[static_cast<std::size_t>(j)] = s * scale, d_p[static_cast<std::size_t>(j)] = g;
    most = std::max(most, s * scale);
  }
  for (double& s : p) sum += s = std::exp(s - most);
  for (std::size_t j = 0; j < p.size(); ++j) delta += (p[j] /= sum) * d_p[j];
  o.assign(D, 0), d_q.assign(D, 0);
  for (std::int64_t j = 0; j <= row; ++j) {
    const auto n = static_cast<std::size_t>(j);
    for (std::int64_t c = 0; c < D; ++c) {
      o[static_cast<std::size_t>(c)] += p[n] * value(kV, j, kv, c);
      d_q[static_cast<std::size_t>(c)] += scale * p[n] * (d_p[n] - delta) * value(kK, j, kv, c);
    }
  }
}

// ---- one rank -------------------------------------------------------------------------------------------------------

int run(std::int32_t rank, std::int32_t ranks, std::int64_t rows, Shared& shared, const Nccl& nccl) try {
  check(cudaSetDevice(rank));
  if (rank == 0) {
    if (nccl.get_unique_id(&shared.id) != 0) return 1;
    shared.is_set = true;
  }
  while (!shared.is_set) usleep(1000);
  ncclComm* comm = nullptr;
  if (nccl.init_rank(&comm, ranks, shared.id, rank) != 0) return 1;

  tessera::RanksProblem problem;
  problem.ranks = ranks;
  problem.direction = TESSERA_BACKWARD;  // both passes
  problem.dtype = TESSERA_BFLOAT16, problem.causal = true;
  problem.lengths = &rows, problem.num_sequences = 1;
  problem.heads_q = H, problem.heads_kv = Hkv, problem.head_dim = D;
  const tessera::Device gpu = tessera::cuda(rank);
  int wrong = 0;
  {
    const tessera::Communicator communicator = tessera::nccl_communicator(comm);
    const tessera::RanksAttention attention(problem, rank, {}, &gpu);
    if (rank == 0) std::printf("%s", tessera::describe(attention.plan()).c_str());
    std::vector<tessera_chunk> mine;
    const tessera::RankSchedule schedule(attention.plan(), rank);
    for (const tessera_chunk& chunk : schedule.chunks()) {
      if (chunk.rank == rank) mine.push_back(chunk);
    }
    const auto own = static_cast<std::size_t>(rows / ranks);
    const DeviceMemory q(own * H * D * 2), k(own * Hkv * D * 2), v(own * Hkv * D * 2), d_o(own * H * D * 2);
    const DeviceMemory o(q.size), lse(own * H * sizeof(float)), d_q(q.size), d_k(k.size), d_v(v.size);
    const DeviceMemory saved(attention.saved_bytes());
    const DeviceMemory forward(attention.workspace_bytes(TESSERA_FORWARD));
    const DeviceMemory backward(attention.workspace_bytes(TESSERA_BACKWARD));
    upload(q, kQ, H, mine), upload(k, kK, Hkv, mine), upload(v, kV, Hkv, mine), upload(d_o, kDO, H, mine);

    tessera::RanksBuffers data{};
    data.q = q.data, data.k = k.data, data.v = v.data;
    data.o = o.data, data.lse = static_cast<float*>(lse.data), data.saved = saved.data;
    data.d_o = d_o.data, data.d_q = d_q.data, data.d_k = d_k.data, data.d_v = d_v.data;
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    tessera::Executor executor{};
    executor.stream = stream;
    cudaEvent_t begin = nullptr, middle = nullptr, end = nullptr;
    for (cudaEvent_t* const event : {&begin, &middle, &end}) check(cudaEventCreate(event));
    const auto memory = [](const DeviceMemory& of) { return std::span(static_cast<std::byte*>(of.data), of.size); };
    for (int times = 0; times < 4; ++times) {  // the first calls compile kernels
      check(cudaEventRecord(begin, stream));
      attention.forward(communicator, data, memory(forward), &executor);
      check(cudaEventRecord(middle, stream));
      attention.backward(communicator, data, memory(backward), &executor);
      check(cudaEventRecord(end, stream));
    }
    check(cudaStreamSynchronize(stream));
    float forward_ms = 0, backward_ms = 0;
    check(cudaEventElapsedTime(&forward_ms, begin, middle));
    check(cudaEventElapsedTime(&backward_ms, middle, end));

    const std::vector<std::uint16_t> got_o = o.download(), got_d_q = d_q.download();
    double largest = 0, largest_d_q = 0;
    std::vector<double> exact_o, exact_d_q;
    for (const tessera_chunk& chunk : mine) {
      for (const std::int64_t row : {chunk.begin, chunk.begin + chunk.length - 1}) {
        const std::int64_t head = (row * 7) % H;
        exact_row(row, head, exact_o, exact_d_q);
        const std::int64_t first = ((chunk.row + row - chunk.begin) * H + head) * D;
        for (std::int64_t c = 0; c < D; ++c) {
          const auto at = static_cast<std::size_t>(first + c), n = static_cast<std::size_t>(c);
          largest = std::max(largest, std::fabs(static_cast<double>(from_bfloat16(got_o[at])) - exact_o[n]));
          largest_d_q =
              std::max(largest_d_q, std::fabs(static_cast<double>(from_bfloat16(got_d_q[at])) - exact_d_q[n]));
        }
      }
    }
    wrong = !(largest < 0.02 && largest_d_q < 0.02);
    const double products = 4.0 * D * H * static_cast<double>(rows) * static_cast<double>(rows) / 2 / ranks;
    std::printf(
        "rank %d: forward %.2f ms, %.0f TFLOP/s; backward %.2f ms, %.0f TFLOP/s; errors of o %.1e, of dQ %.1e%s\n",
        rank, static_cast<double>(forward_ms), products / forward_ms * 1e-9, static_cast<double>(backward_ms),
        2.5 * products / backward_ms * 1e-9, largest, largest_d_q, wrong ? ": WRONG" : "");
    check(cudaStreamDestroy(stream));
  }
  nccl.destroy(comm);
  return wrong;
} catch (const tessera::Error& error) {
  std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
  std::_Exit(1);
}

}  // namespace

int main(int count, char** arguments) {
  const int ranks = count > 1 ? std::atoi(arguments[1]) : 2;
  const std::int64_t rows = count > 2 ? std::atoll(arguments[2]) : 8192;
  if (ranks < 1 || rows < 1) {
    std::fprintf(stderr, "usage: ranks_cuda [GPUS [ROWS]], accepted numbers from 1 on\n");
    return 2;
  }
  Nccl nccl;
  if (!open_nccl(nccl)) {
    std::printf("skipped: no NCCL: pip install nvidia-nccl-cu13, or apt install libnccl2\n");
    return kSkipped;
  }
  // The GPUs are counted in a process of their own: those of the ranks must not be forked from one that uses CUDA.
  const pid_t counts = fork();
  if (counts == 0) {
    tessera::Device gpu;
    const tessera::Status status = tessera::try_cuda(ranks - 1, gpu);
    if (!status.ok()) std::printf("skipped: %s\n", status.message().data());
    std::fflush(stdout);
    std::_Exit(status.ok() ? 0 : kSkipped);
  }
  int status = 0;
  waitpid(counts, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return WIFEXITED(status) ? WEXITSTATUS(status) : 1;

  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  Shared& shared = *new (memory) Shared{};
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    processes.push_back(fork());
    if (processes.back() == 0) {
      const int result = run(rank, ranks, rows, shared, nccl);
      std::fflush(stdout);
      std::_Exit(result);
    }
  }
  int failed = 0;
  for (std::size_t n = 0; n < processes.size(); ++n) {
    const pid_t ended = waitpid(-1, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    failed = 1;
    for (const pid_t process : processes) {  // the others would wait for it
      if (process != ended) kill(process, SIGTERM);
    }
  }
  return failed;
}
