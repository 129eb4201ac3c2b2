// stages OUT.csv SECONDS CELLS SUBJECTS: a build of the library (LD_LIBRARY_PATH says which), cycles a stage of 32 keys x 32 queries.
// CELLS: "fwd:64:2048:1[:OPTION[:QUERIES]],...", SUBJECTS: "main" and "main+huge", whose workspace lies in huge pages.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "gate.hpp"
#include "tessera/tessera.hpp"
using std::string;
static std::vector<string> split(const string& s, char c) {
  std::vector<string> v;
  std::stringstream in(s);
  string x;
  while (std::getline(in, x, c))
    if (!x.empty()) v.push_back(x);
  return v;
}
static char* memory(int64_t bytes, bool huge) {
  char* p = (char*)mmap(nullptr, bytes + (4 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  p = (char*)(((uintptr_t)p + (2 << 20) - 1) & ~uintptr_t((2 << 20) - 1));
  madvise(p, bytes + (1 << 20), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  memset(p, 0, bytes + 4096);
  return p;
}
struct Subject {
  string name;
  std::vector<std::pair<string, string>> env;
  bool huge = false;
  tessera_plan plan;
  char* ws = nullptr;
  size_t bytes = 0;
  Gate::Result r;
  double hz = 0, diff = 0;
  void enter() {
    for (auto& [k, v] : env) setenv(k.c_str(), v.c_str(), 1);
  }
  void leave() {
    for (auto& [k, v] : env) unsetenv(k.c_str());
  }
};
static Gate* gate;
int main(int argc, char** argv) {
  if (argc < 5) return 2;
  FILE* out = fopen(argv[1], "w");
  const double seconds = atof(argv[2]);
  const bool emulated = getenv("TESSERA_AMX") != nullptr;
  Gate g;
  gate = &g;
  g.amx = !emulated && ask_for_amx();
  g.configure();
  for (int i = 0; i < 400 && !g.good(); ++i)
    if (i % 20 == 19) g.at = (g.at + 1) % g.cpus.size(), g.bind(), g.configure();
  fprintf(out,
          "direction,head_dim,queries,keys,causal,option,heads,subject,best_cycles_a_stage,median_cycles_a_stage,"
          "median_gflops,"
          "share_of_products,good,samples,difference\n");
  for (const string& cell : split(argv[3], ',')) {
    const auto f = split(cell, ':');
    const bool back = f[0] == "bwd", f32 = f[0] == "fwd32";
    const tessera_dtype dt = f32 ? TESSERA_FLOAT32 : TESSERA_BFLOAT16;
    const int64_t D = atoll(f[1].c_str()), N = atoll(f[2].c_str());
    const int causal = atoi(f[3].c_str());
    const string option = f.size() > 4 ? f[4] : "none";
    const int64_t H = f32                                     ? 8
                      : option != "none" && option != "nolse" ? 2
                      : N <= 512                              ? 4
                                                              : 1,
                  Sq = f.size() > 5 ? atoll(f[5].c_str()) : N;
    tessera::Problem p;
    p.k = p.v = tessera::layout(static_cast<tessera::DType>(dt), {1, N, H, D}),
    p.q = p.o = tessera::layout(static_cast<tessera::DType>(dt), {1, Sq, H, D});
    if (option != "nolse") p.lse = tessera::lse_layout(p);
    p.causal = causal;
    if (option == "bias") p.bias = tessera::layout(tessera::bfloat16, {1, H, Sq, N});
    if (option == "dropout") p.dropout_p = 0.1;
    const int64_t n = N * H * D, nq = Sq * H * D;
    std::vector<char*> owned;
    int seed = 1;
    auto numbers_of = [&](int64_t count) {
      if (f32) {
        float* x = (float*)memory(count * 4, true);
        owned.push_back((char*)x);
        std::mt19937 g(seed++);
        std::normal_distribution<float> d;
        for (int64_t i = 0; i < count; ++i) x[i] = i < (1 << 19) ? d(g) : x[i - (1 << 19) + 7];
        return (char*)x;
      }
      char* x = memory(count * 2, true);
      owned.push_back(x);
      std::mt19937 g(seed++);
      std::normal_distribution<float> d;
      const int64_t period = std::min<int64_t>(count, (1 << 19) + 7);
      for (int64_t i = 0; i < period; ++i) {
        float v = d(g);
        uint32_t u;
        memcpy(&u, &v, 4);
        ((uint16_t*)x)[i] = (u + 0x8000) >> 16;
      }
      for (int64_t i = period; i < count; i += period) memcpy(x + 2 * i, x, 2 * std::min(period, count - i));
      return x;
    };
    tessera::Buffers b;
    b.q = numbers_of(n), b.k = numbers_of(n), b.v = numbers_of(n);
    b.o = numbers_of(n);
    b.lse = (float*)numbers_of(2 * N * H);
    if (p.bias.rank) b.bias = numbers_of(H * Sq * N);
    tessera::Problem g;
    if (back) {
      g = tessera::gradient_of(p);
      b.d_o = numbers_of(n), b.d_q = numbers_of(n), b.d_k = numbers_of(n), b.d_v = numbers_of(n);
    }
    const tessera_buffers cb = b;
    std::vector<Subject> subjects;
    std::vector<float> first;
    for (const string& s : split(argv[4], ' ')) {
      Subject x;
      x.name = s;
      string rest = s;
      if (auto at = rest.find("+huge"); at != string::npos) x.huge = true, rest = rest.substr(0, at);
      auto parts = split(rest, '@');
      for (size_t i = 1; i < parts.size(); ++i) {
        auto kv = split(parts[i], '=');
        x.env.push_back({kv[0], kv[1]});
      }
      subjects.push_back(x);
    }
    bool have_o = false;
    for (Subject& x : subjects) {
      x.enter();
      tessera_device d;
      if (tessera_device_cpu(&d).code) return 3;
      d.threads = d.cores = 1;
      if (emulated) d.isa = TESSERA_ISA_AMX_BF16;
      if (back && !have_o) {
        const tessera_problem fp = p;
        tessera_plan plan;
        if (tessera_make_plan(&fp, &d, &plan).code) return 4;
        char* ws = memory(tessera_workspace_bytes(&plan), false);
        tessera_forward(&plan, &cb, ws, tessera_workspace_bytes(&plan), nullptr);
        have_o = true;
      }
      const tessera_problem cp = back ? tessera_problem(g) : tessera_problem(p);
      auto st = tessera_make_plan(&cp, &d, &x.plan);
      if (st.code) {
        printf("%s\n", st.message);
        return 4;
      }
      x.bytes = tessera_workspace_bytes(&x.plan);
      x.ws = memory(x.bytes, x.huge);
      st = (back ? tessera_backward : tessera_forward)(&x.plan, &cb, x.ws, x.bytes, nullptr);
      if (st.code) {
        printf("%s\n", st.message);
        return 5;
      }
      const uint16_t* o = (const uint16_t*)(back ? b.d_q : b.o);
      double num = 0, den = 0;
      std::vector<float> mine(nq);
      for (int64_t i = 0; i < nq; ++i) {
        uint32_t u = f32 ? ((const uint32_t*)o)[i] : uint32_t(o[i]) << 16;
        memcpy(&mine[i], &u, 4);
      }
      if (first.empty()) first = mine;
      for (int64_t i = 0; i < nq; ++i) num += std::pow(mine[i] - first[i], 2), den += std::pow(first[i], 2);
      x.diff = std::sqrt(num / den);
      x.leave();
    }
    const double pairs = causal ? N * (N + 1) / 2.0 - double(N - Sq) * (N - Sq + 1) / 2.0 : double(Sq) * N,
                 flops = (back ? 10.0 : 4.0) * H * D * pairs, stages = H * pairs / 1024;
    printf("%-22s", cell.c_str());
    for (int round = 0; round < 2; ++round)
      for (Subject& x : subjects) {
        x.enter();
        const auto r = gate->measure(
            stages,
            [&] {
              (back ? tessera_backward : tessera_forward)(&x.plan, &cb, x.ws, x.bytes, nullptr);
              gate->configure();
            },
            7, seconds);
        x.leave();
        if (round == 0 || r.good > x.r.good || (r.good && r.median < x.r.median)) x.r = r, x.hz = gate->ghz;
      }
    for (Subject& x : subjects) {
      // Products alone: 16 cycles for 16 x 16 x 32, of which the backward pass has two and a half times as many.
      const double gflops = flops / (x.r.median * stages / x.hz), products = D / 32.0 * 8 * 16 * (back ? 2.5 : 1);
      fprintf(out, "%s,%ld,%ld,%ld,%d,%s,%ld,%s,%.1f,%.1f,%.1f,%.3f,%d,%d,%.3g\n", f[0].c_str(), D, Sq, N, causal,
              option.c_str(), H, x.name.c_str(), x.r.best, x.r.median, gflops, products / x.r.median, x.r.good, x.r.all,
              x.diff);
      printf(" %s %.0f (%d)", x.name.c_str(), x.r.median, x.r.good);
      munmap(x.ws, x.bytes);
    }
    puts("");
    fflush(stdout);
    fflush(out);
    for (char* x : owned) munmap(x, 1);
  }
  gate->report();
}
