// The forward's inner loop with everything known at compile time: variants of one super-block's pass.
#pragma once
#include "cpu/amx_softmax.hpp"

namespace tessera::cpu {
namespace {

enum Load { kPlainLoad, kStreamed, kPrefetched };
enum Exp { kNoExp, kPoly4, kMagic4, kInt16, kPoly3, kTogether4 };

struct Traits {
  int q_steps, v_groups, job_stages;
  Load load = kStreamed;
  Exp exp = kPoly4;
  bool products = true, loads = true, stores = true, o_memory = true;
  int ring_pad = 0;    // bytes between the two stages of S beyond their own
  int blocks = 1;      // of 32 keys a stage
  int pieces = 2;      // of softmax beside a step of four products: 1, 2 or 4
  bool near = false;   // K and V of the first stage only, from the first cache
  bool early = false;  // within a group, a tile is loaded a piece of softmax before the product that takes it
};

// What one pass works on: 256 keys packed, 16 tiles of queries.
struct Pass {
  const char *q, *k, *v;  // [tiles][q_steps] pairs, [stages][2][q_steps] tiles, [v_groups][stages][2] tiles
  char* o;                // [tiles][v_groups * 2][2 KiB]
  float* ring;
  uint32_t* p;             // [2][job_stages][16][32]
  float *stale_max, *sum;  // [tiles][32]
  uint32_t* out_of_range;  // [tiles][16]
  int64_t tiles, stages;
  float scale_log2;
};

constexpr float kHeadroom_log2 = 31.0f;

template <int N>
struct Constants {
  __m512i v[N];
  TESSERA_INLINE explicit Constants(const uint32_t (&k)[N]) {
    const uint32_t* p = opaque(k);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) v[i] = (__m512i)splat(p[i]);
  }
};

constexpr float kDegree4[5] = {0.50941962f, 0.31350508f, 0.16511291f, -0.0014642763f, 0.013426687f};

template <size_t N>
TESSERA_INLINE VecF polynomial(const VecF (&c)[N], VecF m) {
  VecF q = c[N - 1];
#pragma GCC unroll 5
  for (int i = static_cast<int>(N) - 2; i >= 0; --i) q = fma(q, m, c[i]);
  return q;
}

// One unit of a stage: keys j and j + 16 of both vectors of queries.
template <Exp kExp>
struct Unit;

template <>
struct Unit<kNoExp> {
  VecF sum_[2];
  VecU out_{};
  TESSERA_INLINE Unit(float) {}
  TESSERA_INLINE void begin(const float*) {}
  TESSERA_INLINE void half(const float*, uint32_t*, int) {}
};

template <int kDegree>
struct PolyUnit {
  VecF sum_[2], offset_[2], scale_, c_[kDegree + 1];
  VecU out_{};
  __m512i mantissa_, one_, exponent_, half_, upper_;
  TESSERA_INLINE PolyUnit(float scale_log2) {
    static constexpr float k3[4] = {0.452615364f, 0.477612894f, -0.00849622744f, 0.0782679698f};
    const float* c = opaque(kDegree == 4 ? kDegree4 : k3);
#pragma GCC unroll 6
    for (int i = 0; i <= kDegree; ++i) c_[i] = splat(c[i]);
    static constexpr uint32_t kBits[5] = {0x007fffffu, 0x3f800000u, 0xff800000u, 0x8000u, 0xffff0000u};
    const uint32_t* b = opaque(kBits);
    mantissa_ = (__m512i)splat(b[0]), one_ = (__m512i)splat(b[1]), exponent_ = (__m512i)splat(b[2]),
    half_ = (__m512i)splat(b[3]), upper_ = (__m512i)splat(b[4]);
    scale_ = splat(*opaque(&scale_log2) * kFixedPointOne);
  }
  TESSERA_INLINE void begin(const float* stale_max) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) offset_[c] = load(stale_max + c * kLanes) * -kFixedPointOne;
  }
  TESSERA_INLINE __m512i exp2(const float* s, int c) const {
    const __m512i x = _mm512_cvtps_epi32((__m512)fma(load(s), scale_, offset_[c]));
    const VecF m = (VecF)_mm512_ternarylogic_epi32(x, mantissa_, one_, 0xea);
    return _mm512_add_epi32((__m512i)polynomial(c_, m), _mm512_and_si512(x, exponent_));
  }
  // Both rounded to bfloat16, as the halves of a word.
  TESSERA_INLINE VecU joined(__m512i low, __m512i high) const {
    return (VecU)_mm512_ternarylogic_epi32(_mm512_add_epi32(high, half_), upper_,
                                           _mm512_srli_epi32(_mm512_add_epi32(low, half_), 16), 0xea);
  }
  TESSERA_INLINE void half(const float* s, uint32_t* p, int c) {
    const __m512i low = exp2(s + c * kLanes, c), high = exp2(s + kTileSide * kBlockM + c * kLanes, c);
    sum_[c] += (VecF)low + (VecF)high;
    const VecU pair = joined(low, high);
    out_ |= pair;
    store(p + c * kLanes, pair);
    asm volatile("" : "+v"(sum_[c]), "+v"(out_));
  }
};
template <>
struct Unit<kPoly4> : PolyUnit<4> {
  using PolyUnit<4>::PolyUnit;
};
template <>
struct Unit<kPoly3> : PolyUnit<3> {
  using PolyUnit<3>::PolyUnit;
};

// As kPoly4, but a unit's four vectors take each step together, so that few instructions wait in the scheduler.
template <>
struct Unit<kTogether4> : PolyUnit<4> {
  using PolyUnit<4>::PolyUnit;
  TESSERA_INLINE static void here(__m512i (&v)[4]) {
    asm volatile("" : "+v"(v[0]), "+v"(v[1]), "+v"(v[2]), "+v"(v[3]));
  }
  // The whole unit, when its first half is wanted.
  TESSERA_INLINE void half(const float* s, uint32_t* p, int c) {
    if (c != 0) return;
    __m512i x[4], exponent[4], q[4];
    const auto each = [](auto f) TESSERA_LAMBDA_INLINE { f(0), f(1), f(2), f(3); };
    each([&](int v) TESSERA_LAMBDA_INLINE {
      x[v] = (__m512i)fma(load(s + v / 2 * kTileSide * kBlockM + v % 2 * kLanes), scale_, offset_[v % 2]);
    });
    here(x);
    each([&](int v) TESSERA_LAMBDA_INLINE { x[v] = _mm512_cvtps_epi32((__m512)x[v]); });
    here(x);
    each([&](int v) TESSERA_LAMBDA_INLINE { exponent[v] = _mm512_and_si512(x[v], exponent_); });
    here(exponent);
    each([&](int v) TESSERA_LAMBDA_INLINE { x[v] = _mm512_ternarylogic_epi32(x[v], mantissa_, one_, 0xea); });
    here(x);
    each([&](int v) TESSERA_LAMBDA_INLINE { q[v] = (__m512i)fma(c_[4], (VecF)x[v], c_[3]); });
    here(q);
    each([&](int v) TESSERA_LAMBDA_INLINE { q[v] = (__m512i)fma((VecF)q[v], (VecF)x[v], c_[2]); });
    here(q);
    each([&](int v) TESSERA_LAMBDA_INLINE { q[v] = (__m512i)fma((VecF)q[v], (VecF)x[v], c_[1]); });
    here(q);
    each([&](int v) TESSERA_LAMBDA_INLINE { q[v] = (__m512i)fma((VecF)q[v], (VecF)x[v], c_[0]); });
    here(q);
    each([&](int v) TESSERA_LAMBDA_INLINE { q[v] = _mm512_add_epi32(q[v], exponent[v]); });
    here(q);
    sum_[0] += (VecF)q[0] + (VecF)q[2], sum_[1] += (VecF)q[1] + (VecF)q[3];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const VecU pair = joined(q[i], q[2 + i]);
      out_ |= pair;
      store(p + i * kLanes, pair);
    }
    asm volatile("" : "+v"(sum_[0]), "+v"(sum_[1]), "+v"(out_));
  }
};

// Fixed point by the addition of 2^7 in the multiply-add: 7 bits before, 16 after the point. No conversion; the shift is a permutation's.
template <>
struct Unit<kMagic4> {
  VecF sum_[2], offset_[2], scale_, c_[5];
  VecU out_{};
  __m512i mantissa_, one_, exponent_, half_, upper_, expected_, shift_, low_;
  TESSERA_INLINE Unit(float scale_log2) {
    const float* c = opaque(kDegree4);
#pragma GCC unroll 6
    for (int i = 0; i <= 4; ++i) c_[i] = splat(c[i]);
    static constexpr uint32_t kBits[6] = {0x007fff80u, 0x3f800000u, 0x3f800000u, 0x8000u, 0xffff0000u, 0x43000000u};
    const uint32_t* b = opaque(kBits);
    mantissa_ = (__m512i)splat(b[0]), one_ = (__m512i)splat(b[1]), exponent_ = (__m512i)splat(b[2]),
    half_ = (__m512i)splat(b[3]), upper_ = (__m512i)splat(b[4]), expected_ = (__m512i)splat(b[5]);
    // dword << 7: byte i of a qword from bit 8 i - 7.
    alignas(8) static constexpr uint8_t kShift[8] = {57, 1, 9, 17, 25, 33, 41, 49};
    alignas(16) static constexpr uint8_t kLow[16] = {2,  3,  128, 128, 6,  7,  128, 128,
                                                     10, 11, 128, 128, 14, 15, 128, 128};
    shift_ = _mm512_set1_epi64(*(const long long*)opaque(kShift));
    low_ = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)opaque(kLow)));
    scale_ = splat(*opaque(&scale_log2));
  }
  TESSERA_INLINE void begin(const float* stale_max) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) offset_[c] = splat(255.0f) - load(stale_max + c * kLanes);
  }
  TESSERA_INLINE __m512i exp2(const float* s, int c) {
    const __m512i u = (__m512i)fma(load(s), scale_, offset_[c]);
    out_ = (VecU)_mm512_ternarylogic_epi32((__m512i)out_, u, expected_, 0xf6);
    const __m512i x = _mm512_multishift_epi64_epi8(shift_, u);
    const VecF m = (VecF)_mm512_ternarylogic_epi32(x, mantissa_, one_, 0xea);
    return _mm512_ternarylogic_epi32((__m512i)polynomial(c_, m), x, exponent_,
                                     0xd8);  // the exponent from x, the rest from q
  }
  TESSERA_INLINE void half(const float* s, uint32_t* p, int c) {
    const __m512i low = exp2(s + c * kLanes, c), high = exp2(s + kTileSide * kBlockM + c * kLanes, c);
    sum_[c] += (VecF)low + (VecF)high;
    const VecU pair = (VecU)_mm512_ternarylogic_epi32(_mm512_add_epi32(high, half_), upper_,
                                                      _mm512_shuffle_epi8(_mm512_add_epi32(low, half_), low_), 0xea);
    store(p + c * kLanes, pair);
    asm volatile("" : "+v"(sum_[c]), "+v"(out_));
  }
};

// The library's PairExp2: 16-bit integers, 32 numbers at a time.
template <>
struct Unit<kInt16> {
  VecF sum_[2], offset_[2], scale_;
  VecU out_{};
  PairExp2 exp2_;
  TESSERA_INLINE Unit(float scale_log2) : scale_(splat(*opaque(&scale_log2) * PairExp2::kOne)) {}
  TESSERA_INLINE void begin(const float* stale_max) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      offset_[c] = fma(load(stale_max + c * kLanes), splat(-PairExp2::kOne), splat(PairExp2::kZero));
    }
  }
  TESSERA_INLINE void half(const float* s, uint32_t* p, int c) {
    const VecF low = fma(load(s + c * kLanes), scale_, offset_[c]);
    const VecF high = fma(load(s + kTileSide * kBlockM + c * kLanes), scale_, offset_[c]);
    const VecU pair = exp2_(low, high, out_);
    sum_[c] = exp2_.add(sum_[c], pair);
    store(p + c * kLanes, pair);
    asm volatile("" : "+v"(sum_[c]), "+v"(out_));
  }
};

template <Traits T>
struct Kernel {
  static constexpr int64_t kQ_bytes = int64_t{T.q_steps} * 2048;

  template <int kTile>
  TESSERA_INLINE static void load_a(const char* a, const char* next) {
    if (!T.loads) return;
    if (T.load == kStreamed)
      tile_load_streamed<kTile>(a, kTileRow_bytes);
    else
      tile_load<kTile>(a, kTileRow_bytes);
  }
  TESSERA_INLINE static void ask(const char* a) {
    if (T.load != kPrefetched) return;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) __builtin_prefetch(a + i * 64, 0, 3);
  }
  template <int kTile>
  TESSERA_INLINE static void load_b(const char* b) {
    if (T.loads) tile_load<kTile>(b, 128);
  }
  template <int kC, int kA, int kB>
  TESSERA_INLINE static void product() {
    if (T.products) tile_product<kC, kA, kB>();
  }
  template <int kTile>
  TESSERA_INLINE static void put(char* c) {
    if (T.stores) tile_store<kTile>(c, 128);
  }
  template <int kTile, bool kAdd>
  TESSERA_INLINE static void begin(const char* c) {
    if (kAdd && T.o_memory)
      tile_load<kTile>(c, 128);
    else
      tile_zero<kTile>();
  }
  // Registers 0 ... 3 are pending for `pending`; then C (+)= A B.
  template <bool kAdd, class Beside>
  TESSERA_INLINE static void group(char* pending, char* c, const char* a, int64_t a_lower, int64_t a_step,
                                   const char* b, int steps, const char* ahead, Beside&& beside) {
#pragma GCC unroll 8
    for (int step = 0; step < steps; ++step) {
      const char* aa = a + step * a_step;
      const char* bb = b + step * 2048;
      ask(ahead + step * a_step);
      const bool first = step == 0, now = !T.early || first, last = step + 1 == steps;
      if (now) load_b<6>(bb), load_a<4>(aa, nullptr);
      if (first) put<0>(pending), begin<0, kAdd>(c);
      product<0, 4, 6>();
      if (T.early && first)
        load_b<7>(bb + 64), put<1>(pending + 64), begin<1, kAdd>(c + 64), load_a<5>(aa + a_lower, nullptr);
      if (T.pieces == 4) beside();
      if (!T.early) load_b<7>(bb + 64);
      if (!T.early && first) put<1>(pending + 64), begin<1, kAdd>(c + 64);
      product<1, 4, 7>();
      if (T.early && first) put<2>(pending + 2048), begin<2, kAdd>(c + 2048);
      if (T.early && !last) load_a<4>(aa + a_step, nullptr);
      if (T.pieces >= 2) beside();
      ask(ahead + step * a_step + a_lower);
      if (!T.early) load_a<5>(aa + a_lower, nullptr);
      if (!T.early && first) put<2>(pending + 2048), begin<2, kAdd>(c + 2048);
      product<2, 5, 6>();
      if (T.early && first) put<3>(pending + 2112), begin<3, kAdd>(c + 2112);
      if (T.early && !last) load_b<6>(bb + 2048);
      if (T.pieces == 4) beside();
      if (!T.early && first) put<3>(pending + 2112), begin<3, kAdd>(c + 2112);
      product<3, 5, 7>();
      if (T.early && !last) load_b<7>(bb + 2048 + 64), load_a<5>(aa + a_step + a_lower, nullptr);
      beside();
    }
  }

  TESSERA_OWN_FUNCTION static void run(const Pass& w) {
    constexpr int QS = T.q_steps, VG = T.v_groups, JS = T.job_stages;
    constexpr int kGroups = VG >= JS ? VG / JS : 1;  // of the output beside a stage
    static_assert(VG % JS == 0);
    constexpr int SB = T.blocks;
    constexpr int kSlots = T.pieces * (SB * QS + kGroups * JS * SB), kHalves = 2 * kUnits * SB / kSlots;
    static_assert(kHalves * kSlots == 2 * kUnits * SB || T.exp == kNoExp, "whole halves of units a slot");
    const int64_t jobs = w.stages / JS / SB;
    char* ring[2] = {reinterpret_cast<char*>(w.ring), reinterpret_cast<char*>(w.ring) + SB * 4096 + T.ring_pad};
    const int64_t p_job = int64_t{JS} * SB * 2048;
    Unit<T.exp> unit(w.scale_log2);
    // S of the first stage; its store is pending, P V of "the job before" is of zeros.
    char* pending = ring[1];
    for (int b = 0; b < SB; ++b) {
      group<false>(pending, ring[0] + b * 4096, w.k + b * 2 * QS * 1024, QS * 1024, 1024, w.q, QS, w.k, [] {});
      pending = ring[0] + b * 4096;
    }
    put<0>(pending), put<1>(pending + 64), put<2>(pending + 2048), put<3>(pending + 2112);
    __builtin_memset(w.p, 0, 2 * p_job);
    int turn = 0;
    char* o_before = w.o;  // of the first tile, to which zeros are added
    int64_t stage_before = 0;
    for (int64_t t = 0; t < w.tiles; ++t) {
      const char* q = w.q + t * kQ_bytes;
      unit.begin(w.stale_max + t * kBlockM);
      unit.sum_[0] = load(w.sum + t * kBlockM), unit.sum_[1] = load(w.sum + t * kBlockM + kLanes);
      unit.out_ = VecU{};
      for (int64_t j = 0; j < jobs; ++j) {
        const int64_t number = t * jobs + j;
        char* p = reinterpret_cast<char*>(w.p) + (number & 1) * p_job;
        const char* p_before = reinterpret_cast<const char*>(w.p) + (~number & 1) * p_job;
        const char* v_before = w.v + stage_before * 2048;
        char* o = o_before;
        for (int stage = 0; stage < JS; ++stage) {
          const bool last = stage + 1 == JS && j + 1 == jobs;
          const int64_t next = last || T.near ? 0 : (j * JS + stage + 1) * SB;
          int halves = 0;
          const char* q_next = last && t + 1 < w.tiles ? q + kQ_bytes : q;
          const float* s = reinterpret_cast<const float*>(ring[turn]);
          char* s_next = ring[turn ^ 1];
          turn ^= 1;
          uint32_t* out = reinterpret_cast<uint32_t*>(p + stage * SB * 2048);
          const auto beside = [&]() TESSERA_LAMBDA_INLINE {
#pragma GCC unroll 8
            for (int h = 0; h < kHalves; ++h) {
              unit.half(s, out, halves % 2);
              if (++halves % 2 == 0) s += kBlockM, out += kBlockM;
              if (SB > 1 && halves % (2 * kUnits) == 0) s += kTileSide * kBlockM;
            }
          };
#pragma GCC unroll 2
          for (int b = 0; b < SB; ++b) {
            const char* k = w.k + (next + b) * 2 * QS * 1024;
            group<false>(pending, s_next + b * 4096, k, QS * 1024, 1024, q_next, QS, k + SB * 2 * QS * 1024, beside);
            pending = s_next + b * 4096;
          }
#pragma GCC unroll 8
          for (int g = 0; g < kGroups; ++g) {
            char* c = o + g * 4096;
            group<true>(pending, c, v_before + g * w.stages * 2048, 1024, 2048, p_before, JS * SB,
                        v_before + (g + kGroups) * w.stages * 2048, beside);
            pending = c;
          }
          o += kGroups * 4096, v_before += kGroups * w.stages * 2048;
        }
        o_before = w.o + t * VG * 4096, stage_before = T.near ? 0 : j * JS * SB;
      }
      store(w.sum + t * kBlockM, unit.sum_[0]), store(w.sum + t * kBlockM + kLanes, unit.sum_[1]);
      store(w.out_of_range + t * kLanes, unit.out_);
    }
    // P V of the last job.
    const int64_t number = w.tiles * jobs - 1;
    const char* p_before = reinterpret_cast<const char*>(w.p) + (number & 1) * p_job;
    for (int g = 0; g < VG; ++g) {
      char* c = o_before + g * 4096;
      group<true>(pending, c, w.v + (g * w.stages + stage_before) * 2048, 1024, 2048, p_before, JS * SB, w.v, [] {});
      pending = c;
    }
    put<0>(pending), put<1>(pending + 64), put<2>(pending + 2048), put<3>(pending + 2112);
  }
};

}  // namespace
}  // namespace tessera::cpu
