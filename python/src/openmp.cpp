// PyTorch computes on OpenMP threads, which spin for some milliseconds after each parallel region: threads of our own
// would share the cores with them. With 2 threads, attention over 512 float32 keys right after a PyTorch operator took
// 3.0 ms on our own threads, longer than on one thread (2.6), and takes 1.5 ms on PyTorch's.
//
// The runtime is the one already loaded by the process, called by the entry point that compilers use.
#include "openmp.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace tessera::python {
namespace {

using GompParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

std::atomic<bool> in_forked_child{false};

struct Team {
  void (*task)(void* argument, int32_t worker);
  void* argument;
  int32_t workers;
  std::atomic<int32_t> next{0};

  // The runtime may provide fewer threads than requested, for instance within another parallel region.
  static void work(void* data) {
    Team& team = *static_cast<Team*>(data);
    for (int32_t worker = team.next++; worker < team.workers; worker = team.next++) team.task(team.argument, worker);
  }
};

void run(void* context, int32_t workers, void (*task)(void* argument, int32_t worker), void* argument) {
  Team team{task, argument, workers};
  reinterpret_cast<GompParallel>(context)(Team::work, &team, static_cast<unsigned>(workers), 0);
}

tessera_executor find_executor() {
  tessera_executor executor{};
  executor.context = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  if (executor.context) {
    executor.run = run;
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
  }
  return executor;
}

}  // namespace

tessera_executor openmp_executor() {
  static const tessera_executor executor = find_executor();
  return in_forked_child ? tessera_executor{} : executor;
}

}  // namespace tessera::python
