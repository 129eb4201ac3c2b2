#include "peers/ceilings.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "peers/loops.hpp"
#include "peers/team.hpp"

namespace tessera::peers {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 12;
constexpr double kRoundSeconds = 0.005;
constexpr int kTrials = 3;

// Best rate, in units a second, of work(worker, repeats) that does `units` a repeat on each thread.
template <typename Work>
double best_rate(Team& team, double units, const Work& work) {
  const auto seconds_of = [](const auto& call) {
    const auto start = Clock::now();
    call();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  // The repeats that fill a round, from the shortest of some calls on this thread alone. A call that waited for other
  // threads or a busy core would give too few.
  const auto least_seconds_of = [&](std::int64_t repeats) {
    double least = std::numeric_limits<double>::infinity();
    for (int trial = 0; trial < kTrials; ++trial) least = std::min(least, seconds_of([&] { work(0, repeats); }));
    return least;
  };
  std::int64_t repeats = 1;
  while (least_seconds_of(repeats) < kRoundSeconds / 2) repeats *= 2;
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double seconds = seconds_of([&] { team.run([&](int worker) { work(worker, repeats); }); });
    best = std::max(best, units * static_cast<double>(repeats) * team.size() / seconds);
  }
  return best;
}

// Keeps a result alive without storing it anywhere.
void keep(float value) { asm volatile("" : : "g"(value)); }

}  // namespace

double fma_gflops(tessera_isa isa, int threads) {
  const Loops* loops = loops_for(isa);
  if (loops == nullptr) return 0;
  Team team(threads);
  constexpr std::int64_t kChunk = 1000;  // iterations a repeat
  return best_rate(team, loops->fma_flops_per_iteration * kChunk,
                   [&](int, std::int64_t repeats) { keep(loops->fma(kChunk * repeats)); }) *
         1e-9;
}

double bf16_dot_gflops(int threads) {
  const Loops* loops = loops_for(TESSERA_ISA_AVX512_BF16);
  if (loops == nullptr) return 0;
  Team team(threads);
  constexpr std::int64_t kChunk = 1000;
  return best_rate(team, loops->bf16_dot_flops_per_iteration * kChunk,
                   [&](int, std::int64_t repeats) { keep(loops->bf16_dot(kChunk * repeats)); }) *
         1e-9;
}

double amx_gflops(int threads, bool zeros) {
  tessera_device device{};  // requests AMX from the kernel, if there is any
  if (tessera_device_cpu(&device).code != TESSERA_OK || device.isa_limit < TESSERA_ISA_AMX_BF16) return 0;
  Team team(threads);
  constexpr std::int64_t kChunk = 100;
  return best_rate(team, kAmxFlopsPerIteration * kChunk,
                   [&](int, std::int64_t repeats) { amx_products(kChunk * repeats, zeros); }) *
         1e-9;
}

double peak_gflops(tessera_dtype dtype, tessera_isa isa, int threads) {
  if (dtype == TESSERA_BFLOAT16 && isa == TESSERA_ISA_AMX_BF16) return amx_gflops(threads, true);
  if (dtype == TESSERA_BFLOAT16 && isa == TESSERA_ISA_AVX512_BF16) return bf16_dot_gflops(threads);
  return fma_gflops(isa, threads);
}

double read_gbps(std::int64_t bytes_per_thread, int threads) {
  constexpr std::int64_t kGranule = 512;  // elements: what the loop reads at a time, on every instruction set
  const Loops& loops = best_loops();
  Team team(threads);
  const std::int64_t elems =
      std::max<std::int64_t>(1, bytes_per_thread / static_cast<std::int64_t>(sizeof(float)) / kGranule) * kGranule;
  struct Free {
    void operator()(float* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  std::vector<std::unique_ptr<float[], Free>> data(static_cast<std::size_t>(team.size()));
  for (auto& part : data) {
    part.reset(
        static_cast<float*>(::operator new[](static_cast<std::size_t>(elems) * sizeof(float), std::align_val_t{64})));
  }
  team.run([&](int worker) {  // each thread touches its own pages first
    std::fill_n(data[static_cast<std::size_t>(worker)].get(), elems, 1.0F);
  });
  return best_rate(team, static_cast<double>(elems) * sizeof(float),
                   [&](int worker, std::int64_t repeats) {
                     const float* mine = data[static_cast<std::size_t>(worker)].get();
                     for (std::int64_t r = 0; r < repeats; ++r) keep(loops.read(mine, elems));
                   }) *
         1e-9;
}

}  // namespace tessera::peers
