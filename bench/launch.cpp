// tessera_bench_launch: the host time of a call on a GPU, through the C interface: the first call of a config, which
// compiles its kernel; the first one that finds it in the cache on disk; the following calls, one by one; and a planned
// launch, beside the driver's launch of a kernel that does nothing.
//
// Sequences are short, so that launches do not wait for the GPU. Problems with many heads get the kernel of large
// problems. This program starts a process for each first call. It needs no library but Tessera's; libcuda is opened at
// run time.
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/fields.hpp"
#include "gpu_call.hpp"
#include "tessera/tessera.h"

namespace {

using namespace bench;

void* stream_of_gpu_0() {
  make_context();
  return make_stream();
}

void* allocate(size_t bytes) {
  unsigned long long address = 0;
  driver("cuMemAlloc_v2", &address, bytes);
  driver("cuMemsetD8_v2", address, static_cast<unsigned char>(0), bytes);
  return reinterpret_cast<void*>(address);
}

void synchronize(void* stream) { driver("cuStreamSynchronize", stream); }

// ---- the calls ------------------------------------------------------------------------------------------------------

struct Case {
  const char* name;
  tessera_direction direction;
  int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim;
  int32_t causal;
  int32_t dtype = TESSERA_BFLOAT16;
  double softcap = 0, dropout_p = 0;
};

constexpr Case kCases[] = {
    // Of configs that `make aot` prebuilds.
    {"forward, D 128, one head", TESSERA_FORWARD, 1, 128, 128, 1, 1, 128, 0},
    {"forward, D 64, 256 heads", TESSERA_FORWARD, 1, 128, 128, 256, 256, 64, 0},
    {"forward, D 128, 256 heads, causal", TESSERA_FORWARD, 1, 128, 128, 256, 256, 128, 1},
    {"forward, D 256, 256 heads, causal", TESSERA_FORWARD, 1, 128, 128, 256, 256, 256, 1},
    {"decode, D 128, 8 heads over 1, 4096 keys, 2 launches", TESSERA_FORWARD, 1, 1, 4096, 8, 1, 128, 0},
    {"backward, D 64, 3 launches", TESSERA_BACKWARD, 1, 128, 128, 1, 1, 64, 0},
    {"backward, D 128, causal, 3 launches", TESSERA_BACKWARD, 1, 128, 128, 1, 1, 128, 1},
    {"backward, D 256, causal, 3 launches", TESSERA_BACKWARD, 1, 128, 128, 1, 1, 256, 1},
    // Of other configs.
    {"not prebuilt: forward, D 80, 256 heads", TESSERA_FORWARD, 1, 128, 128, 256, 256, 80, 0},
    {"not prebuilt: forward, D 64, float32", TESSERA_FORWARD, 1, 128, 128, 64, 64, 64, 0, TESSERA_FLOAT32},
    {"not prebuilt: forward, D 128, softcap", TESSERA_FORWARD, 1, 128, 128, 64, 64, 128, 1, TESSERA_BFLOAT16, 30.0},
    {"not prebuilt: forward, D 64, dropout", TESSERA_FORWARD, 1, 128, 128, 64, 64, 64, 0, TESSERA_BFLOAT16, 0, 0.1},
    {"not prebuilt: forward, D 160, softcap", TESSERA_FORWARD, 1, 128, 128, 64, 64, 160, 0, TESSERA_BFLOAT16, 30.0},
    {"not prebuilt: backward, D 64, dropout", TESSERA_BACKWARD, 1, 128, 128, 1, 1, 64, 0, TESSERA_BFLOAT16, 0, 0.1},
    {"not prebuilt: backward, D 80", TESSERA_BACKWARD, 1, 128, 128, 1, 1, 80, 0},
};

// A planned call with its memory: two sets of tensors.
class Planned {
 public:
  explicit Planned(const Case& c) {
    tessera_problem problem;
    tessera_problem_init(&problem);
    problem.direction = c.direction;
    problem.q = layout(c.dtype, {c.batch, c.seqlen_q, c.heads, c.head_dim});
    problem.k = problem.v = layout(c.dtype, {c.batch, c.seqlen_k, c.heads_kv, c.head_dim});
    problem.o = problem.q;
    problem.lse = layout(TESSERA_FLOAT32, {c.batch, c.heads, c.seqlen_q});
    problem.causal = c.causal;
    problem.softcap = c.softcap;
    problem.dropout_p = c.dropout_p;
    if (c.direction == TESSERA_BACKWARD) {
      problem.d_o = problem.d_q = problem.q;
      problem.d_k = problem.d_v = problem.k;
    }
    for (tessera_buffers& buffers : buffers_) {
      for (const tessera::core::TensorField& field : tessera::core::kTensorFields) {
        const tessera_layout& tensor = problem.*field.layout;
        if (tensor.rank != 0) field.set_pointer(buffers, allocate(bytes_of(tensor)));
      }
    }
    tessera_device device;
    check(tessera_device_cuda(0, &device));
    const auto start = Clock::now();
    check(tessera_make_plan(&problem, &device, &plan_));
    plan_us_ = 1e3 * milliseconds_since(start);
    workspace_bytes_ = tessera_workspace_bytes(&plan_);
    workspace_ = allocate(std::max<size_t>(workspace_bytes_, 1));
    executor_.stream = stream_;
    run_ = c.direction == TESSERA_FORWARD ? tessera_forward : tessera_backward;
  }

  void launch() {
    check(run_(&plan_, &buffers_[turn_], workspace_, workspace_bytes_, &executor_));
    turn_ = in_turn_ ? 1 - turn_ : 0;
  }
  // From now on each launch has different tensors, like consecutive layers of a model.
  void take_tensors_in_turn() { in_turn_ = true; }
  void wait() { synchronize(stream_); }
  double plan_us() const { return plan_us_; }
  const char* kernel() const { return tessera_kernel_name(plan_.kernel); }
  const char* device() const { return plan_.device.name; }

 private:
  void* stream_ = stream_of_gpu_0();
  tessera_buffers buffers_[2] = {};
  int turn_ = 0;
  bool in_turn_ = false;
  tessera_plan plan_;
  double plan_us_ = 0;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  tessera_executor executor_{};
  decltype(&tessera_forward) run_ = nullptr;
};

// The driver's own time: a kernel that does nothing, with about as many bytes of parameters as Tessera's.
class Empty {
 public:
  Empty() {
    constexpr const char* kPtx =
        ".version 7.0\n.target sm_80\n.address_size 64\n"
        ".visible .entry empty(.param .align 64 .b8 p[1024]) { ret; }\n";
    void* module = nullptr;
    driver("cuModuleLoadData", &module, static_cast<const void*>(kPtx));
    driver("cuModuleGetFunction", &function_, module, "empty");
  }
  void launch() {
    void* parameters[] = {parameters_};
    if (launch_(function_, 1, 1, 1, 128, 1, 1, 0, stream_, parameters, nullptr) != 0) {
      throw std::runtime_error("cuLaunchKernel: refused");
    }
  }
  void wait() { synchronize(stream_); }

 private:
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                         void**);
  Launch launch_ = reinterpret_cast<Launch>(driver_function("cuLaunchKernel"));
  void* stream_ = stream_of_gpu_0();
  void* function_ = nullptr;
  alignas(64) char parameters_[1024] = {};
};

// ---- what is measured -----------------------------------------------------------------------------------------------

struct Answer {  // of a child
  double first_ms = 0, plan_us = 0;
};

// The first call, from its start to its result. The driver, the context and the memory exist before.
Answer first_call(const Case& c) {
  Planned planned(c);
  const auto start = Clock::now();
  planned.launch();
  planned.wait();
  return {milliseconds_since(start), planned.plan_us()};
}

// Host time of a case's first calls, each alone, microseconds. The GPU is otherwise idle; waiting for it is not
// counted.
std::vector<double> first_calls_us(Planned& planned) {
  constexpr int kCalls = 200;  // past the call that makes a graph
  std::vector<double> calls;
  for (int i = 0; i < kCalls; ++i) {
    const auto start = Clock::now();
    planned.launch();
    calls.push_back(1e3 * milliseconds_since(start));
    planned.wait();
  }
  return calls;
}

// The slowest call from the second on.
struct Slowest {
  size_t call = 0;      // the first is 1
  double above_us = 0;  // the median of the last hundred
};
Slowest slowest_of(const std::vector<double>& calls) {
  std::vector<double> last(calls.end() - 100, calls.end());
  std::ranges::nth_element(last, last.begin() + 50);
  const auto at = std::ranges::max_element(calls.begin() + 1, calls.end());
  return {static_cast<size_t>(at - calls.begin()) + 1, *at - last[50]};
}

// Microseconds of host time a launch: the median of the chunks. Waiting for the GPU between chunks, so that the queue
// never fills, is not counted.
template <class Call>
double launch_us(Call& planned) {
  constexpr int kChunks = 200, kLaunches = 50;  // after the first calls, so that a graph is made
  for (int i = 0; i < kLaunches; ++i) planned.launch();
  planned.wait();
  std::vector<double> chunks;
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const auto start = Clock::now();
    for (int i = 0; i < kLaunches; ++i) planned.launch();
    chunks.push_back(1e3 * milliseconds_since(start) / kLaunches);
    planned.wait();
  }
  std::ranges::nth_element(chunks, chunks.begin() + kChunks / 2);
  return chunks[kChunks / 2];
}

// This program again, for one first call with a cache folder of its own.
Answer first_call_in_new_process(const char* program, size_t number, const std::filesystem::path& cache) {
  setenv("TESSERA_CACHE_DIR", cache.c_str(), 1);
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe: refused");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork: refused");
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    execl(program, program, "--first-call", std::to_string(number).c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  close(ends[1]);
  std::string text;
  char buffer[256];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(got));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  Answer answer;
  if (status != 0 || std::sscanf(text.c_str(), "%lf %lf", &answer.first_ms, &answer.plan_us) != 2) {
    throw std::runtime_error(std::string(kCases[number].name) + ": its first call failed in a process of its own");
  }
  return answer;
}

struct Row {
  const Case* of;
  std::string kernel;
  Answer compiled, cached;
  std::vector<double> calls_us;
  double launch_us = 0, launch_in_turn_us = 0;
};

void write_json(const char* path, const std::string& device, double empty_us, const std::vector<Row>& rows) {
  FILE* const file = std::fopen(path, "w");
  if (!file) throw std::runtime_error(std::string("--json: cannot write ") + path);
  std::fprintf(file, "{\"device\": \"%s\", \"version\": \"%s\", \"empty_launch_median_us\": %.3f, \"rows\": [",
               device.c_str(), tessera_version(), empty_us);
  for (const Row& row : rows) {
    std::fprintf(file,
                 "%s\n {\"name\": \"%s\", \"kernel\": \"%s\", \"first_call_ms\": %.3f, \"first_cached_call_ms\": %.3f, "
                 "\"plan_us\": %.3f, \"launch_us\": %.3f, \"launch_other_tensors_us\": %.3f, \"calls_us\": [",
                 &row == rows.data() ? "" : ",", row.of->name, row.kernel.c_str(), row.compiled.first_ms,
                 row.cached.first_ms, row.cached.plan_us, row.launch_us, row.launch_in_turn_us);
    for (const double& us : row.calls_us) std::fprintf(file, "%s%.2f", &us == row.calls_us.data() ? "" : ", ", us);
    std::fprintf(file, "]}");
  }
  std::fprintf(file, "\n]}\n");
  std::fclose(file);
}

// Removed with all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-launch-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("cannot make a folder in " + name);
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

int measure(const char* program, const char* json_path) {
  const TemporaryFolder cache;
  // The driver's own cache of compiled code must not serve the first call.
  setenv("CUDA_CACHE_DISABLE", "1", 1);
  std::vector<Row> rows;
  std::string device;
  std::printf("%-54s %-10s %14s %16s %9s %17s\n", "one call, host time", "kernel", "first call ms", "from the disk ms",
              "plan us", "launch us, others");
  for (size_t number = 0; number < std::size(kCases); ++number) {
    const std::filesystem::path folder = cache.path() / std::to_string(number);
    Row row{.of = &kCases[number], .kernel = {}, .compiled = {}, .cached = {}, .calls_us = {}};
    row.compiled = first_call_in_new_process(program, number, folder);
    row.cached = first_call_in_new_process(program, number, folder);
    rows.push_back(row);
  }
  // Launches come last: a context of this process would disturb the children.
  setenv("TESSERA_CACHE_DIR", (cache.path() / "launches").c_str(), 1);
  for (Row& row : rows) {
    Planned planned(*row.of);
    device = planned.device();
    row.kernel = planned.kernel();
    row.calls_us = first_calls_us(planned);
    row.launch_us = launch_us(planned);
    planned.take_tensors_in_turn();
    row.launch_in_turn_us = launch_us(planned);
    std::printf("%-54s %-10s %14.1f %16.2f %9.2f %8.2f %8.2f\n", row.of->name, row.kernel.c_str(),
                row.compiled.first_ms, row.cached.first_ms, row.cached.plan_us, row.launch_us, row.launch_in_turn_us);
    std::fflush(stdout);
  }
  std::printf("\n%-54s %-66s %s\n", "host time of call, us", "1 .. 10",
              "slowest from 2 on: call, us above a later one");
  double most_above_us = 0;
  for (const Row& row : rows) {
    std::printf("%-54s", row.of->name);
    for (size_t i = 0; i < 10; ++i) std::printf(i == 0 ? " %8.0f" : " %6.1f", row.calls_us[i]);
    const Slowest slowest = slowest_of(row.calls_us);
    most_above_us = std::max(most_above_us, slowest.above_us);
    std::printf("   %4zu %8.1f\n", slowest.call, slowest.above_us);
  }
  std::printf("at most %.1f us above a later call (aim 300)\n\n", most_above_us);
  Empty empty;
  const double empty_us = launch_us(empty);
  const auto most = [&rows](auto value) {
    double found = 0;
    for (const Row& row : rows) found = std::max(found, value(row));
    return found;
  };
  std::printf("at most: first call %.0f ms (aim 1000), from the disk %.2f ms (aim 5), launch %.2f us (aim 5), ",
              most([](const Row& row) { return row.compiled.first_ms; }),
              most([](const Row& row) { return row.cached.first_ms; }),
              most([](const Row& row) { return row.launch_us; }));
  std::printf("other tensors each time %.2f us\n", most([](const Row& row) { return row.launch_in_turn_us; }));
  std::printf("a launch of nothing, by the driver: %.2f us, median\n", empty_us);
  std::printf("%s, Tessera %s\n", device.c_str(), tessera_version());
  if (json_path) write_json(json_path, device, empty_us, rows);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 3 && std::strcmp(argv[1], "--first-call") == 0) {
      const Answer answer = first_call(kCases[std::stoul(argv[2])]);
      std::printf("%.6f %.6f\n", answer.first_ms, answer.plan_us);
      return 0;
    }
    if (argc == 1) return measure("/proc/self/exe", nullptr);
    if (argc == 3 && std::strcmp(argv[1], "--json") == 0) return measure("/proc/self/exe", argv[2]);
    std::fprintf(stderr, "usage: %s [--json FILE]\n", argv[0]);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera_bench_launch: %s\n", error.what());
    return 1;
  }
}
