// Compiled once for each instruction set, with TESSERA_PEERS_ISA naming it and TESSERA_PEERS_VECTOR_BYTES its vectors.
// No inline library functions here: the linker would merge them across instruction sets.
#include "peers/loops.hpp"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace tessera::peers {
namespace {

constexpr std::int64_t kVectorBytes = TESSERA_PEERS_VECTOR_BYTES;
constexpr std::int64_t kLanes = kVectorBytes / 4;
typedef float Vector __attribute__((vector_size(kVectorBytes)));

// Enough independent chains to hide the latency of two multiply-adds a cycle, few enough to stay in 16 registers.
constexpr int kChains = 12;

// Sums the chains, so that each of them is needed.
float total(const Vector (&chains)[kChains]) {
  float sum = 0;
  for (const Vector& chain : chains) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sum += chain[lane];
  }
  return sum;
}

float fma_loop(std::int64_t iterations) {
  const Vector x = Vector{} + 0.999F;  // every chain tends to 1 (and none starts there: the compiler sees
                                       // that 1 stays 1): no denormals, no overflow
  const Vector y = Vector{} + 0.001F;
  Vector chains[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) chains[c] = Vector{} + static_cast<float>(c + 2);
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = chains[c] * x + y;
  }
  return total(chains);
}

#if defined(__AVX512BF16__)
float bf16_dot_loop(std::int64_t iterations) {
  const __m512i bits = _mm512_set1_epi32(0x3c003c00);  // pairs of 0.0078125
  const __m512bh pairs = (__m512bh)bits;
  __m512 chains[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) chains[c] = _mm512_set1_ps(static_cast<float>(c));
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = _mm512_dpbf16_ps(chains[c], pairs, pairs);
  }
  Vector sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = (Vector)chains[c];
  return total(sums);
}
#endif

float read_loop(const float* data, std::int64_t elems) {
  Vector sums[8] = {};
  for (std::int64_t i = 0; i < elems; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      Vector loaded;
      __builtin_memcpy(&loaded, data + i + c * kLanes, kVectorBytes);
      sums[c] += loaded;
    }
  }
  Vector all = sums[0];
  for (int c = 1; c < 8; ++c) all += sums[c];
  return all[0];  // one lane: a sum over lanes would cost as much as reading a small buffer
}

constexpr float kLog2E = 0x1.715476p+0F;

// 2^x for x <= 0 to 1e-7 relative: x = n + f with n = round(x), 2^f by its Taylor polynomial in f ln 2, |f| <= 1/2.
inline __attribute__((always_inline)) float exp2_nonpositive(float x) {
  constexpr float kRound = 0x1.8p23F;  // adding and subtracting it rounds to an integer
  x = x < -126.0F ? -126.0F : x;       // smaller results become 2^-126, the smallest normal
  const float shifted = x + kRound;
  const float f = x - (shifted - kRound);
  const std::int32_t n = __builtin_bit_cast(std::int32_t, shifted) - __builtin_bit_cast(std::int32_t, kRound);
  float p = 0x1.430912p-13F;
  p = p * f + 0x1.5d87fep-10F;
  p = p * f + 0x1.3b2ab6p-7F;
  p = p * f + 0x1.c6b08ep-5F;
  p = p * f + 0x1.ebfbe0p-3F;
  p = p * f + 0x1.62e430p-1F;
  p = p * f + 1.0F;
  return p * __builtin_bit_cast(float, (n + 127) << 23);
}

void softmax_row(float* row, std::int64_t elems) {
  float largest = -__builtin_inff();
#pragma omp simd reduction(max : largest)
  for (std::int64_t j = 0; j < elems; ++j) largest = row[j] > largest ? row[j] : largest;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t j = 0; j < elems; ++j) {
    const float p = exp2_nonpositive((row[j] - largest) * kLog2E);
    row[j] = p;
    sum += p;
  }
  const float inverse = 1.0F / sum;
#pragma omp simd
  for (std::int64_t j = 0; j < elems; ++j) row[j] *= inverse;
}

void softmax_grad_row(const float* p_row, float* dp_row, std::int64_t elems) {
  float delta = 0;
#pragma omp simd reduction(+ : delta)
  for (std::int64_t j = 0; j < elems; ++j) delta += p_row[j] * dp_row[j];
#pragma omp simd
  for (std::int64_t j = 0; j < elems; ++j) dp_row[j] = p_row[j] * (dp_row[j] - delta);
}

void from_bf16(const std::uint16_t* in, float* out, std::int64_t elems) {
#pragma omp simd
  for (std::int64_t i = 0; i < elems; ++i) {
    out[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(in[i]) << 16);
  }
}

// To nearest, ties to even.
void to_bf16(const float* in, std::uint16_t* out, std::int64_t elems) {
#pragma omp simd
  for (std::int64_t i = 0; i < elems; ++i) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, in[i]);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40U;
    out[i] = static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet_nan : rounded);
  }
}

void from_f16(const std::uint16_t* in, float* out, std::int64_t elems) {
  for (std::int64_t i = 0; i < elems; ++i) out[i] = static_cast<float>(__builtin_bit_cast(_Float16, in[i]));
}

void to_f16(const float* in, std::uint16_t* out, std::int64_t elems) {
  for (std::int64_t i = 0; i < elems; ++i) out[i] = __builtin_bit_cast(std::uint16_t, static_cast<_Float16>(in[i]));
}

double dot_f64(const double* a, const double* b, std::int64_t elems) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < elems; ++i) sum += a[i] * b[i];
  return sum;
}

void axpy_f64(double alpha, const double* x, double* y, std::int64_t elems) {
#pragma omp simd
  for (std::int64_t i = 0; i < elems; ++i) y[i] += alpha * x[i];
}

}  // namespace

extern const Loops TESSERA_PEERS_ISA;
const Loops TESSERA_PEERS_ISA = {
    .fma = fma_loop,
    .fma_flops_per_iteration = 2.0 * kChains * kLanes,
#if defined(__AVX512BF16__)
    .bf16_dot = bf16_dot_loop,
    .bf16_dot_flops_per_iteration = 4.0 * kChains * kLanes,
#else
    .bf16_dot = nullptr,
    .bf16_dot_flops_per_iteration = 0,
#endif
    .read = read_loop,
    .softmax_row = softmax_row,
    .softmax_grad_row = softmax_grad_row,
    .from_bf16 = from_bf16,
    .to_bf16 = to_bf16,
    .from_f16 = from_f16,
    .to_f16 = to_f16,
    .dot_f64 = dot_f64,
    .axpy_f64 = axpy_f64,
};

}  // namespace tessera::peers
