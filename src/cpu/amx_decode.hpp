// Decoding with AMX, for bfloat16 queries. Items are as in decode.hpp, with up to 16 query rows of a KV head as one
// side of a tile. K and V of bfloat16 are both read in place; those of 8 bits become bfloat16 in scratch, 16 rows x 64
// columns at a time, beside the products of the columns before (amx_code_rows.hpp), and scores and weights are
// multiplied by the tokens' scales.
//
//   S^T [keys][rows] = K Q^T     A: K, 16 keys x 32 of d     B: Q, pairs of d, packed once
//   P [rows][keys]               S transposed: a softmax with lanes = keys, for as many rows as there are
//   O [rows][head_dim_v] += P V  A: P, rows x 16 keys        B: V, 16 keys x 32 columns
//
// A product sums over pairs, and a row of V in place is pairs of columns. With a weight in the low half of A's words
// and 0 in the high half, the product gives the even columns; the other way round, the odd ones. V therefore needs no
// packing, at the cost of twice the products. A product takes as many cycles as A has rows: up to 8 query rows are
// stored twice in one A, the upper copy for the even columns and the lower for the odd ones. More rows use two A's,
// each multiplied with all of V. The softmax of a head overlaps with the products for S of the next head. Each tile of
// K and V is prefetched into the L1 cache a few tiles before its use, so that its lines pass the core's miss buffers
// once.
//
// A NaN or an infinity of V would reach its neighbouring column as 0 x NaN, and also rows that do not see it. A block
// that a mask cuts is therefore checked first, and a part whose O is not finite at the end is computed again with every
// block checked.
#pragma once

#include "cpu/amx_decode_rows.hpp"
#include "cpu/amx_scores.hpp"

namespace tessera::cpu {
namespace {

static_assert(kDecodeRows == kTileSide);

// The largest sum of a lane's weights of a block (of two keys) before the block's maximum replaces the stale max
// (StaleMax in forward.hpp). Here each row decides by itself, not 32 together, so the bound can be low: normally
// distributed scores exceed it in 1.4 % of the blocks.
constexpr float kMostLaneSum = 4.0f;
static_assert(kAmxDecodeKeys == 2 * kLanes);

// One item's state.
template <bool kCodes>
struct AmxDecode {
  using Block = DecodeBlock<kCodes>;

  const Params& p;
  const DecodePart& part;
  const AmxDecodeScratch& scratch;
  DecodeRow* rows;          // [heads][row_count]
  int64_t q_steps, out_ld;  // of 32 along head_dim (of codes: even); floats of a row of O, of its even or odd columns
  bool k_stands, v_stands;  // rows have a fixed distance in bytes and fill whole steps, so they are read in place
  bool plain;               // a score is scale q . k
  DecodeAhead<Block> ahead;

  TESSERA_INLINE float* s_of(int64_t h) const { return scratch.s + h % 2 * p.block_n * kTileSide; }
  // Weights for the even and the odd columns, in the low and the high half of a word.
  TESSERA_INLINE uint32_t* p_of(int64_t half) const { return scratch.p + half * part.row_count * p.block_n; }
  // Row r of a head's O: its even or its odd columns.
  TESSERA_INLINE float* o_of(int64_t h, int64_t half, int64_t r) const {
    return scratch.o + ((h * 2 + half) * part.row_count + r) * out_ld;
  }
  // One A with both halves, or two.
  TESSERA_INLINE int64_t halves_of_p() const { return part.row_count <= kTileSide / 2 ? 1 : 2; }
  TESSERA_INLINE int64_t rows_of_p() const { return part.row_count * 2 / halves_of_p(); }

  // A block's rows of one head's K or V as tiles: where the first and the last 16 begin, and the distances between rows
  // and between steps of 32 columns.
  struct HeadRows {
    const char *first, *last;
    int64_t stride, step_bytes;
  };
  // The rows in place; they are copied if their distance varies or they are fewer than 32.
  TESSERA_INLINE HeadRows rows_of_head(const RowTensor& tensor, const char* const* rows_of_block, int64_t count,
                                       bool stand, int64_t h, int64_t steps, int64_t cols) const {
    const int64_t offset = h * tensor.head;
    if (stand && count == kAmxDecodeKeys) {
      return {rows_of_block[0] + offset, rows_of_block[kTileSide] + offset, tensor.row, kTileRow_bytes};
    }
    char *first = scratch.copy, *last = first + steps * kTile_bytes;
    copy_rows(first, rows_of_block, offset, 0, count, cols);
    copy_rows(last, rows_of_block, offset, kTileSide, count, cols);
    return {first, last, kTileRow_bytes, kTile_bytes};
  }

  // Codes of the block: 16 rows from `side` and the 64 columns of step `step`, which is even, as two tiles.
  TESSERA_OWN_FUNCTION void convert(const char* const* rows_of_block, int64_t offset, int64_t step, int64_t side,
                                    int64_t cols) {
    codes_to_tiles(p.kv_dtype, code_tiles(step, side), rows_of_block + side * kTileSide, offset,
                   step * kTileSteps_elems, cols, [&](int r) TESSERA_LAMBDA_INLINE { ahead.line(r); });
    ahead.next_tile();
  }
  TESSERA_INLINE char* code_tiles(int64_t step, int64_t side) const {
    return scratch.copy + (2 * step + 2 * side) * kTile_bytes;
  }

  // S^T of a head from codes: those of the next 16 rows or 64 columns are converted beside the products of these.
  template <class Beside>
  TESSERA_INLINE void code_scores(const Block& block, int64_t h, Beside&& beside) {
    const char* const q = reinterpret_cast<const char*>(scratch.q + h * q_steps * kTileSide * kTileSide);
    const int64_t offset = h * p.k.head;
    const auto multiply = [&]<int kSide>(int64_t step) TESSERA_LAMBDA_INLINE {
      const char* const k = code_tiles(step, kSide);
      tile_load<6>(q + step * kTile_bytes, kTileRow_bytes);
      tile_load<7>(k, kTileRow_bytes);
      tile_product<4 + kSide, 7, 6>();
      tile_load<6>(q + (step + 1) * kTile_bytes, kTileRow_bytes);
      tile_load<7>(k + kTile_bytes, kTileRow_bytes);
      tile_product<4 + kSide, 7, 6>();
    };
    tile_zero<4>(), tile_zero<5>();
    for (int64_t step = 0; step < q_steps; step += 2) {
      convert(block.keys, offset, step, 0, p.head_dim);
      if (step > 0) multiply.template operator()<1>(step - 2);
      beside();
      convert(block.keys, offset, step, 1, p.head_dim);
      multiply.template operator()<0>(step);
      beside();
    }
    multiply.template operator()<1>(q_steps - 2);
  }

  // S^T [block_n][16 rows] of one head. `beside` runs after every product.
  template <class Beside>
  TESSERA_INLINE void scores(const Block& block, int64_t h, Beside&& beside) {
    if constexpr (kCodes) {
      code_scores(block, h, beside);
    } else {
      element_scores(block, h, beside);
    }
    char* s = reinterpret_cast<char*>(s_of(h));
    tile_store<4>(s, kTileRow_bytes);
    tile_store<5>(s + kTile_bytes, kTileRow_bytes);
  }
  template <class Beside>
  TESSERA_INLINE void element_scores(const Block& block, int64_t h, Beside&& beside) {
    const char* q = reinterpret_cast<const char*>(scratch.q + h * q_steps * kTileSide * kTileSide);
    const HeadRows k = rows_of_head(p.k, block.keys, block.count, k_stands, h, q_steps, p.head_dim);
    tile_zero<4>(), tile_zero<5>();
    for (int64_t step = 0; step < q_steps; ++step) {
      tile_load<6>(q + step * kTile_bytes, kTileRow_bytes);
      tile_load<7>(k.first + step * k.step_bytes, k.stride);
      ahead.template lines<0>();
      tile_product<4, 7, 6>();
      beside(), ahead.template lines<1>();
      tile_load<7>(k.last + step * k.step_bytes, k.stride);
      ahead.template lines<0>();
      tile_product<5, 7, 6>();
      beside(), ahead.template lines<1>();
    }
  }

  // Transposes the scores of 16 keys and four rows from `row`, and multiplies them by the keys' scales.
  TESSERA_INLINE void transpose_scores(int64_t h, int64_t first, int64_t row) const {
    const float* at = s_of(h) + first * kTileSide + row;
    __m512 v[4];  // lanes 4 g ... of v[i] are four rows of key 4 g + i
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto four = [&](int g) TESSERA_LAMBDA_INLINE {
        __m128 rows_of_key;
        __builtin_memcpy(&rows_of_key, at + (4 * g + i) * kTileSide, sizeof rows_of_key);
        return rows_of_key;
      };
      v[i] = _mm512_broadcast_f32x4(four(0));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, four(1));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, four(2));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, four(3));
    }
    const __m512d low01 = (__m512d)_mm512_unpacklo_ps(v[0], v[1]), high01 = (__m512d)_mm512_unpackhi_ps(v[0], v[1]);
    const __m512d low23 = (__m512d)_mm512_unpacklo_ps(v[2], v[3]), high23 = (__m512d)_mm512_unpackhi_ps(v[2], v[3]);
    float* out = scratch.rows_s + row * p.block_n + first;
    const auto put = [&](int64_t r, __m512d keys) TESSERA_LAMBDA_INLINE {
      store(out + r * p.block_n, kCodes ? (VecF)keys * load(scales_of_keys(h) + first) : (VecF)keys);
    };
    put(0, _mm512_unpacklo_pd(low01, low23)), put(1, _mm512_unpackhi_pd(low01, low23));
    put(2, _mm512_unpacklo_pd(high01, high23)), put(3, _mm512_unpackhi_pd(high01, high23));
  }

  // P of one row with its stale max, without computing a maximum. false: a score is out of range, or a sum exceeds the
  // bound.
  TESSERA_INLINE bool stale_max_row(DecodeRow& row, int64_t r, int64_t count, const float* factors) const {
    const float* s = scratch.rows_s + r * p.block_n;
    uint32_t *low = p_of(0) + r * p.block_n, *high = p_of(1) + r * p.block_n;
    const FixedPointExp2<4> exponential;
    const VecF scale = splat(p.scale_log2 * kFixedPointOne), offset = splat(-row.offset * kFixedPointOne);
    VecF sum[2] = {};
    VecU out_of_range{};
    for (int64_t n = 0; n < count; n += 2 * kLanes) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i e = exponential(fma(load(s + n + i * kLanes), scale, offset));
        sum[i] += (VecF)e;
        out_of_range |= (VecU)e;
        const VecU word = (VecU)Rounded(scaled_weight(e, factors + n + i * kLanes)).bits;
        store(high + n + i * kLanes, word & 0xffff0000u);
        store(low + n + i * kLanes, word >> 16);
      }
    }
    const VecF lanes = sum[0] + sum[1];
    if (any((VecI)(out_of_range & 0x80000000u) | ~(lanes <= kMostLaneSum))) return false;
    store(row.sum, load(row.sum) + lanes);
    return true;
  }
  TESSERA_INLINE static __m512i scaled_weight(__m512i weight, const float* factors) {
    return kCodes ? (__m512i)((VecF)weight * load(factors)) : weight;
  }
  // The same with every option and mask, using the block's maximum.
  TESSERA_OWN_FUNCTION void masked_row(const Block& block, DecodeRow& row, int64_t h, int64_t r,
                                       const float* factors) const {
    float* s = scratch.rows_s + r * p.block_n;
    uint32_t *low = p_of(0) + r * p.block_n, *high = p_of(1) + r * p.block_n;
    const float rescale = decode_softmax<true>(p, part.sequence, part.batch, row, s, nullptr, block.begin, block.count);
    for (int64_t n = 0; n < padded_to(block.count, kLanes); n += kLanes) {
      const VecF weight = (VecF)scaled_weight((__m512i)load(s + n), factors + n);
      const VecU kept = weight == weight ? (VecU)Rounded((__m512i)weight).bits : splat(uint32_t{0x7fc00000});
      store(high + n, kept & 0xffff0000u);
      store(low + n, kept >> 16);
    }
    if (rescale == 1.0f) return;
    for (int64_t half = 0; half < 2; ++half) {
      float* o = o_of(h, half, r);
      for (int64_t d = 0; d < out_ld; d += kLanes) store(o + d, load(o + d) * rescale);
    }
  }
  // `factors`: of the keys' weights, after they are added to the row's sum.
  TESSERA_INLINE void softmax_row(const Block& block, int64_t h, int64_t r, const float* factors) const {
    DecodeRow& row = rows[h * part.row_count + r];
    const bool full = plain && block.count % (2 * kLanes) == 0 && block.begin >= row.low &&
                      block.begin + block.count - 1 <= row.full_high && row.stale_max != -infinity() &&
                      row.shift == 0.0f;
    if (full && stale_max_row(row, r, block.count, factors)) return;
    masked_row(block, row, h, r, factors);
  }

  // The softmax of one head, in pieces: transpositions, then rows.
  struct Softmax {
    const AmxDecode& d;
    const Block& block;
    int64_t h, fours, transpositions, units, a_call, unit = 0;
    const float* factors;

    TESSERA_INLINE Softmax(const AmxDecode& of, const Block& block_, int64_t h_, int64_t calls, const float* factors_)
        : d(of), block(block_), h(h_), factors(factors_) {
      fours = (d.part.row_count + 3) / 4;
      transpositions = h < 0 ? 0 : fours * ((block.count + kTileSide - 1) / kTileSide);
      units = h < 0 ? 0 : transpositions + d.part.row_count;
      a_call = calls > 0 ? (units + calls - 1) / calls : units;
    }
    TESSERA_INLINE void run(int64_t count) {
      for (const int64_t end = min_of(units, unit + count); unit < end; ++unit) {
        if (unit < transpositions) {
          d.transpose_scores(h, unit / fours * kTileSide, unit % fours * 4);
        } else {
          d.softmax_row(block, h, unit - transpositions, factors);
        }
      }
    }
  };

  // O += P V of the block for all columns, with one A. kAsk: the first of the two A's that use V.
  template <bool kAsk>
  TESSERA_INLINE void output(const Block& block, int64_t h, int64_t half) {
    const int64_t o_stride = out_ld * 4, p_stride = p.block_n * 4, v_steps = 2 * out_ld / kTileSteps_elems;
    const char* weights = reinterpret_cast<const char*>(p_of(half));
    tile_load<2>(weights, p_stride);
    tile_load<3>(weights + kTileRow_bytes, p_stride);
    char* o = reinterpret_cast<char*>(o_of(h, half, 0));
    if constexpr (kCodes) {
      code_output<kAsk>(block, h, o, o_stride, v_steps);
      return;
    }
    const HeadRows v = rows_of_head(p.v, block.values, block.count, v_stands, h, v_steps, p.head_dim_v);
    for (int64_t step = 0; step < v_steps; ++step, o += kTileRow_bytes) {
      tile_load<0>(o, o_stride);
      tile_load<6>(v.first + step * v.step_bytes, v.stride);
      if constexpr (kAsk) ahead.template lines<0>();
      tile_product<0, 2, 6>();
      if constexpr (kAsk) ahead.template lines<1>();
      if (block.count > kTileSide) {  // otherwise P's second half is that of an earlier block
        tile_load<7>(v.last + step * v.step_bytes, v.stride);
        if constexpr (kAsk) ahead.template lines<0>();
        tile_product<0, 3, 7>();
        if constexpr (kAsk) ahead.template lines<1>();
      }
      tile_store<0>(o, o_stride);
    }
  }

  // The same from codes, which the first of the two A's converts.
  template <bool kAsk>
  TESSERA_INLINE void code_output(const Block& block, int64_t h, char* o, int64_t o_stride, int64_t v_steps) {
    const auto multiply = [&](int64_t step) TESSERA_LAMBDA_INLINE {
      for (int64_t i = step; i < step + 2; ++i, o += kTileRow_bytes) {
        tile_load<0>(o, o_stride);
        tile_load<6>(code_tiles(step, 0) + (i - step) * kTile_bytes, kTileRow_bytes);
        tile_product<0, 2, 6>();
        if (block.count > kTileSide) {
          tile_load<7>(code_tiles(step, 1) + (i - step) * kTile_bytes, kTileRow_bytes);
          tile_product<0, 3, 7>();
        }
        tile_store<0>(o, o_stride);
      }
    };
    for (int64_t step = 0; step < v_steps; step += 2) {
      if constexpr (kAsk) {
        convert(block.values, h * p.v.head, step, 0, p.head_dim_v);
        convert(block.values, h * p.v.head, step, 1, p.head_dim_v);
      }
      if (step > 0) multiply(step - 2);
    }
    multiply(v_steps - 2);
  }

  // With codes: [heads][block_n] scales of the block's keys and values, 1 past the last one.
  TESSERA_INLINE float* scales_of_keys(int64_t h) const { return scratch.scales + h * p.block_n; }
  TESSERA_INLINE float* scales_of_values(int64_t h) const { return scales_of_keys(part.heads + h); }
  TESSERA_INLINE void read_scales(const Block& block) const {
    if constexpr (kCodes) {
      block.read_scales(scales_of_keys(0), block.key_scales, p.k_scales, part.heads);
      block.read_scales(scales_of_values(0), block.value_scales, p.v_scales, part.heads);
    }
  }

  // The rows of all KV heads against one block. `look`: checks V for NaN and infinities.
  TESSERA_OWN_FUNCTION void attend(const Block& block, bool look) {
    alignas(64) static constexpr auto kOnes = [] {
      std::array<float, kAmxDecodeKeys> ones{};
      for (float& one : ones) one = 1.0f;
      return ones;
    }();
    const int64_t products = kCodes ? q_steps : 2 * q_steps;
    read_scales(block);
    scores(block, 0, [] {});
    for (int64_t h = 0; h < part.heads; ++h) {
      // Weights that cannot be scaled before they are rounded: values are scaled, one by one.
      const bool scale_values = kCodes && !may_scale_weights(scales_of_values(h), kAmxDecodeKeys);
      const float* const factors = kCodes && !scale_values ? scales_of_values(h) : kOnes.data();
      Softmax softmax(*this, block, h, h + 1 < part.heads ? products : 0, factors);
      if (h + 1 < part.heads) scores(block, h + 1, [&]() TESSERA_LAMBDA_INLINE { softmax.run(softmax.a_call); });
      softmax.run(softmax.units);
      if (scale_values || (look && !values_are_finite(block, h))) {
        output_of_seen(block, h, scale_values ? scales_of_values(h) : kOnes.data());
        continue;
      }
      output<true>(block, h, 0);
      if (halves_of_p() == 2) output<false>(block, h, 1);
    }
  }

 private:
  // Copies rows first ... first + 15 with `cols` columns, which begin at `offset` bytes, into tiles of 32 columns, with
  // zeros past the last row and column.
  TESSERA_OWN_FUNCTION static void copy_rows(char* tiles, const char* const* rows_of_block, int64_t offset,
                                             int64_t first, int64_t count, int64_t cols) {
    const char* pointers[kTileSide];
    for (int64_t r = 0; r < kTileSide; ++r) pointers[r] = rows_of_block[first + r] + offset;
    pack_rows(tiles, pointers, max_of<int64_t>(0, count - first), cols);
  }
  TESSERA_OWN_FUNCTION bool values_are_finite(const Block& block, int64_t h) const {
    if constexpr (kCodes) {
      bool finite = true;
      for (int64_t n = 0; n < block.count; ++n) {
        finite &= code_row_is_finite(p.kv_dtype, block.values[n] + h * p.v.head, p.head_dim_v);
      }
      return finite;
    }
    return rows_are_finite(p.dtype, block.count, p.head_dim_v,
                           [&](int64_t n) { return block.values[n] + h * p.v.head; });
  }
  // O += P V over what each row sees. `scales`: of the values.
  TESSERA_COLD_FUNCTION void output_of_seen(const Block& block, int64_t h, const float* scales) const {
    alignas(64) float value[kMaxRowFloats];
    for (int64_t n = 0; n < block.count; ++n) {
      const char* const from = block.values[n] + h * p.v.head;
      if constexpr (kCodes) {
        read_codes(p.kv_dtype, value, from, p.head_dim_v, scales[n]);
      } else {
        read_row<Bfloat16Elem>(value, from, p.head_dim_v);
      }
      for (int64_t r = 0; r < part.row_count; ++r) {
        const DecodeRow& row = rows[h * part.row_count + r];
        if (block.begin + n < row.low || block.begin + n > row.high) continue;
        if (!sees_entry(p, {part.sequence, part.batch, row.head, row.query, block.begin + n})) continue;
        const uint32_t bits = p_of(1)[r * p.block_n + n];
        float weight;
        __builtin_memcpy(&weight, &bits, sizeof weight);
        for (int64_t d = 0; d < p.head_dim_v; ++d) {
          const int64_t place = kCodes ? code_place(d) : d;
          o_of(h, place % 2, r)[place / 2] += weight * value[d];
        }
      }
    }
  }
};

// Whether O of all rows is finite.
template <bool kCodes>
TESSERA_OWN_FUNCTION bool output_is_finite(const AmxDecode<kCodes>& d) {
  VecF sum{};  // sums of 0 x, which are 0 or NaN
  for (int64_t h = 0; h < d.part.heads; ++h) {
    const float* o = d.o_of(h, 0, 0);
    for (int64_t i = 0; i < 2 * d.part.row_count * d.out_ld; i += kLanes) sum = fma(load(o + i), VecF{}, sum);
  }
  return !any(sum != VecF{});
}

// All blocks of a part, whose rows are as init_decode_rows leaves them. `look`: every block's V is checked for NaN and
// infinities.
template <bool kCodes>
TESSERA_OWN_FUNCTION void decode_part(AmxDecode<kCodes>& d, const KeyRange& keys, bool look) {
  const Params& p = d.p;
  const DecodePart& part = d.part;
  __builtin_memset(d.scratch.o, 0, static_cast<size_t>(part.heads * 2 * part.row_count * d.out_ld) * sizeof(float));
  int64_t all_low = 0, all_high = part.key_end;  // keys that every row sees
  for (int64_t i = 0; i < part.heads * part.row_count; ++i) {
    all_low = max_of(all_low, d.rows[i].low), all_high = min_of(all_high, d.rows[i].full_high);
  }
  if (keys.low > keys.high) return;
  DecodeBlock<kCodes> blocks[2];
  blocks[0].locate_part(p, part, keys.low, keys.high + 1);
  for (int64_t key = keys.low, now = 0; key <= keys.high; key += p.block_n, now ^= 1) {
    if (p.cancelled && p.cancelled(p.cancel)) return;
    const DecodeBlock<kCodes>& block = blocks[now];
    const int64_t next = key + p.block_n <= keys.high ? now ^ 1 : now;
    if (next != now) blocks[next].locate_part(p, part, key + p.block_n, keys.high + 1);
    d.ahead.block(block, blocks[next]);
    d.attend(block, look || key < all_low || key + block.count - 1 > all_high);
  }
}

template <bool kCodes>
void decode_by_tiles(const Params& p, int64_t item, char* scratch_base) {
  const DecodePart part(p, item);
  const AmxDecodeScratch scratch = carve_amx_decode(
      scratch_base, {part.heads, kDecodeRows, p.block_n, p.head_dim, p.head_dim_v, kLanes, 0, sizeof(DecodeRow)});
  constexpr int64_t kStep = kCodes ? kTileCodes : kTileSteps_elems;
  const bool neighbours = !p.page_table || p.page_size % kTileSide == 0;  // 16 keys from a multiple of 16 on
  const bool k_stands = neighbours && p.head_dim % kTileSteps_elems == 0;
  const bool v_stands = neighbours && p.head_dim_v % kTileSteps_elems == 0;
  AmxDecode<kCodes> d{p,
                      part,
                      scratch,
                      reinterpret_cast<DecodeRow*>(scratch.rows),
                      padded_to(p.head_dim, kStep) / kTileSteps_elems,
                      padded_to(p.head_dim_v, kStep) / 2,
                      k_stands,
                      v_stands,
                      !ScoreStep<KeyLanes>::changes_scores(p),
                      DecodeAhead<DecodeBlock<kCodes>>(p, part, !kCodes && (!k_stands || !v_stands))};
  const KeyRange keys = init_decode_rows(p, part, d.rows);
  for (int64_t h = 0; h < part.heads; ++h) {
    const char* q_rows[kTileSide];
    for (int64_t r = 0; r < part.row_count; ++r) q_rows[r] = decode_query(p, part, d.rows[h * part.row_count + r]);
    uint32_t* const q = scratch.q + h * d.q_steps * kTileSide * kTileSide;
    if constexpr (kCodes) {
      pack_code_column_pairs(q, q_rows, part.row_count, p.head_dim);
    } else {
      pack_column_pairs(q, kTileSide, q_rows, part.row_count, kTileSide, p.head_dim);
    }
  }
  __builtin_memset(scratch.p, 0, static_cast<size_t>(2 * kTileSide * p.block_n) * sizeof(uint32_t));
  tiles_configure(d.rows_of_p());
  decode_part(d, keys, false);
  if (!output_is_finite(d)) {  // a NaN or an infinity of V has also reached its neighbouring column as 0 x NaN
    init_decode_rows(p, part, d.rows);
    decode_part(d, keys, true);
  }
  tiles_release();
  for (int64_t h = 0; h < part.heads; ++h) {
    DecodeRow* const rows = d.rows + h * part.row_count;
    if constexpr (kCodes) {
      // No backward pass reads 8 bits: no row's scores need the bits of the tiled kernels.
      for (int64_t r = 0; r < part.row_count; ++r) {
        rows[r].as_tiled = log_sum_exp(p, rows[r].shift, rows[r].offset, __builtin_log2f(sum_lanes(load(rows[r].sum))));
      }
    } else if (has_huge_rows(p, rows, part.row_count)) {
      // The backward pass of so few rows uses no tiles: the vectors compute its products.
      const auto* pairs = reinterpret_cast<const float*>(scratch.q + h * d.q_steps * kTileSide * kTileSide);
      sum_as_tiled<Op::kDot>(p, part, rows, part.row_count, part.head_begin + h, pairs, keys, nullptr);
    }
    for (int64_t r = 0; r < part.row_count; ++r) {
      write_decode_row(p, part, rows[r], d.o_of(h, 0, r), [&](int64_t column) {
        const int64_t place = kCodes ? code_place(column) : column;
        return place % 2 * part.row_count * d.out_ld + place / 2;
      });
    }
  }
}

inline void amx_decode_item(const Params& p, int64_t item, char* scratch_base) {
  if (p.kv_elem_bytes == 1) return decode_by_tiles<true>(p, item, scratch_base);
  decode_by_tiles<false>(p, item, scratch_base);
}

}  // namespace
}  // namespace tessera::cpu
