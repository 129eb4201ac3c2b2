// The passes of standard attention over the rows of its matrices of scores, bound by memory bandwidth: the softmax, S
// -> P in place, with the LSE; and its gradient, dP -> dS = P o (dP - rowsum(P o dP)) in place. A row's elements are
// read once, kept in registers in their storage type, and written once.
//
// Masked keys have weight 0. With dropout, the softmax stores 0 for a dropped element; the gradient reads P with
// dropped elements negative.
//
// Grid: blocks of kStandardRowsThreads threads, or as many as a row needs. Page: docs/reference/kernels/comparison.md.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/comparison/standard/config.hpp"
#include "tessera/tile/fragment.cuh"

namespace tessera {

struct MaxOf {
  TESSERA_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOf {
  TESSERA_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Reduces over the kThreads threads of each row of the block, in a fixed order. Called by all threads.
template <int kThreads, int kBlockThreads, class Combine>
TESSERA_DEVICE float reduce_row(float x, Combine combine) {
#pragma unroll
  for (int distance = min(kThreads, 32) / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  if constexpr (kThreads > 32) {
    __shared__ float sWarps[kBlockThreads / 32];
    const int thread = static_cast<int>(threadIdx.x), first = thread / kThreads * (kThreads / 32);
    __syncthreads();  // all threads have read the previous values
    if (thread % 32 == 0) sWarps[thread / 32] = x;
    __syncthreads();
    x = sWarps[first];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) x = combine(x, sWarps[first + warp]);
  }
  return x;
}

// A thread's vectors of a row of scores.
template <StandardRowsConfig kCfg>
struct StandardRow {
  static constexpr int kBlockThreads = kCfg.threads > kStandardRowsThreads ? kCfg.threads : kStandardRowsThreads;
  static constexpr int kRows = kBlockThreads / kCfg.threads;  // of a block
  int batch, head, query;
  bool there;
  int64 at;    // offset of the row in elements
  int thread;  // index in the row
  Sequence s;

  TESSERA_DEVICE explicit StandardRow(const StandardRowsParams& p) {
    const int64 rows = static_cast<int64>(p.batch) * p.heads_q * p.seqlen_q;
    int64 row = static_cast<int64>(blockIdx.x) * kRows + threadIdx.x / kCfg.threads;
    there = row < rows;
    row = min(row, rows - 1);
    at = row * p.pitch;
    query = static_cast<int>(row % p.seqlen_q);
    const int64 index = row / p.seqlen_q;
    batch = static_cast<int>(index / static_cast<int>(p.heads_q)),
    head = static_cast<int>(index % static_cast<int>(p.heads_q));
    thread = static_cast<int>(threadIdx.x) % kCfg.threads;
    s = load_sequence<false>(p, batch);
  }

  // The first key of a thread's vector v.
  TESSERA_DEVICE int key(int v) const { return (v * kCfg.threads + thread) * kStandardVector; }
  TESSERA_DEVICE uint4 load(const void* matrix, int v) const {
    const auto* from = static_cast<const unsigned short*>(matrix) + at;
    return key(v) < s.sk ? *reinterpret_cast<const uint4*>(from + key(v)) : make_uint4(0, 0, 0, 0);
  }
  TESSERA_DEVICE void store(void* matrix, int v, const uint4& words) const {
    auto* to = static_cast<unsigned short*>(matrix) + at;
    if (there && key(v) < s.sk) *reinterpret_cast<uint4*>(to + key(v)) = words;
  }
};

template <Dtype kDtype>
TESSERA_DEVICE void unpack(float (&x)[kStandardVector], const uint4& words) {
  const uint32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = unpack_pair<kDtype>(pairs[n]);
    x[2 * n] = pair.x, x[2 * n + 1] = pair.y;
  }
}
template <Dtype kDtype>
TESSERA_DEVICE uint4 pack(const float (&x)[kStandardVector]) {
  return make_uint4(pack_pair<kDtype>(x[0], x[1]), pack_pair<kDtype>(x[2], x[3]), pack_pair<kDtype>(x[4], x[5]),
                    pack_pair<kDtype>(x[6], x[7]));
}

// Keep bits of dropout for the 8 keys of a vector. A group of 32 keys belongs to four neighbouring threads, 8 keys
// each; each thread makes one of the four Philox calls and shuffles the words to the others. Called by all lanes of a
// warp.
TESSERA_DEVICE void vector_dropout_bits(uint32 (&words)[4], const ProblemParams& p, int head, int query, int key) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  const PhiloxWords mine = dropout_words(DropoutKeys<false>(p), head, query, key / 32, lane);
#pragma unroll
  for (int distance = 0; distance < 4; ++distance) {
    const int other = lane ^ distance;  // the lane whose keys this word is for, and whose call has this lane's word
    const uint32 theirs =
        other < 2 ? (other == 0 ? mine.word[0] : mine.word[1]) : (other == 2 ? mine.word[2] : mine.word[3]);
    const uint32 got = __shfl_xor_sync(0xffffffff, theirs, distance);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) words[pair] = other == pair ? got : words[pair];
  }
}

template <StandardRowsConfig kCfg>
TESSERA_DEVICE void standard_softmax(const StandardRowsParams& p) {
  using Row = StandardRow<kCfg>;
  const Row row(p);
  const KeyRange keys = visible_keys(p, row.s, row.query);
  [[maybe_unused]] const char* mask = static_cast<const char*>(p.mask.data) + p.mask.batch * row.batch +
                                      p.mask.head * row.head + p.mask.row * row.query;
  uint4 held[kCfg.vectors];
  float most = -infinity();
#pragma unroll
  for (int v = 0; v < kCfg.vectors; ++v) held[v] = row.load(p.p_matrix, v);
#pragma unroll
  for (int v = 0; v < kCfg.vectors; ++v) {
    float x[kStandardVector];
    unpack<kCfg.dtype>(x, held[v]);
    const int key = row.key(v);
#pragma unroll
    for (int e = 0; e < kStandardVector; ++e) {
      bool seen = key + e >= keys.low && key + e <= keys.high;
      if constexpr (kCfg.mask) seen = seen && mask[p.mask.col * (key + e)];
      x[e] = seen ? x[e] : -infinity();
      most = fmaxf(most, x[e]);
    }
    held[v] = pack<kCfg.dtype>(x);
  }
  most = reduce_row<kCfg.threads, Row::kBlockThreads>(most, MaxOf{});
  const float ref = most == -infinity() ? 0.0f : most;

  float total = 0.0f;
#pragma unroll
  for (int v = 0; v < kCfg.vectors; ++v) {
    float x[kStandardVector];
    unpack<kCfg.dtype>(x, held[v]);
#pragma unroll
    for (int e = 0; e < kStandardVector; ++e) total += ptx::ex2_approx_ftz((x[e] - ref) * kLog2e);
  }
  total = reduce_row<kCfg.threads, Row::kBlockThreads>(total, SumOf{});
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;

#pragma unroll
  for (int v = 0; v < kCfg.vectors; ++v) {
    float x[kStandardVector];
    unpack<kCfg.dtype>(x, held[v]);
    [[maybe_unused]] uint32 words[4];
    if constexpr (kCfg.dropout) {
      vector_dropout_bits(words, p, row.batch * p.heads_q + row.head, row.query, row.key(v));
    }
#pragma unroll
    for (int e = 0; e < kStandardVector; ++e) {
      x[e] = ptx::ex2_approx_ftz((x[e] - ref) * kLog2e) * factor;
      if constexpr (kCfg.dropout) {
        const uint32 word = words[e / 2];
        x[e] =
            (e % 2 == 0 ? keeps_low(word, p.dropout_threshold) : keeps_high(word, p.dropout_threshold)) ? x[e] : 0.0f;
      }
    }
    row.store(p.p_matrix, v, pack<kCfg.dtype>(x));
  }
  if (row.thread == 0 && row.there && p.lse.data) {
    p.lse.data[p.lse.batch * row.batch + p.lse.head * row.head + p.lse.row * row.query] =
        most == -infinity() ? -infinity() : ref + logf(total);
  }
}

template <StandardRowsConfig kCfg>
TESSERA_DEVICE void standard_softmax_gradient(const StandardRowsParams& p) {
  using Row = StandardRow<kCfg>;
  const Row row(p);
  uint4 held_p[kCfg.vectors], held_d[kCfg.vectors];
  const auto unpack_both = [&](int v, float(&x)[kStandardVector], float(&d)[kStandardVector]) {
    unpack<kCfg.dtype>(x, held_p[v]);
    unpack<kCfg.dtype>(d, held_d[v]);
    if constexpr (!kCfg.dropout) return;
#pragma unroll
    for (int e = 0; e < kStandardVector; ++e) {
      d[e] = x[e] < 0.0f ? 0.0f : d[e] * p.dropout_scale;
      x[e] = fabsf(x[e]);
    }
  };
#pragma unroll
  for (int v = 0; v < kCfg.vectors; ++v) held_p[v] = row.load(p.p_matrix, v), held_d[v] = row.load(p.d_matrix, v);
  float delta = 0.0f;
#pragma unroll
  for (int v = 0; v < kCfg.vectors; ++v) {
    float x[kStandardVector], d[kStandardVector];
    unpack_both(v, x, d);
    const int key = row.key(v);
#pragma unroll
    for (int e = 0; e < kStandardVector; ++e) delta += key + e < row.s.sk ? x[e] * d[e] : 0.0f;
  }
  delta = reduce_row<kCfg.threads, Row::kBlockThreads>(delta, SumOf{});
#pragma unroll
  for (int v = 0; v < kCfg.vectors; ++v) {
    float x[kStandardVector], d[kStandardVector];
    unpack_both(v, x, d);
#pragma unroll
    for (int e = 0; e < kStandardVector; ++e) d[e] = x[e] * (d[e] - delta);
    row.store(p.d_matrix, v, pack<kCfg.dtype>(d));
  }
}

template <StandardRowsConfig kCfg>
TESSERA_DEVICE void standard_rows(const StandardRowsParams& p) {
  if constexpr (kCfg.gradient) {
    standard_softmax_gradient<kCfg>(p);
  } else {
    standard_softmax<kCfg>(p);
  }
}

}  // namespace tessera
