// decode_batch: the decoding kernel's variants against a loop that reads the same bytes. CSV to stdout.
#include <dlfcn.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tessera/tessera.hpp"
using Clock = std::chrono::steady_clock;
static double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }
struct Team {  // threads that sleep between regions
  explicit Team(int n) : n_(n) {
    for (int i = 1; i < n; ++i) t_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    stop_ = true;
    go_.fetch_add(1);
    go_.notify_all();
    for (auto& t : t_) t.join();
  }
  template <class F>
  void run(F f) {
    f_ = f;
    left_ = n_ - 1;
    go_.fetch_add(1);
    go_.notify_all();
    f(0);
    while (left_.load()) _mm_pause();
  }
  void serve(int i) {
    int seen = 0;
    while (true) {
      go_.wait(seen);
      seen = go_.load();
      if (stop_) return;
      f_(i);
      left_.fetch_sub(1);
    }
  }
  int n_;
  std::vector<std::thread> t_;
  std::atomic<int> go_{0}, left_{0};
  std::atomic<bool> stop_{false};
  std::function<void(int)> f_;
};
__attribute__((target("avx512f"))) static float reads(const char* p, int64_t bytes) {
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    a = _mm512_add_ps(a, _mm512_loadu_ps(p + i));
    b = _mm512_add_ps(b, _mm512_loadu_ps(p + i + 64));
    c = _mm512_add_ps(c, _mm512_loadu_ps(p + i + 128));
    d = _mm512_add_ps(d, _mm512_loadu_ps(p + i + 192));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
}
static volatile float sink_;
static char* big(int64_t bytes, bool huge) {
  char* p = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (huge) madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}
static void fill(char* p, int64_t bytes) {
  std::mt19937 g(7);
  std::normal_distribution<float> nd;
  const int64_t chunk = std::min<int64_t>(bytes, 8 << 20);
  for (int64_t i = 0; i < chunk / 2; ++i) {
    float x = nd(g);
    uint32_t u;
    memcpy(&u, &x, 4);
    ((uint16_t*)p)[i] = (u + 0x8000) >> 16;
  }
  for (int64_t at = chunk; at < bytes; at += chunk) memcpy(p + at, p, std::min(chunk, bytes - at));
}
struct Lib {
  decltype(&tessera_device_cpu) device;
  decltype(&tessera_make_plan) plan;
  decltype(&tessera_workspace_bytes) ws;
  decltype(&tessera_forward) forward;
};
static Lib open_lib(const char* path) {
  void* h = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (!h) {
    fprintf(stderr, "%s\n", dlerror());
    exit(3);
  }
  Lib l;
  l.device = (decltype(l.device))dlsym(h, "tessera_device_cpu");
  l.plan = (decltype(l.plan))dlsym(h, "tessera_make_plan");
  l.ws = (decltype(l.ws))dlsym(h, "tessera_workspace_bytes");
  l.forward = (decltype(l.forward))dlsym(h, "tessera_forward");
  return l;
}
int main(int argc, char** argv) {
  // batch sk hq hkv D threads reps repeats name=lib ... ("vec:name=lib": without AMX)
  const int64_t B = atoll(argv[1]), sk = atoll(argv[2]), hq = atoll(argv[3]), hkv = atoll(argv[4]), D = atoll(argv[5]);
  const int threads = atoi(argv[6]), reps = atoi(argv[7]), repeats = atoi(argv[8]);
  const int64_t bytes = B * sk * hkv * D * 2;
  char *k = big(bytes, false), *v = big(bytes, false), *q = big(B * hq * D * 2 + 4096, false),
       *o = big(B * hq * D * 2 + 4096, false);
  fill(k, bytes), fill(v, bytes), fill(q, B * hq * D * 2);
  Team team(threads);
  auto read_all = [&] {
    team.run([&](int i) {
      const int64_t part = bytes / threads;
      for (int r = 0; r < repeats; ++r) sink_ = reads(k + i * part, part) + reads(v + i * part, part);
    });
  };
  struct Ready {
    std::string name;
    Lib lib;
    tessera_plan plan{};
    std::vector<char> ws;
    std::vector<double> t, ratio;
  };
  std::vector<Ready> ready;
  for (int a = 9; a < argc; ++a) {
    std::string x = argv[a];
    const auto e = x.find('=');
    Ready r;
    r.name = x.substr(0, e);
    r.lib = open_lib(("./" + x.substr(e + 1)).c_str());
    tessera_device device;
    if (r.lib.device(&device).code) return 3;
    device.threads = threads;
    if (r.name.rfind("vec", 0) == 0) {
      device.isa = device.vector_isa ? device.vector_isa : device.isa;
      device.vector_isa = 0;
    }
    tessera::Problem p;
    p.q = tessera::layout(tessera::bfloat16, {B, 1, hq, D});
    p.k = p.v = tessera::layout(tessera::bfloat16, {B, sk, hkv, D});
    p.o = p.q;
    const tessera_problem cp = p;
    auto st = r.lib.plan(&cp, &device, &r.plan);
    if (st.code) {
      fprintf(stderr, "%s\n", st.message);
      return 3;
    }
    r.ws.resize(r.lib.ws(&r.plan) + 64);
    ready.push_back(std::move(r));
  }
  std::vector<double> loop;
  std::vector<std::vector<uint16_t>> out;
  for (int rep = -1; rep < reps; ++rep) {
    for (size_t i = 0; i < ready.size(); ++i) {
      double t0 = now();
      read_all();
      const double lt = (now() - t0) / repeats;
      tessera::Buffers b;
      b.q = q, b.k = k, b.v = v, b.o = o;
      const tessera_buffers cb = b;
      t0 = now();
      for (int r = 0; r < repeats; ++r)
        ready[i].lib.forward(&ready[i].plan, &cb, ready[i].ws.data(), ready[i].ws.size(), nullptr);
      const double t = (now() - t0) / repeats;
      if (rep < 0) {
        out.emplace_back((uint16_t*)o, (uint16_t*)o + B * hq * D);
        continue;
      }
      loop.push_back(lt);
      ready[i].t.push_back(t);
      ready[i].ratio.push_back(lt / t);
    }
  }
  auto med = [](std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  };
  auto best = [](const std::vector<double>& x) { return *std::min_element(x.begin(), x.end()); };
  const double gb = 2.0 * bytes * 1e-9, lb = best(loop), lm = med(loop);
  auto fl = [](uint16_t h) {
    uint32_t u = uint32_t(h) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  };
  for (size_t i = 0; i < ready.size(); ++i) {
    double worst = 0;
    for (size_t n = 0; n < out[0].size(); ++n) {
      double e = std::abs(fl(out[i][n]) - fl(out[0][n]));
      if (!(e <= worst)) worst = e;
    }
    printf("%ld,%ld,%ld,%ld,%ld,%d,%s,%d,%.2f,%.2f,%.2f,%.2f,%.3f,%.3f,%.3g\n", (long)B, (long)sk, (long)hq, (long)hkv,
           (long)D, threads, ready[i].name.c_str(), ready[i].plan.device.isa, gb / best(ready[i].t),
           gb / med(ready[i].t), gb / lb, gb / lm, lb / best(ready[i].t), med(ready[i].ratio), worst);
  }
}
