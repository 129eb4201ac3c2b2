// inner_loop real|emulated [PREFIX]: every variant against float64, and its cycles a stage of 32 keys x 32 queries (real).
#include <cmath>
#include <string>

#include "gate.hpp"
namespace tessera::cpu {
struct Pass {
  const char *q, *k, *v;
  char* o;
  float* ring;
  uint32_t* p;
  float *stale_max, *sum;
  uint32_t* out_of_range;
  int64_t tiles, stages;
  float scale_log2;
};
struct Named {
  const char* name;
  void (*run)(const Pass&);
  int q_steps, v_groups, job_stages, exp;
  bool right;
};
extern const Named probe_real[], probe_emulated[];
void probe_pack_real(const uint16_t*, const uint16_t*, const uint16_t*, int64_t, int64_t, int64_t, uint32_t*, char*,
                     char*);
}  // namespace tessera::cpu
using namespace tessera::cpu;
static float f32(uint16_t h) {
  uint32_t u = uint32_t(h) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
template <class T>
static T* mem(int64_t n) {
  char* p = (char*)aligned_alloc(4096, (n * sizeof(T) + 8191) & ~4095LL);
  memset(p, 0, n * sizeof(T));
  return (T*)p;
}
int main(int argc, char** argv) {
  const bool real = argc > 1 && std::string(argv[1]) == "real";
  const std::string only = argc > 2 ? argv[2] : "";
  if (real && !ask_for_amx()) {
    puts("no AMX");
    return 3;
  }
  Gate gate;
  gate.amx = real;
  gate.configure();
  const Named* list = real ? probe_real : probe_emulated;
  for (const Named* n = list; n->name; ++n) {
    if (!only.empty() && std::string(n->name).find(only) != 0) continue;
    const int64_t d = n->q_steps * 32, tiles = real ? 16 : 3, stages = 8, keys = stages * 32, queries = tiles * 32;
    std::mt19937 g(7);
    std::normal_distribution<float> nd;
    auto fill = [&](int64_t c) {
      uint16_t* p = mem<uint16_t>(c);
      for (int64_t i = 0; i < c; ++i) {
        float x = nd(g);
        uint32_t u;
        memcpy(&u, &x, 4);
        p[i] = (u + 0x8000) >> 16;
      }
      return p;
    };
    uint16_t *q = fill(queries * d), *k = fill(keys * d), *v = fill(keys * d);
    // One scratch, as the library has it.
    char* scratch = mem<char>(4 << 20);
    int64_t used = 0;
    auto take = [&](int64_t bytes) {
      char* p = scratch + used;
      used += (bytes + 63) / 64 * 64;
      return p;
    };
    uint32_t* sq = (uint32_t*)take(queries * d * 2);
    char* so = take(queries * d * 4);
    char *sk = take(keys * d * 2), *sv = take(keys * d * 2);
    float* ring = (float*)take(8 * 4096);
    uint32_t* sp = (uint32_t*)take(32 * 2048);
    float *stale = (float*)take(queries * 4), *sum = (float*)take(queries * 4);
    uint32_t* range = (uint32_t*)take(queries * 4);
    probe_pack_real(q, k, v, d, tiles, stages, sq, sk, sv);
    const double scale = 1 / std::sqrt(double(d)) * 1.4426950408889634;
    const bool headroom = n->exp == 2;
    std::vector<double> S(queries * keys);
    for (int64_t i = 0; i < queries; ++i) {
      double best = -1e30;
      for (int64_t j = 0; j < keys; ++j) {
        double s = 0;
        for (int64_t c = 0; c < d; ++c) s += double(f32(q[i * d + c])) * f32(k[j * d + c]);
        S[i * keys + j] = s * scale;
        if (j < 32) best = std::max(best, s * scale);
      }
      stale[i] = best + (headroom ? 31 : 0);
    }
    const Pass w{(char*)sq, sk, sv, so, ring, sp, stale, sum, range, tiles, stages, float(scale)};
    if (n->right) {
      n->run(w);
      double num = 0, den = 0, worst_sum = 0;
      bool out = false;
      for (int64_t i = 0; i < queries; i += 7) {
        double l = 0;
        for (int64_t j = 0; j < keys; ++j) l += std::exp2(S[i * keys + j] - stale[i]);
        worst_sum = std::max(worst_sum, std::abs(sum[i] / l - 1));
        for (int64_t c = 0; c < d; ++c) {
          double o = 0;
          for (int64_t j = 0; j < keys; ++j) o += std::exp2(S[i * keys + j] - stale[i]) * f32(v[j * d + c]);
          const double mine = ((float*)so)[((i / 32) * d + c) * 32 + i % 32] / double(sum[i]);
          num += std::pow(mine - o / l, 2), den += std::pow(o / l, 2);
        }
      }
      for (int64_t i = 0; i < queries / 2; ++i) out |= (range[i] & (headroom ? 0xff800000u : 0x80008000u)) != 0;
      printf("%-20s error %.3g, of sums %.2g%s\n", n->name, std::sqrt(num / den), worst_sum,
             out ? " OUT OF RANGE" : "");
    }
    if (real) {
      for (int64_t i = 0; i < queries; ++i) sum[i] = 0;
      const auto r = gate.measure(double(tiles * stages), [&] {
        memset(so, 0, 64);
        n->run(w);
      });
      const double ideal = n->q_steps * 4 * 16 + n->v_groups * 4 * 16;
      printf("%-20s %7.1f best, %7.1f median cycles a stage, %.3f of the products' rate; %d of %d samples\n", n->name,
             r.best, r.median, ideal / r.median, r.good, r.all);
    }
    fflush(stdout);
    free(scratch), free(q), free(k), free(v);
  }
  gate.report();
}
