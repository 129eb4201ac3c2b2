// K and V of 8 bits an element in decode_sm90. Tiles cross from memory to shared memory as codes, and become float16 as
// fragments (tile/product_codes.cuh). Both products are of float16:
//
//   - Q is rounded to float16 once for each segment. A row of bfloat16 is first multiplied by a power of two that makes
//     its largest finite element 2^14 to 2^15, so numbers 2^-29 times as large still keep all of their bits.
//   - Scores are products times `units`, the inverse of that power, and k's scale, of the sequence or of each key. All
//     that follows, options, masks and softmax, sees the scores of 16-bit keys.
//   - P is multiplied by 2^6 before it is rounded, so weights down to 2^-20 keep all of their bits; it is below 2^8.
//     With a scale of v for each key, P is also multiplied by that scale over a power of two that grows with the
//     largest of them, as the softmax's maximum does. O is multiplied by what is missing at the end of a segment.
#pragma once

#include "tessera/decode_sm90/shared.cuh"
#include "tessera/tile/product_codes.cuh"

namespace tessera {

// 2^(bits - 127), of an exponent as float32 stores it, 1 to 254.
TESSERA_DEVICE float power_of_two(int bits) { return __int_as_float(bits << 23); }

template <DecodeSm90Config kCfg>
requires(kCfg.codes()) struct DecodeQueries<kCfg> : DecodeQueryTile<kCfg> {
  float units[kDecodeRows];  // a row's product times its unit is that of Q and codes
  static constexpr int kOwnRows = kDecodeRows / kCfg.warps, kWords = kCfg.head_dim * 2 / kLoadBytes;
  static_assert(kOwnRows * kCfg.warps == kDecodeRows && kWords <= 32, "a lane has one word of each row of its warp");

  // After load(), once all copies are complete, by all threads: rounds Q to float16, in the order of code_pair_place.
  TESSERA_DEVICE void convert() {
    const int lane = lane_id(), row0 = uniform(static_cast<int>(threadIdx.x) / 32) * kOwnRows;
    uint4 words[kOwnRows];
#pragma unroll
    for (int n = 0; n < kOwnRows; ++n) {
      words[n] = make_uint4(0, 0, 0, 0);
      if (lane < kWords) words[n] = ptx::ld_shared_16(this->sQ.at(row0 + n, 0) + lane * kLoadBytes);
    }
    __syncwarp();  // all lanes have read the rows
#pragma unroll
    for (int n = 0; n < kOwnRows; ++n) {
      const float unit = to_float16(words[n]);
      // pairs 8 i + 4 h ... + 3 of the row, h = lane % 2
      if (lane < kWords) {
        const uint32 to = this->sQ.at(row0 + n, 0) + code_pair_place(lane * 4) * 4;
        ptx::st_shared_s32x2(to, static_cast<int>(words[n].x), static_cast<int>(words[n].z));
        ptx::st_shared_s32x2(to + 16, static_cast<int>(words[n].y), static_cast<int>(words[n].w));
      }
      if (lane == 0) units[row0 + n] = unit;
    }
  }
  template <class Tile>
  TESSERA_DEVICE void product(float (&rS)[1][kCfg.block_n / 8][4], const Tile& sK) const {
    clear(rS);
    product_abt_codes<kCfg.cache>(rS, this->sQ, sK);
  }

 private:
  // Rounds a row, of which a lane has eight elements, to float16; returns the factor that the result must have.
  TESSERA_DEVICE static float to_float16(uint4& words) {
    if constexpr (kCfg.dtype == Dtype::kFloat16) return 1.0f;
    constexpr uint32 kInfinity = 0x7f80;
    uint32* const pairs[4] = {&words.x, &words.y, &words.z, &words.w};
    uint32 largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32 low = *pairs[i] & 0x7fff, high = *pairs[i] >> 16 & 0x7fff;
      largest = max(largest, max(low < kInfinity ? low : 0u, high < kInfinity ? high : 0u));
    }
    largest = __reduce_max_sync(0xffffffff, largest);
    constexpr int kBias = 127, kLargest_log2 = 14, kMost = 2 * kBias - 1;
    const int factor = min(2 * kBias + kLargest_log2 - static_cast<int>(largest >> 7), kMost);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<Dtype::kBFloat16>(*pairs[i]);
      *pairs[i] = ptx::cvt_rn_f16x2(x.x * power_of_two(factor), x.y * power_of_two(factor));
    }
    return power_of_two(2 * kBias - factor);
  }
};

// What a warp does with the scales in a segment. Of 16-bit K and V, nothing.
template <DecodeSm90Config kCfg>
struct DecodeScales {
  // Before the wait for Q; and after the barrier behind which it is visible.
  TESSERA_DEVICE void load(const DecodeSm90Params&, const Segment&) {}
  template <class Queries>
  TESSERA_DEVICE void begin(const Queries&) {}
  // Before a tile's scores are computed.
  template <class Loader>
  TESSERA_DEVICE void take(const Loader&, int, bool) {}
  // Products to scores.
  template <int kN>
  TESSERA_DEVICE void scale_scores(float (&)[1][kN][4]) const {}
  // Once scores are masked.
  template <int kN, int kD>
  TESSERA_DEVICE void prepare_weights(const float (&)[1][kN][4], float (&)[1][kD][4]) {}
  // P, before its product with V.
  template <int kN>
  TESSERA_DEVICE void scale_weights(float (&)[1][kN][4]) const {}
  // O, after all tiles.
  template <int kD>
  TESSERA_DEVICE void finish(float (&)[1][kD][4]) const {}
};

template <DecodeSm90Config kCfg>
requires(kCfg.codes()) struct DecodeScales<kCfg> {
  static constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim / 8;
  static constexpr int kBias = 127, kFinite = 255, kShift_log2 = 6;

  float of_keys, of_values;  // without key_scales
  float units[2];            // the factors of a lane's two rows of products: DecodeQueries', times of_keys
  const float* of_tile;      // key_scales: those of the tile's keys, in shared memory
  float of_value;            // key_scales: of the value of key lane % block_n of the tile
  int exponent;              // key_scales: P is divided by 2^(exponent - 127)
  bool first;                // key_scales: the warp has no tile of the segment before this one, so O is 0
  uint32 hidden;             // key_scales: bit 4 n + e is set if P[n][e] must stay 0 whatever its scale is

  TESSERA_DEVICE void load(const DecodeSm90Params& p, const Segment& segment) {
    of_keys = kCfg.key_scales ? 1.0f : p.k_scales.at(segment.batch, 0, segment.head_kv);
    of_values = kCfg.key_scales ? 1.0f : p.v_scales.at(segment.batch, 0, segment.head_kv);
  }
  template <class Queries>
  TESSERA_DEVICE void begin(const Queries& queries) {
    units[0] = queries.units[lane_row()] * of_keys, units[1] = queries.units[lane_row() + 8] * of_keys;
    exponent = kShift_log2 + 1;  // the least with which no factor is subnormal
    hidden = 0, first = true;
  }
  // seen: whether some row sees this lane's key. The scale of a value that no row sees is no part of `exponent`.
  template <class Loader>
  TESSERA_DEVICE void take(const Loader& loader, int stage, bool seen) {
    if constexpr (kCfg.key_scales) {
      const DecodeTileScales<kCfg>& of = loader.scales_of(stage);
      of_tile = of.k, of_value = seen ? of.v[lane_id() % kCfg.block_n] : 0.0f;
    }
  }

  TESSERA_DEVICE void scale_scores(float (&rS)[1][kN][4]) const {
    // units of float16 queries are of_keys
    constexpr bool kUnits = !kCfg.key_scales || kCfg.dtype != Dtype::kFloat16;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 of_keys = make_float2(1.0f, 1.0f);
      if constexpr (kCfg.key_scales) of_keys = *reinterpret_cast<const float2*>(of_tile + n * 8 + lane_col());
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kUnits) rS[0][n][e] *= units[e / 2];
        if constexpr (kCfg.key_scales) rS[0][n][e] *= e % 2 == 0 ? of_keys.x : of_keys.y;
      }
    }
  }
  // A scale that is not finite does not reach rows that do not see its key.
  TESSERA_DEVICE void prepare_weights(const float (&rS)[1][kN][4], float (&rO)[1][kD][4]) {
    if constexpr (kCfg.key_scales) {
      const bool scales_o = !first;  // 64 multiplications that a short call would wait for
      hidden = 0, first = false;
      const int bits = __float_as_int(of_value) >> 23 & kFinite;
      if (!__any_sync(0xffffffff, bits > exponent)) return;
      const int most = static_cast<int>(__reduce_max_sync(0xffffffff, static_cast<uint32>(bits < kFinite ? bits : 0)));
      if (most > exponent) {
        const float factor = most - exponent < kBias ? power_of_two(kBias - (most - exponent)) : 0.0f;
        exponent = most;
        if (scales_o) {
#pragma unroll
          for (int d = 0; d < kD; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) rO[0][d][e] *= factor;
        }
      }
      if (!__any_sync(0xffffffff, bits == kFinite)) return;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) hidden |= rS[0][n][e] == -infinity() ? 1u << (4 * n + e) : 0u;
    }
  }
  TESSERA_DEVICE void scale_weights(float (&rS)[1][kN][4]) const {
    if constexpr (!kCfg.key_scales) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rS[0][n][e] *= 1 << kShift_log2;
      return;
    }
    const float scale = of_value * power_of_two(2 * kBias + kShift_log2 - exponent);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) rS[0][n][e] *= of_column(scale, n, e % 2);
    if (hidden) [[unlikely]] {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rS[0][n][e] = hidden >> (4 * n + e) & 1 ? 0.0f : rS[0][n][e];
    }
  }
  TESSERA_DEVICE void finish(float (&rO)[1][kD][4]) const {
    const float factor = of_values * power_of_two((kCfg.key_scales ? exponent : kBias) - kShift_log2);
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) rO[0][d][e] *= factor;
  }

 private:
  // Of column 8 n + 2 c + e, from the lane that has it.
  TESSERA_DEVICE static float of_column(float of_lane, int n, int e) {
    return __shfl_sync(0xffffffff, of_lane, n * 8 + lane_col() + e);
  }
};

}  // namespace tessera
