// The one micro-kernel: C[R rows][C vectors] += A[R rows][k] B[k][C vectors], A broadcast element by element.
//
// It computes every product of attention. If lanes are queries (S^T = K Q^T, O^T = V^T P^T, dP^T = V dO^T), A is K or V
// in place and B a transposed tile. If lanes are head dimensions (dV = P^T dO, dK = dS^T Q, dQ = dS K), A is a tile of
// scores and B is dO, Q or K in place. An element of A and of B is four bytes: a float32 for Op::kFma, a pair of bf16
// along k for Op::kDot.
//
// 8 x 3 and 6 x 4 vectors (24 accumulators, 11 or 10 loads a step) fill AVX-512's 32 registers; 4 x 3 and 6 x 2 the 16
// registers of the others. Measured: 97 % of the FMA peak for long k. NEON has 32 registers, of which A takes some: its
// multiply-add broadcasts an element of a register (multiply_by_lanes).
#pragma once

#include "cpu/simd.hpp"

namespace tessera::cpu {
namespace {

enum class Op { kFma, kDot };

// The layout of A: adjacent elements along k, with a stride between rows, or the other way round.
enum class Broadcast { kAlongK, kAlongRows };

#if defined(TESSERA_COMPILE_AMX_BF16)
constexpr int kTileRows = 8, kTileVecs = 2;  // two tile registers of queries
constexpr int kWideRows = 6, kWideVecs = 4;
#elif defined(TESSERA_AVX512)
constexpr int kTileRows = 8, kTileVecs = 3;  // lanes = queries
constexpr int kWideRows = 6, kWideVecs = 4;  // lanes = head dimensions
#elif defined(TESSERA_NEON)
constexpr int kTileRows = 6, kTileVecs = 3;
constexpr int kWideRows = 6, kWideVecs = 4;
#else
constexpr int kTileRows = 4, kTileVecs = 3;
constexpr int kWideRows = 6, kWideVecs = 2;
#endif
constexpr int kBlockM = kTileVecs * kLanes;  // queries of a tile

TESSERA_INLINE VecU broadcast_element(const char* p) {
  uint32_t u;
  __builtin_memcpy(&u, p, sizeof u);
  return splat(u);
}

// a b + acc; a lane of a and b is one float32 or a pair of bf16.
template <Op kOp>
TESSERA_INLINE VecF multiply_add(VecF a, VecF b, VecF acc) {
#if defined(TESSERA_HAS_DOT)
  if constexpr (kOp == Op::kDot) return dot(acc, (VecU)a, (VecU)b);
#endif
  return fma(a, b, acc);
}

#if defined(TESSERA_NEON)
template <int kLane, Op kOp>
TESSERA_INLINE VecF multiply_add_by_lane(VecF a, VecF lanes, VecF acc) {
#if defined(TESSERA_HAS_DOT)
  if constexpr (kOp == Op::kDot) return dot_by_lane<kLane>(a, lanes, acc);
#endif
  return fma_by_lane<kLane>(a, lanes, acc);
}

// multiply() for whole vectors of A: kAlongK four steps at a time, kAlongRows four rows at a time. Returns the number
// of steps done, which for kAlongK is the largest multiple of four.
template <int R, int C, Op kOp, Broadcast kBroadcast>
TESSERA_INLINE int64_t multiply_by_lanes(VecF (&acc)[R][C], const char* a, int64_t stride_bytes, const char* b,
                                         int64_t ldb, int64_t k_count) {
  const auto load_b = [&](VecF(&rb)[C]) TESSERA_LAMBDA_INLINE {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) rb[c] = load_as<VecF>(b + c * kLanes * 4);
    b += ldb * 4;
  };
  int64_t k = 0;
  if constexpr (kBroadcast == Broadcast::kAlongK) {
    for (; k + kLanes <= k_count; k += kLanes, a += kLanes * 4) {
      VecF ra[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) ra[r] = load_as<VecF>(a + r * stride_bytes);
      const auto step = [&]<int kLane>() TESSERA_LAMBDA_INLINE {
        VecF rb[C];
        load_b(rb);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) acc[r][c] = multiply_add_by_lane<kLane, kOp>(rb[c], ra[r], acc[r][c]);
      };
      step.template operator()<0>(), step.template operator()<1>();
      step.template operator()<2>(), step.template operator()<3>();
    }
  } else {
    for (; k < k_count; ++k, a += stride_bytes) {
      VecF rb[C], ra[(R + kLanes - 1) / kLanes];
      for (int r = 0; r + kLanes <= R; r += kLanes) ra[r / kLanes] = load_as<VecF>(a + r * 4);
      if constexpr (R % kLanes != 0) ra[R / kLanes] = load_lanes<R % kLanes>(a + R / kLanes * kLanes * 4);
      load_b(rb);
      const auto row = [&]<int r>() TESSERA_LAMBDA_INLINE {
        if constexpr (r < R) {
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            acc[r][c] = multiply_add_by_lane<r % kLanes, kOp>(rb[c], ra[r / kLanes], acc[r][c]);
          }
        }
      };
      row.template operator()<0>(), row.template operator()<1>(), row.template operator()<2>();
      row.template operator()<3>(), row.template operator()<4>(), row.template operator()<5>();
      static_assert(R <= 6);
    }
  }
  return k;
}
#endif

// `stride_bytes`: between the rows of A (kAlongK) or between its steps of k (kAlongRows). `ldb`: four-byte elements.
template <int R, int C, Op kOp, Broadcast kBroadcast>
TESSERA_INLINE void multiply(VecF (&acc)[R][C], const void* a, int64_t stride_bytes, const void* b, int64_t ldb,
                             int64_t k_count) {
  const char* pa = static_cast<const char*>(a);
  const char* pb = static_cast<const char*>(b);
#if defined(TESSERA_NEON)
  const int64_t done = multiply_by_lanes<R, C, kOp, kBroadcast>(acc, pa, stride_bytes, pb, ldb, k_count);
  if constexpr (kBroadcast == Broadcast::kAlongRows) return;
  pa += done * 4, pb += done * ldb * 4, k_count -= done;
#endif
  // Rows of A use two pointers and three strides: eight pointers would leave no register for the loop.
  const char* pa4 = pa + 4 * stride_bytes;
  const int64_t stride3_bytes = 3 * stride_bytes;
  const auto row = [&](int r) TESSERA_LAMBDA_INLINE {
    if (kBroadcast == Broadcast::kAlongRows) return pa + r * 4;
    const char* base = r < 4 ? pa : pa4;
    return r % 4 == 3 ? base + stride3_bytes : base + r % 4 * stride_bytes;
  };
  for (int64_t k = 0; k < k_count; ++k) {
    VecF rb[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) rb[c] = load_as<VecF>(pb + c * kLanes * 4);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VecU ra = broadcast_element(row(r));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        acc[r][c] = multiply_add<kOp>((VecF)ra, rb[c], acc[r][c]);
      }
    }
    pa += kBroadcast == Broadcast::kAlongK ? 4 : stride_bytes;
    if (kBroadcast == Broadcast::kAlongK && R > 4) pa4 += 4;
    pb += ldb * 4;
  }
}

// Splits `rows` into groups of kMax rows and a tail of powers of two (kMax 6: of two and one), and calls
// body.template operator()<R>(first_row) for each.
template <int kMax, class Body>
TESSERA_INLINE void for_row_groups(int64_t begin, int64_t end, Body&& body) {
  int64_t r = begin;
  for (; r + kMax <= end; r += kMax) body.template operator()<kMax>(r);
  if constexpr (kMax > 4) {
    if (r + 4 <= end) body.template operator()<4>(r), r += 4;
  }
  if (r + 2 <= end) body.template operator()<2>(r), r += 2;
  if (r < end) body.template operator()<1>(r);
}

// The same for columns of vectors: body.template operator()<C>(first_vec).
template <int kMax, class Body>
TESSERA_INLINE void for_vec_groups(int vecs, Body&& body) {
  int v = 0;
  for (; v + kMax <= vecs; v += kMax) body.template operator()<kMax>(v);
  if constexpr (kMax > 3) {
    if (v + 3 <= vecs) body.template operator()<3>(v), v += 3;
  }
  if constexpr (kMax > 2) {
    if (v + 2 <= vecs) body.template operator()<2>(v), v += 2;
  }
  if (v < vecs) body.template operator()<1>(v);
}

// out[rows][vecs] (=|+=) A B.   A: Broadcast::kAlongK [rows][k], kAlongRows [k][rows];   B [k][vecs];   out row stride
// ld. A sum over k is complete before it is added to the output, so a long row of keys is summed by blocks, and its
// rounding error grows with the number of blocks, not of keys.
template <int kMaxRows, int C, Op kOp, Broadcast kBroadcast>
TESSERA_INLINE void product_rows(float* out, int64_t ld, bool accumulate, const void* a, int64_t stride_bytes,
                                 const void* b, int64_t ldb, int64_t rows, int64_t k_count) {
  for_row_groups<kMaxRows>(0, rows, [&]<int R>(int64_t r0) TESSERA_LAMBDA_INLINE {
    VecF acc[R][C] = {};
    const char* pa = static_cast<const char*>(a) + r0 * (kBroadcast == Broadcast::kAlongK ? stride_bytes : 4);
    multiply<R, C, kOp, kBroadcast>(acc, pa, stride_bytes, b, ldb, k_count);
    float* tile = out + r0 * ld;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        float* at = tile + r * ld + c * kLanes;
        store(at, accumulate ? load(at) + acc[r][c] : acc[r][c]);
      }
  });
}

}  // namespace
}  // namespace tessera::cpu
