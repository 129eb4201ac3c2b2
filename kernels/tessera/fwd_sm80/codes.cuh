// The forward pass of fwd_sm80/kernel.cuh over K and V of 8 bits an element, with every option.
//
// Tiles cross from memory to shared memory as codes, by cp.async. There all warps make them 16 bits, exactly, once for
// the whole block (tile/widen_codes.cuh). The next tile's codes are then requested, into the same memory, and arrive
// during the products, which are those of 16-bit keys. Scales are not part of the codes:
//
//   - Products are multiplied by k's scale, of the sequence or of each key, before anything else is done to them.
//   - O is multiplied by v's scale at the end or, with a scale of each key, P before its product with V. Such a P may
//     be as large as a scale, which bfloat16 can represent and float16 cannot: under queries of float16 it is the sum
//     of two numbers of bfloat16, each with a product of its own.
#pragma once

#include "tessera/fwd_sm80/epilogue.cuh"
#include "tessera/fwd_sm80/loads.cuh"
#include "tessera/fwd_sm80/scheduler.cuh"
#include "tessera/fwd_sm80/scores.cuh"
#include "tessera/tile/widen_codes.cuh"

namespace tessera {

template <FwdSm80Config kCfg>
struct FwdCodesSharedMemory {
  static constexpr bool kLaneOrder = kCfg.score.lane_order(kCfg.block_n);
  static constexpr Dtype kValues = kCfg.key_scales ? Dtype::kBFloat16 : kCfg.dtype;
  template <Dtype kDtype, int kCols>
  using Tile = SharedTile<kDtype, kCfg.block_n, kCols, kLaneOrder>;

  union {
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ;
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sO;  // valid once the last product with Q is done
  };
  Tile<kCfg.dtype, kCfg.head_dim> sK;
  Tile<kValues, kCfg.head_dim_v> sV;
  Tile<kCfg.codes, kCfg.head_dim> sKCodes;
  Tile<kCfg.codes, kCfg.head_dim_v> sVCodes;
  float k_scales[kCfg.block_n], v_scales[kCfg.block_n];  // of the tiles' rows, in their order; only with key_scales
};

// A thread's part of a tile's scales of keys, on their way to shared memory.
template <FwdSm80Config kCfg>
struct FwdKeyScales {
  static constexpr int kThreads = kCfg.warps * 32, kOwn = (kCfg.block_n + kThreads - 1) / kThreads;

  float k[kOwn], v[kOwn];

  TESSERA_DEVICE void load(const FwdSm80CodesParams& p, const FwdBlock<kCfg>& b, int key0) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int key = min(key0 + static_cast<int>(threadIdx.x) % kCfg.block_n + i * kThreads, b.s.sk - 1);
      k[i] = at(p, p.k_scales, b, key), v[i] = at(p, p.v_scales, b, key);
    }
  }
  TESSERA_DEVICE void store(FwdCodesSharedMemory<kCfg>& shared) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads;
      if (row >= kCfg.block_n) break;
      const int place = decltype(shared.sK)::place(row);
      shared.k_scales[place] = k[i], shared.v_scales[place] = v[i];
    }
  }

 private:
  TESSERA_DEVICE static float at(const FwdSm80CodesParams& p, const ScaleTensor& scales, const FwdBlock<kCfg>& b,
                                 int key) {
    if constexpr (kCfg.paged) {
      if (scales.in_pages) {
        const int page = pages_of(p, b.s, b.work.batch)[p.keys.table_col * (key / p.keys.page_size)];
        return scales.at(clamp(page, 0, p.keys.pages - 1), key % p.keys.page_size, b.head_kv);
      }
    }
    return scales.at(b.work.batch, key / kScaleTokens, b.head_kv);
  }
};

// Multiplies each column by its key's scale. kKeepsZeros: a weight of a hidden key stays 0 whatever its scale is.
template <bool kKeepsZeros, int kM, int kN>
TESSERA_DEVICE void scale_columns(float (&s)[kM][kN][4], const float* scales) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(scales + n * 8 + lane_col());
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scaled = s[m][n][e] * (e % 2 ? pair.y : pair.x);
        s[m][n][e] = kKeepsZeros && s[m][n][e] == 0.0f ? 0.0f : scaled;
      }
  }
}
template <int kM, int kN>
TESSERA_DEVICE void scale_all(float (&acc)[kM][kN][4], float scale) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] *= scale;
}

// What rounding to bfloat16 takes from each element.
template <int kM, int kN>
TESSERA_DEVICE void keep_rounding_errors(float (&s)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float2 rounded = unpack_pair<Dtype::kBFloat16>(pack_pair<Dtype::kBFloat16>(s[m][n][e], s[m][n][e + 1]));
        s[m][n][e] -= rounded.x, s[m][n][e + 1] -= rounded.y;
      }
}

template <FwdSm80Config kCfg>
TESSERA_DEVICE void fwd_sm80_codes(const FwdSm80CodesParams& p) {
  constexpr int kM = kCfg.block_m / kCfg.warps / 16;  // tiles of 16 rows of a warp
  constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim_v / 8, kThreads = kCfg.warps * 32;
  static_assert(kM * kCfg.warps * 16 == kCfg.block_m, "a warp has a multiple of 16 rows");
  static_assert(kCfg.stages == 1, "one stage of 16-bit tiles");
  static_assert(has_fwd_layout<kCfg, FwdCodesSharedMemory<kCfg>>(), "shared memory lies where the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdCodesSharedMemory<kCfg>*>(shared_memory);

  // 1. This block's work tile, and the keys that it sees.
  const FwdBlock<kCfg> b(p, single_tile(p));
  if (b.work.tile < 0) {
    clear_unowned_outputs_at<kCfg>(p, single_tile(p), static_cast<int>(gridDim.x) / p.tiles);
    return;
  }
  const int warp_row = uniform(static_cast<int>(threadIdx.x) / 32) * (kM * 16);
  const KeyTiles<kCfg> tiles(p, b);
  const float k_scale = kCfg.key_scales ? 1.0f : p.k_scales.at(b.work.batch, 0, b.head_kv);

  // 2. Q: global -> shared, with the first tiles of K and V.
  FwdKeyScales<kCfg> key_scales;
  const auto load = [&](int tile) {
    if (tile < tiles.last) {
      const int key0 = tiles.tile(tile) * kCfg.block_n;
      load_keys(shared.sKCodes, p, p.k, b, key0, 0, p.head_dim);
      load_keys(shared.sVCodes, p, p.v, b, key0, b.dv_begin, b.dv_count);
      if constexpr (kCfg.key_scales) key_scales.load(p, b, key0);
    }
    ptx::cp_async_commit_group();
  };
  load_queries(shared.sQ, p, b);
  load(tiles.first);

  // 3. For every tile of keys that a row of the warp sees.
  float rO[kM][kD][4];
  clear(rO);
  OnlineSoftmax<kM> softmax;
  const TileRange mine = b.seen_by(p, warp_row, kM * 16);
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    //    K and V: codes -> 16 bits
    ptx::cp_async_wait_all();
    __syncthreads();  // the codes are visible to all warps, and all have finished reading the previous tile
    widen_tile<kThreads>(shared.sK, shared.sKCodes);
    widen_tile<kThreads>(shared.sV, shared.sVCodes);
    if constexpr (kCfg.key_scales) key_scales.store(shared);
    __syncthreads();
    load(tile + 1);

    //    S = Q K^T times k's scales; the rest is as in kernel.cuh.
    const int key0 = tiles.tile(tile) * kCfg.block_n;
    if (key0 > mine.some.high) continue;  // the warp's rows see none of it: the end of a causal mask
    const bool full = mine.all.holds(key0, kCfg.block_n);
    float rS[kM][kN][4];
    bool stale_max = keeps_stale_max<kCfg.score>() && softmax.ready;
    FwdScoreStep<kCfg, kM, kN> scores;
    const FwdCoordinates<kCfg, kM, kN> at{p, b, b.row0 + warp_row, key0};
    const bool loaded = scores.kLoads && full && p.bias_mask_keys > 1;
    if (loaded) scores.load(at);
    const ScoreUnit unit = score_unit<kCfg.score>(p);
    for (;; stale_max = false) {
      clear(rS);
      product_abt(rS, shared.sQ, warp_row, shared.sK, 0);
      if constexpr (kCfg.key_scales) {
        scale_columns<false>(rS, shared.k_scales);
      } else {
        scale_all(rS, k_scale);
      }
      scores.apply(rS, at, loaded, full, scores.kByKeys && tiles.is_full(tile));
      if (!stale_max) break;
      if (softmax.try_stale_max(rS, unit)) break;
    }
    if (!stale_max) softmax.update(rS, unit, rO, keeps_stale_max<kCfg.score>() ? 0.0f : kRescaleThreshold_log2);

    //    Dropout comes after the sum: the LSE is that without dropout.
    if constexpr (kCfg.score.dropout) drop<kCfg>(rS, p, b, b.row0 + warp_row, key0);

    //    O += P V
    if constexpr (kCfg.key_scales) scale_columns<true>(rS, shared.v_scales);
    if constexpr (kCfg.key_scales && kCfg.dtype == Dtype::kFloat16) {
#pragma unroll 1  // two products side by side would need registers that wide heads lack
      for (int part = 0; part < 2; ++part) {
        product_pb(rO, rS, shared.sV, 0);
        keep_rounding_errors(rS);
      }
    } else {
      product_pb(rO, rS, shared.sV, 0);
    }
  }

  // 4. O / l and LSE: registers -> (shared ->) global. A row that sees nothing: 0 and -inf.
  if constexpr (!kCfg.key_scales) scale_all(rO, p.v_scales.at(b.work.batch, 0, b.head_kv));
  ptx::cp_async_wait_all();  // without an iteration, Q is still being loaded
  __syncthreads();           // no warp reads or loads Q any more, which O overlays
  finish_rows(shared.sO, p, b, softmax, rO, warp_row);
}

}  // namespace tessera
