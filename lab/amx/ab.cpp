// Several builds of the library in one process, called in turn: extern "C" for a driver in Python.
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "peers/ceilings.hpp"
#include "peers/loops.hpp"
#include "tessera/tessera.hpp"
struct Lib {
  decltype(&tessera_device_cpu) device;
  decltype(&tessera_make_plan) plan;
  decltype(&tessera_workspace_bytes) ws;
  decltype(&tessera_forward) forward;
  decltype(&tessera_backward) backward;
};
struct Case {
  tessera::Problem fwd, bwd;
  tessera_buffers b;
  bool backward;
  int threads;
  std::vector<void*> owned;
};
struct Bound {
  Lib* lib;
  tessera_plan plan;
  tessera_buffers b;
  char* ws = nullptr;
  size_t bytes = 0;
  bool backward = false;
};
static std::map<std::string, Lib*> libs;
static Lib* lib_of(const char* path) {
  if (auto it = libs.find(path); it != libs.end()) return it->second;
  void* h = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (!h) {
    fprintf(stderr, "%s\n", dlerror());
    return nullptr;
  }
  auto* l = new Lib;
#define GET(member, name)                                             \
  l->member = reinterpret_cast<decltype(l->member)>(dlsym(h, #name)); \
  if (!l->member) {                                                   \
    fprintf(stderr, "no " #name "\n");                                \
    return nullptr;                                                   \
  }
  GET(device, tessera_device_cpu)
  GET(plan, tessera_make_plan)
  GET(ws, tessera_workspace_bytes) GET(forward, tessera_forward) GET(backward, tessera_backward) return libs[path] = l;
}
static char* memory(Case& c, int64_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 4096, bytes + 4096)) abort();
  memset(p, 0, bytes + 4096);
  c.owned.push_back(p);
  return (char*)p;
}
// Normal; with AB_OUTLIERS in the environment one in a thousand has ten times such a number added.
static void* numbers(Case& c, const tessera_layout& l, int seed, float times = 1) {
  static const bool outliers = getenv("AB_OUTLIERS") != nullptr;
  int64_t n = 1;
  for (int i = 0; i < l.rank; ++i) n *= l.shape[i];
  const int64_t bytes = tessera_dtype_bytes(l.dtype);
  char* p = memory(c, n * bytes);
  std::mt19937 g(seed);
  std::normal_distribution<float> nd;
  const int64_t period = std::min<int64_t>(n, (1 << 20) + 7);
  for (int64_t i = 0; i < period; ++i) {
    float x = nd(g) * times;
    if (outliers && g() % 1000 == 0) x += 10 * nd(g) * times;
    if (bytes == 4)
      ((float*)p)[i] = x;
    else {
      uint32_t u;
      memcpy(&u, &x, 4);
      ((uint16_t*)p)[i] = (u + 0x8000) >> 16;
    }
  }
  for (int64_t i = period; i < n; i += period) memcpy(p + i * bytes, p, std::min(period, n - i) * bytes);
  return p;
}
extern "C" {
Case* ab_case(int backward, int dtype, int64_t B, int64_t Sq, int64_t Sk, int64_t Hq, int64_t Hkv, int64_t D,
              int causal, int64_t window, const char* option, int threads, int heads_first) {
  auto* c = new Case;
  c->backward = backward;
  c->threads = threads;
  tessera::Problem& p = c->fwd;
  const auto t = static_cast<tessera::DType>(dtype);
  auto dense = [&](int64_t S, int64_t H) {
    return heads_first ? tessera::permute(tessera::layout(t, {B, H, S, D}), {0, 2, 1, 3})
                       : tessera::layout(t, {B, S, H, D});
  };
  p.q = dense(Sq, Hq), p.k = dense(Sk, Hkv), p.v = p.k, p.o = p.q;
  std::string o = option;
  const size_t without = o.find("-lse");  // O alone
  if (without == std::string::npos) p.lse = tessera::lse_layout(p);
  o = o.substr(0, without);
  if (o == "bias") p.bias = tessera::layout(t, {1, Hq, Sq, Sk});
  if (o == "bias_f32") p.bias = tessera::layout(tessera::float32, {1, Hq, Sq, Sk});
  if (o == "bias_row") p.bias = tessera::layout(t, {1, Hq, Sq, Sk + 32});
  if (o == "alibi") p.alibi_slopes = tessera::layout(tessera::float32, {Hq});
  if (o == "sink") p.sink = tessera::layout(tessera::float32, {Hq});
  if (o == "softcap") p.softcap = 30;
  if (o == "dropout") p.dropout_p = 0.1;
  p.causal = causal;
  if (window >= 0) p.set_window(window, -1);
  tessera::Buffers cb;
  cb.q = numbers(*c, p.q, 1), cb.k = numbers(*c, p.k, 2), cb.v = numbers(*c, p.v, 3);
  cb.o = numbers(*c, p.o, 4);
  if (p.lse.rank) cb.lse = (float*)numbers(*c, p.lse, 5);
  if (p.bias.rank) cb.bias = numbers(*c, p.bias, 6);
  if (p.alibi_slopes.rank) {
    auto* s = (float*)numbers(*c, p.alibi_slopes, 7);
    for (int64_t h = 0; h < Hq; ++h) s[h] = 1.0f / (2 << (h % 8));
    cb.alibi_slopes = s;
  }
  if (p.sink.rank) cb.sink = (const float*)numbers(*c, p.sink, 8);
  if (backward) {
    c->bwd = tessera::gradient_of(p);
    auto& g = c->bwd;
    if (o == "sink") {
      g.d_sink = g.sink;
      cb.d_sink = (float*)numbers(*c, g.d_sink, 9);
    }
    cb.d_o = numbers(*c, g.d_o, 10);
    cb.d_q = numbers(*c, g.d_q, 11), cb.d_k = numbers(*c, g.d_k, 12), cb.d_v = numbers(*c, g.d_v, 13);
  }
  c->b = cb;
  return c;
}
void ab_free(Case* c) {
  for (void* p : c->owned) free(p);
  delete c;
}
Bound* ab_bind(Case* c, const char* path, const char* isa) {
  Lib* l = lib_of(path);
  if (!l) return nullptr;
  tessera_device d;
  tessera_status st = l->device(&d);
  if (st.code) {
    fprintf(stderr, "%s\n", st.message);
    return nullptr;
  }
  d.threads = c->threads;
  auto* b = new Bound;
  b->lib = l;
  b->b = c->b;
  b->backward = c->backward;
  const tessera_problem fp = c->fwd, bp = c->bwd;
  const auto ready = [&](const tessera_problem& p, bool back) {
    st = l->plan(&p, &d, &b->plan);
    if (st.code) {
      fprintf(stderr, "plan: %s\n", st.message);
      return false;
    }
    b->bytes = l->ws(&b->plan);
    if (posix_memalign((void**)&b->ws, 4096, b->bytes + 64)) return false;
    st = (back ? l->backward : l->forward)(&b->plan, &b->b, b->ws, b->bytes, nullptr);
    if (st.code) {
      fprintf(stderr, "run: %s\n", st.message);
      return false;
    }
    return true;
  };
  if (!ready(fp, false)) return nullptr;
  if (c->backward && (free(b->ws), !ready(bp, true))) return nullptr;
  return b;
}
int ab_isa(Bound* b) { return b->plan.device.isa; }
int ab_run(Bound* b) {
  return (b->backward ? b->lib->backward : b->lib->forward)(&b->plan, &b->b, b->ws, b->bytes, nullptr).code;
}
void ab_unbind(Bound* b) {
  free(b->ws);
  delete b;
}
// Copies a tensor: 0 o, 1 dq, 2 dk, 3 dv, 4 q, 5 k, 6 v, 7 do.
void ab_output(Case* c, int which, void* out, int64_t bytes) {
  const void* p[] = {c->b.o, c->b.d_q, c->b.d_k, c->b.d_v, c->b.q, c->b.k, c->b.v, c->b.d_o};
  memcpy(out, p[which], bytes);
}
double ab_fma(int threads) { return tessera::peers::fma_gflops(TESSERA_ISA_AVX512, threads); }
double ab_amx(int threads, int zeros) { return tessera::peers::amx_gflops(threads, zeros != 0); }
// This thread's products for about a millisecond and a half. Only after ab_amx, which asks for the tiles.
double ab_amx_sample(int zeros) {
  constexpr int64_t kIterations = 25000;
  const auto start = std::chrono::steady_clock::now();
  tessera::peers::amx_products(kIterations, zeros != 0);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return 1e-9 * kIterations * tessera::peers::kAmxFlopsPerIteration / taken.count();
}
}
