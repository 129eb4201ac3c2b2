// prepare_gpu_kernels: compiles every kernel that the case table and a number of the fuzzer's cases need on a GPU of an
// architecture, into the cache and on all cores. Needs no GPU. The tests then run without compiling. After --seconds it
// begins no further case; the tests compile the rest.
#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fuzz/draw.hpp"
#include "op/execute.hpp"

namespace {

using namespace tessera::testing;

struct Failures {
  std::mutex mutex;
  std::set<std::string> messages;

  void add(const Case& c, const char* message) {
    const std::lock_guard lock(mutex);
    if (messages.insert(message).second) std::printf("%s\n  in: %s\n", message, to_text(c).c_str());
  }
};

// Plans like those of the tests: layouts matter (alignment), values do not.
void prepare(const Case& c, const tessera_device& gpu, bool comparison_alone, Failures& failures) {
  if (!served_by_gpu(c, gpu.arch)) return;
  const Call call = make_call(make_inputs(c));
  for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    if (direction == TESSERA_BACKWARD && !c.backward) continue;
    tessera_device device = gpu;
    if (c.cores != Case{}.cores) device.cores = static_cast<int32_t>(c.cores);
    const tessera_problem problem = problem_of(call, direction);
    std::vector<tessera_kernel> kernels;
    if (!comparison_alone) {
      kernels = gpu_kernels(direction);
      kernels.push_back(TESSERA_KERNEL_AUTO);
    }
    for (const ComparisonKernels& pair : kComparisonKernels) {
      kernels.push_back(direction == TESSERA_FORWARD ? pair.forward : pair.backward);
    }
    for (const tessera_kernel kernel : kernels) {
      device.kernel = kernel;
      tessera_plan plan{};
      tessera_status status = tessera_make_plan(&problem, &device, &plan);
      if (status.code == TESSERA_UNSUPPORTED && kernel != TESSERA_KERNEL_AUTO) continue;
      if (status.code == TESSERA_OK) status = tessera_prepare(&plan);
      if (status.code != TESSERA_OK) failures.add(c, status.message);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Compiles the tests' GPU kernels into the cache.", "prepare_gpu_kernels");
  int32_t arch = 0;
  uint64_t seed = 1, seeds = 1, count = 0;
  unsigned threads = std::thread::hardware_concurrency();
  double seconds = std::numeric_limits<double>::infinity();
  bool table = true, comparison = false;
  app.add_option("--arch", arch, "Compute capability, 10 * major + minor; that of the first GPU unless given");
  app.add_flag("--table,!--no-table", table, "The case table");
  app.add_flag("--comparison", comparison, "The kernels that are there for comparison, and no other");
  app.add_option("--seed", seed, "Of the fuzzer's cases: the first of --seeds seeds");
  app.add_option("--seeds", seeds);
  app.add_option("--count", count, "How many of the fuzzer's cases, of each seed");
  app.add_option("--seconds", seconds, "Begin no case after this time; no end unless given");
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (arch == 0 && !gpu_missing().empty()) {
    std::printf("--arch: not given, and %s\n", gpu_missing().c_str());
    return 2;
  }
  const tessera_device device = arch ? imagined_gpu(arch) : gpu_device();

  std::vector<Case> cases;
  if (table) cases = case_table();
  for (uint64_t of = seed; of < seed + seeds; ++of)
    for (uint64_t index = 0; index < count; ++index) cases.push_back(draw_case(of, index));
  Failures failures;
  const auto started = std::chrono::steady_clock::now();
  const auto in_time = [&] {
    return std::chrono::steady_clock::now() - started < std::chrono::duration<double>(seconds);
  };
  std::atomic<size_t> next = 0, prepared = 0;
  std::vector<std::thread> workers;
  for (unsigned n = 0; n < threads; ++n) {
    workers.emplace_back([&] {
      for (size_t index = next++; index < cases.size() && in_time(); index = next++) {
        prepare(cases[index], device, comparison, failures);
        ++prepared;
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  std::printf("kernels of %zu of %zu cases prepared for sm_%d, %zu kinds of failure\n", prepared.load(), cases.size(),
              device.arch, failures.messages.size());
  return failures.messages.empty() ? 0 : 1;
}
