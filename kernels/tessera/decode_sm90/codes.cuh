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
  float units[kCfg.rows];  // a row's product times its unit is that of Q and codes
  static constexpr int kOwnRows = (kCfg.rows + kCfg.warps - 1) / kCfg.warps, kWords = kCfg.head_dim * 2 / kLoadBytes;
  static_assert(kCfg.rows % kOwnRows == 0 && kWords <= 32, "a lane has one word of each row of its warp");

  // After load(), once all copies are complete, by all threads: rounds Q to float16, in the order of code_pair_place.
  TESSERA_DEVICE void convert() {
    const int lane = lane_id(), row0 = uniform(static_cast<int>(threadIdx.x) / 32) * kOwnRows;
    if (row0 >= kCfg.rows) return;
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

// With up to 128 columns and 16 rows, Q's fragments are kept in registers: at D = 128, 8 of a tile's 24 ldmatrix, and
// half as many bytes as its codes.
template <DecodeSm90Config kCfg>
requires(kCfg.codes()) class DecodeQueryFragments<kCfg> {
 public:
  TESSERA_DEVICE explicit DecodeQueryFragments(const DecodeQueries<kCfg>& shared) : queries(shared) {
    if constexpr (kKept) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_a_codes(kept[k], queries.sQ, k);
    }
  }
  template <class Tile>
  TESSERA_DEVICE void product(DecodeScoreTile<kCfg>& rS, const Tile& sK) const {
    clear(rS);
    const auto fragments = [&](uint32(&a)[kM][4], int k) {
      if constexpr (kKept) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = kept[k][m][i];
      } else {
        load_a_codes(a, queries.sQ, k);
      }
    };
    product_abt_codes<kCfg.cache>(rS, fragments, sK);
  }

 private:
  static constexpr bool kKept = kCfg.rows <= 16 && kCfg.head_dim <= 128;
  static constexpr int kM = kCfg.row_tiles(), kSteps = kCfg.head_dim / 16;
  const DecodeQueries<kCfg>& queries;
  uint32 kept[kKept ? kSteps : 1][kM][4];
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
  TESSERA_DEVICE void take(const Loader&, int, const KeyRange&, int) {}
  // Products to scores.
  TESSERA_DEVICE void scale_scores(DecodeScoreTile<kCfg>&) const {}
  // Once scores are masked.
  TESSERA_DEVICE void prepare_weights(const DecodeScoreTile<kCfg>&, DecodeOutput<kCfg>&) {}
  // P, before the tile's scales are overwritten.
  TESSERA_DEVICE void scale_weights(DecodeScoreTile<kCfg>&) const {}
  // O, after all tiles.
  TESSERA_DEVICE void finish(DecodeOutput<kCfg>&) const {}
};

template <DecodeSm90Config kCfg>
requires(kCfg.codes()) struct DecodeScales<kCfg> {
  static constexpr int kM = kCfg.row_tiles(), kHalves = kCfg.row_halves(), kN = kCfg.block_n / 8, kE = 2 * kHalves;
  static constexpr int kBias = 127, kFinite = 255, kShift_log2 = 6;
  static_assert(4 * kN <= 32, "a bit of `hidden` for each element");

  float of_keys, of_values;               // without key_scales
  float units[kM][kHalves];               // the factors of a lane's rows of products: DecodeQueries', times of_keys
  const DecodeTileScales<kCfg>* of_tile;  // key_scales: those of the tile, in shared memory
  int finite_bits;    // key_scales: the largest exponent, as float32 stores it, of the scales of this lane's
                      // values, of keys that some row sees and finite scales alone
  int all_bits;       // key_scales: the same of all of the lane's keys
  int exponent;       // key_scales: P is divided by 2^(exponent - 127)
  bool first;         // key_scales: the warp has no tile of the segment before this one, so O is 0
  uint32 hidden[kM];  // key_scales: bit 4 n + e is set if P[m][n][e] must stay 0 whatever its scale is

  TESSERA_DEVICE void load(const DecodeSm90Params& p, const Segment& segment) {
    of_keys = kCfg.key_scales ? 1.0f : p.k_scales.at(segment.batch, 0, segment.head_kv);
    of_values = kCfg.key_scales ? 1.0f : p.v_scales.at(segment.batch, 0, segment.head_kv);
  }
  template <class Queries>
  TESSERA_DEVICE void begin(const Queries& queries) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        units[m][half] = queries.units[m * 16 + half * 8 + lane_row()] * of_keys;
      }
    exponent = kShift_log2 + 1;  // the least with which no factor is subnormal
    show_all();
    first = true;
  }
  // seen: the keys that some row sees. The scale of a value that no row sees is no part of `exponent`.
  template <class Loader>
  TESSERA_DEVICE void take(const Loader& loader, int stage, const KeyRange& seen, int key0) {
    if constexpr (kCfg.key_scales) {
      of_tile = &loader.scales_of(stage);
      finite_bits = all_bits = 0;
#pragma unroll
      for (int first = 0; first < kCfg.block_n; first += 32) {
        const int key = first + lane_id() % min(kCfg.block_n, 32),
                  bits = __float_as_int(of_tile->v[key]) >> 23 & kFinite;
        all_bits = max(all_bits, bits);
        if (bits < kFinite && seen.holds(key0 + key, 1)) finite_bits = max(finite_bits, bits);
      }
    }
  }

  TESSERA_DEVICE void scale_scores(DecodeScoreTile<kCfg>& rS) const {
    // units of float16 queries are of_keys
    constexpr bool kUnits = !kCfg.key_scales || kCfg.dtype != Dtype::kFloat16;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 of_keys = make_float2(1.0f, 1.0f);
      if constexpr (kCfg.key_scales) of_keys = *reinterpret_cast<const float2*>(of_tile->k + n * 8 + lane_col());
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < kE; ++e) {
          if constexpr (kUnits) rS[m][n][e] *= units[m][e / 2];
          if constexpr (kCfg.key_scales) rS[m][n][e] *= e % 2 == 0 ? of_keys.x : of_keys.y;
        }
    }
  }
  // A scale that is not finite, or that of a hidden key, does not reach rows that do not see its key.
  TESSERA_DEVICE void prepare_weights(const DecodeScoreTile<kCfg>& rS, DecodeOutput<kCfg>& output) {
    if constexpr (kCfg.key_scales) {
      const bool scales_o = !first;  // multiplications that a short call would wait for
      show_all();
      first = false;
      if (!__any_sync(0xffffffff, all_bits > exponent)) return;
      const int most = static_cast<int>(__reduce_max_sync(0xffffffff, static_cast<uint32>(finite_bits)));
      if (most > exponent) {
        if (scales_o) output.multiply(most - exponent < kBias ? power_of_two(kBias - (most - exponent)) : 0.0f);
        exponent = most;
      }
      if (!__any_sync(0xffffffff, all_bits > exponent)) return;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < kE; ++e) hidden[m] |= rS[m][n][e] == -infinity() ? 1u << (4 * n + e) : 0u;
    }
  }
  TESSERA_DEVICE void scale_weights(DecodeScoreTile<kCfg>& rP) const {
    const float unit = power_of_two(kCfg.key_scales ? 2 * kBias + kShift_log2 - exponent : kBias + kShift_log2);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 factors = make_float2(unit, unit);
      if constexpr (kCfg.key_scales) {
        const float2 of_values = *reinterpret_cast<const float2*>(of_tile->v + n * 8 + lane_col());
        factors = make_float2(of_values.x * unit, of_values.y * unit);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < kE; ++e) rP[m][n][e] *= e % 2 == 0 ? factors.x : factors.y;
    }
    if constexpr (kCfg.key_scales) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (hidden[m]) [[unlikely]] {
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < kE; ++e) rP[m][n][e] = hidden[m] >> (4 * n + e) & 1 ? 0.0f : rP[m][n][e];
        }
      }
    }
  }
  TESSERA_DEVICE void finish(DecodeOutput<kCfg>& output) const {
    output.multiply(of_values * power_of_two((kCfg.key_scales ? exponent : kBias) - kShift_log2));
  }

 private:
  TESSERA_DEVICE void show_all() {
#pragma unroll
    for (int m = 0; m < kM; ++m) hidden[m] = 0;
  }
};

}  // namespace tessera
