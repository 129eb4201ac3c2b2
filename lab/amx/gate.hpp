// Timing on a machine that others use, too: a core's products fall to a quarter of their rate for 10 ms to seconds. A sample counts
// only if products ran at their full rate before and after it; where they do not, another processor is tried. Times are in the
// core's cycles, by a chain of multiplications of three cycles each.
#pragma once
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline double chain_cycle() {  // seconds a cycle
  uint64_t x = 3;
  const double t = now();
  for (int i = 0; i < 30; ++i) {
#define M4 "imul %0,%0\n\timul %0,%0\n\timul %0,%0\n\timul %0,%0\n\t"
    asm volatile(M4 M4 M4 M4 M4 M4 M4 M4 M4 M4 M4 M4 M4 M4 M4 M4 : "+r"(x));
  }
  return (now() - t) / (30 * 64 * 3);
}
struct Gate {
  bool amx = true;
  std::vector<int> cpus;
  size_t at = 0;
  std::vector<std::pair<long, long>> seen;  // good, all; a CPU
  char* data;
  double ghz = 0;
  static constexpr double kGood =
      24;  // cycles of the chain, whose clock may be a fifth above that of products of numbers; a slow product takes 40
  Gate() {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    for (int c = 0; c < 256; ++c)
      if (CPU_ISSET(c, &set)) cpus.push_back(c);
    seen.resize(cpus.size());
    data = (char*)aligned_alloc(4096, 16384);
    std::mt19937 g(3);
    std::normal_distribution<float> d;
    for (int i = 0; i < 8192; ++i) {
      float x = d(g);
      uint32_t u;
      memcpy(&u, &x, 4);
      ((uint16_t*)data)[i] = u >> 16;
    }
    bind();
  }
  void bind() {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[at], &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  void configure() {
    if (!amx) return;
    static const struct {
      uint8_t palette, start, r[14];
      uint16_t cols[16];
      uint8_t rows[16];
    } cfg = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" ::"m"(cfg));
  }
  double products() {  // cycles a product
    if (!amx) return 16;
    const double c0 = chain_cycle();
    const double t = now();
    asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
    for (int i = 0; i < 64; ++i) {
      const char* p = data + i % 4 * 4096;
      asm volatile(
          "tileloadd (%0,%4,1), %%tmm4\n\ttileloadd (%1,%4,1), %%tmm6\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
          "tileloadd (%2,%4,1), %%tmm7\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
          "tileloadd (%3,%4,1), %%tmm5\n\ttdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::"r"(
              p),
          "r"(p + 1024), "r"(p + 2048), "r"(p + 3072), "r"(64L)
          : "memory");
    }
    return (now() - t) / 256 / c0;
  }
  bool good() {
    const bool g = products() <= kGood;
    seen[at].second++;
    seen[at].first += g;
    return g;
  }
  struct Result {
    double best, median;
    int good, all;
  };
  // f's cycles over `units`.
  template <class F>
  Result measure(double units, F f, int want = 15, double limit = 1.0) {
    std::vector<double> good_ones, all;
    const double end = now() + limit;
    int bad = 0;
    configure();
    f();
    while ((int)good_ones.size() < want && now() < end) {
      const bool before = good();
      const double c0 = chain_cycle(), t = now();
      f();
      const double d = now() - t, c1 = chain_cycle();
      const bool after = good();
      const double cycles = d / (0.5 * (c0 + c1)) / units;
      ghz = 1e-9 / c1;
      all.push_back(cycles);
      if (before && after)
        good_ones.push_back(cycles), bad = 0;
      else if (++bad == 40) {
        bad = 0;
        at = (at + 1) % cpus.size();
        bind();
        configure();
        f();
      }
    }
    std::sort(good_ones.begin(), good_ones.end());
    std::sort(all.begin(), all.end());
    if (good_ones.empty()) return {all[0], all[all.size() / 2], 0, (int)all.size()};
    return {good_ones[0], good_ones[good_ones.size() / 2], (int)good_ones.size(), (int)all.size()};
  }
  void report() {
    for (size_t i = 0; i < cpus.size(); ++i)
      printf("# cpu %d: %ld of %ld good\n", cpus[i], seen[i].first, seen[i].second);
    printf("# clock %.2f GHz\n", ghz);
  }
};
inline bool ask_for_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
