// Decoding by AMX, for bfloat16: an item as in decode.hpp, with up to 16 query rows a KV head as one side of a tile. K and V are
// both taken from memory as they lie.
//
//   S^T [keys][rows] = K Q^T     A: K, 16 keys x 32 of d     B: Q, pairs of d, packed once
//   P [rows][keys]               S transposed: a softmax of lanes = keys, for as many rows as there are
//   O [rows][head_dim_v] += P V  A: P, rows x 16 keys        B: V, 16 keys x 32 columns
//
// A product sums over pairs, and a row of V is pairs of columns: with a weight in the low half of A's words and 0 in the high
// half it gives the even columns, the other way round the odd ones. So V needs no packing, for twice the products. A product
// takes as many cycles as A has rows: up to 8 query rows stand twice in one A, above for the even columns and below for the
// odd ones; more are two A's, of which each meets all of V. S and Q are as many columns wide as there are rows.
//
// 32 keys of one KV head are a unit, and units follow each other through three steps, so that neither a product nor the softmax
// waits for what has just begun:
//
//   stage        u                u + 1
//   products     S(u + 1)         S(u + 2)
//                P V of u - 1     P V of u          in turn with those of S
//   softmax      of u             of u + 1          in pieces beside them
//
// After each product some rows of the next block of keys are asked for, in the order in which they lie, into the second cache:
// the hardware's prefetchers see one stream of neighbours and run ahead of it.
//
// A NaN or an infinity of V would reach its neighbouring column as 0 x NaN, and rows that do not see it. So a block that a mask
// cuts is looked over first, and a part whose O is not finite in the end is done again with every block looked over.
#pragma once

#include "cpu/amx_decode_blocks.hpp"

namespace tessera::cpu {
namespace {

static_assert(kDecodeRows == kTileSide && kAmxDecodeKeys == 2 * kTileSide, "a block is two tiles of K");
constexpr int64_t kRowsTogether = 4;  // whose S is transposed, and whose softmax is taken, together

// The keys of one block and one KV head.
struct DecodeUnit {
  const DecodeBlock* block = nullptr;  // NULL: there is none
  int64_t head = 0, index = 0;
  bool look = false;  // V is looked over for NaN and infinities
};

// One item's state.
struct AmxDecode {
  const Params& p;
  const DecodePart& part;
  const AmxDecodeScratch& scratch;
  DecodeRow* rows;          // [heads][row_count]
  int64_t q_steps, out_ld;  // of 32 along head_dim; floats of a row of O, of its even or odd columns
  bool k_stands, v_stands;  // rows are a fixed number of bytes apart, and fill whole steps
  bool plain;               // a score is scale q . k
  DecodePrefetch prefetch;

  // Columns of S and of Q: as many as there are rows, in fours.
  TESSERA_INLINE int64_t columns() const { return padded_to(part.row_count, kRowsTogether); }
  // [32][columns]
  TESSERA_INLINE float* s_of(const DecodeUnit& unit) const {
    return scratch.s + unit.index % 2 * kAmxDecodeKeys * kTileSide;
  }
  // [rows][32] weights of the even and of the odd columns, in the low and in the high half of a word.
  TESSERA_INLINE uint32_t* p_of(const DecodeUnit& unit, int64_t half) const {
    return scratch.p + (unit.index % 2 * 2 * kTileSide + half * part.row_count) * kAmxDecodeKeys;
  }
  // Row r of a head's O, its even or odd columns.
  TESSERA_INLINE float* o_of(int64_t h, int64_t half, int64_t r) const {
    return scratch.o + ((h * 2 + half) * part.row_count + r) * out_ld;
  }
  // One A of both halves, or two.
  TESSERA_INLINE int64_t halves_of_p() const { return part.row_count <= kTileSide / 2 ? 1 : 2; }
  TESSERA_INLINE int64_t rows_of_p() const { return part.row_count * 2 / halves_of_p(); }

  // S^T of a unit. `beside` runs after every product; between a step's two products runs `between`.
  template <class Between, class Beside>
  TESSERA_INLINE void scores(const DecodeUnit& unit, Between&& between, Beside&& beside) {
    const DecodeBlock& block = *unit.block;
    const int64_t column_bytes = columns() * 4, q_tile_bytes = kTileSide * column_bytes;
    const char* q = reinterpret_cast<const char*>(scratch.q) + unit.head * q_steps * q_tile_bytes;
    const char *a0 = block.keys[0] + unit.head * p.k.head, *a1 = nullptr;
    int64_t stride = p.k.row, step_bytes = kTileRow_bytes;
    if (k_stands && block.count == kAmxDecodeKeys) {
      a1 = block.keys[kTileSide] + unit.head * p.k.head;
    } else {
      stride = kTileRow_bytes, step_bytes = kTile_bytes;
      char *copy0 = scratch.k_copy, *copy1 = copy0 + q_steps * kTile_bytes;
      copy_rows(copy0, block.keys, unit.head * p.k.head, 0, block.count, p.head_dim);
      copy_rows(copy1, block.keys, unit.head * p.k.head, kTileSide, block.count, p.head_dim);
      a0 = copy0, a1 = copy1;
    }
    tile_zero<4>(), tile_zero<5>();
    for (int64_t step = 0; step < q_steps; ++step) {
      tile_load<3>(q + step * q_tile_bytes, column_bytes);
      tile_load<6>(a0 + step * step_bytes, stride);
      tile_product<4, 6, 3>();
      beside();
      between([&]() TESSERA_LAMBDA_INLINE {
        tile_load<6>(a1 + step * step_bytes, stride);
        tile_product<5, 6, 3>();
        beside();
      });
    }
    char* s = reinterpret_cast<char*>(s_of(unit));
    tile_store<4>(s, column_bytes);
    tile_store<5>(s + q_tile_bytes, column_bytes);
  }

  // The rows of V of one unit times its P, by steps: 16 keys and 64 columns (or the 32 last), of what one A gives.
  struct Output {
    AmxDecode& d;
    const DecodeUnit unit;
    int64_t left = 0;                       // steps
    int64_t half = 0, column = 0, key = 0;  // of the next one

    TESSERA_INLINE Output(AmxDecode& of, const DecodeUnit& unit_) : d(of), unit(unit_) {
      if (!unit.block) return;
      if (unit.look && !d.values_are_finite(unit)) {
        d.output_of_seen(unit);
        return;
      }
      constexpr int64_t kColumns = 2 * kTileSteps_elems;
      left = d.halves_of_p() * ((2 * d.out_ld + kColumns - 1) / kColumns) *
             ((unit.block->count + kTileSide - 1) / kTileSide);
    }
    // `between` runs after the first product; `beside` after both of V.
    template <class Between, class Beside>
    TESSERA_INLINE void step(Between&& between, Beside&& beside) {
      if (left == 0) return between();
      --left;
      const DecodeBlock& block = *unit.block;
      const bool two = column + kTileSteps_elems < 2 * d.out_ld;
      char* o = reinterpret_cast<char*>(d.o_of(unit.head, half, 0) + column / 2);
      const int64_t o_stride = d.out_ld * 4;
      if (key == 0) {
        tile_load<0>(o, o_stride);
        if (two) tile_load<1>(o + kTileRow_bytes, o_stride);
      }
      const char* v = block.values[key] + unit.head * d.p.v.head + column * 2;
      int64_t stride = d.p.v.row, group_bytes = kTileRow_bytes;
      if (!d.v_stands || key + kTileSide > block.count) {
        copy_rows(d.scratch.v_copy, block.values, unit.head * d.p.v.head + column * 2, key, block.count,
                  min_of<int64_t>(d.p.head_dim_v - column, 2 * kTileSteps_elems));
        v = d.scratch.v_copy, stride = kTileRow_bytes, group_bytes = kTile_bytes;
      }
      tile_load<2>(d.p_of(unit, half) + key, kAmxDecodeKeys * 4);
      tile_load<7>(v, stride);
      tile_product<0, 2, 7>();
      beside();
      between();
      if (two) {
        tile_load<7>(v + group_bytes, stride);
        tile_product<1, 2, 7>();
        beside();
      }
      key += kTileSide;
      if (key < block.count) return;
      tile_store<0>(o, o_stride);
      if (two) tile_store<1>(o + kTileRow_bytes, o_stride);
      key = 0, column += 2 * kTileSteps_elems;
      if (column >= 2 * d.out_ld) column = 0, ++half;
    }
    template <class Beside>
    TESSERA_INLINE void rest(Beside&& beside) {
      while (left > 0) step([] {}, beside);
    }
  };

  // The softmax of one unit, in pieces: of 16 keys and four rows, or, where an option or a mask is in its way, two pieces' work in
  // the second.
  struct Softmax {
    const AmxDecode& d;
    const DecodeUnit unit;
    int64_t pieces = 0, done = 0;
    bool usual = false;  // no maximum is looked for: the four rows' stale max serves
    VecF offset{};       // lanes = rows, again and again
    VecF sum[kRowsTogether];
    VecU out_of_range[kRowsTogether];

    TESSERA_INLINE Softmax(const AmxDecode& of, const DecodeUnit& unit_) : d(of), unit(unit_) {
      if (unit.block) pieces = 2 * d.columns() / kRowsTogether;
    }
    TESSERA_INLINE void run_to(int64_t end) {
      for (end = min_of(end, pieces); done < end; ++done) {
        const int64_t first_row = done / 2 * kRowsTogether, count = min_of(kRowsTogether, d.part.row_count - first_row);
        DecodeRow* rows = d.rows + unit.head * d.part.row_count + first_row;
        if (done % 2 == 0) begin(rows, count);
        if (usual) exponentials(first_row, count, done % 2 * kTileSide);
        if (done % 2 == 1) finish(rows, first_row, count);
      }
    }

   private:
    TESSERA_INLINE void begin(const DecodeRow* rows, int64_t count) {
      const DecodeBlock& block = *unit.block;
      usual = d.plain && block.count == kAmxDecodeKeys;
      alignas(16) float offsets[kRowsTogether] = {};
      for (int64_t r = 0; r < count; ++r) {
        const DecodeRow& row = rows[r];
        usual &=
            block.begin >= row.low && block.begin + kAmxDecodeKeys - 1 <= row.full_high && row.stale_max != -infinity();
        offsets[r] = -row.stale_max * kFixedPointOne;
      }
      offset = (VecF)_mm512_broadcast_f32x4(_mm_load_ps(offsets));
#pragma GCC unroll 4
      for (int i = 0; i < kRowsTogether; ++i) sum[i] = VecF{}, out_of_range[i] = VecU{};
    }
    // P of 16 keys and `count` rows.
    TESSERA_INLINE void exponentials(int64_t first_row, int64_t count, int64_t key) {
      __m512 v[kRowsTogether];
      d.load_fours(v, unit, key, first_row);
      const FixedPointExp2<4> exponential;
      const VecF scale = splat(d.p.scale_log2 * kFixedPointOne);
#pragma GCC unroll 4
      for (int i = 0; i < kRowsTogether; ++i) v[i] = (__m512)exponential(fma((VecF)v[i], scale, offset));
      d.transpose_fours(v);
      uint32_t* low = d.p_of(unit, 0) + first_row * kAmxDecodeKeys + key;
      uint32_t* high = d.p_of(unit, 1) + first_row * kAmxDecodeKeys + key;
#pragma GCC unroll 4
      for (int r = 0; r < kRowsTogether; ++r) {
        if (r >= count) break;
        sum[r] += (VecF)v[r];
        out_of_range[r] |= (VecU)v[r];
        const VecU word = (VecU)Rounded((__m512i)v[r]).bits;
        store(high + r * kAmxDecodeKeys, word & 0xffff0000u);
        store(low + r * kAmxDecodeKeys, word >> 16);
      }
    }
    // The rows' sums. What is out of range, or whose sum is beyond the bound, is done with its maximum.
    TESSERA_INLINE void finish(DecodeRow* rows, int64_t first_row, int64_t count) {
      VecF total[kRowsTogether];
      VecI again[kRowsTogether], some{};
#pragma GCC unroll 4
      for (int r = 0; r < kRowsTogether; ++r) {
        if (r >= count) break;
        total[r] = load(rows[r].sum) + sum[r];
        again[r] = usual ? (VecI)(out_of_range[r] & 0x80000000u) | ~(total[r] <= kStaleMaxBound) : splat(-1);
        some |= again[r];
      }
      const bool all_served = !any(some);
      if (!all_served) d.transpose_scores(unit, first_row);
      for (int64_t r = 0; r < count; ++r) {
        if (all_served || !any(again[r])) {
          store(rows[r].sum, total[r]);
        } else {
          d.masked_row(unit, rows[r], first_row + r);
        }
      }
    }
  };

  // S of 16 keys from `key` and four rows from `row`: vectors of four keys each, in the order that transpose_fours takes.
  TESSERA_INLINE void load_fours(__m512 (&v)[kRowsTogether], const DecodeUnit& unit, int64_t key, int64_t row) const {
    const int64_t ld = columns();
    const float* at = s_of(unit) + key * ld + row;
    if (ld == kRowsTogether) {
#pragma GCC unroll 4
      for (int i = 0; i < kRowsTogether; ++i) v[i] = (__m512)load(at + i * kLanes);  // keys 4 i ...
      return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRowsTogether; ++i) {  // keys 4 i ..., too
      const auto four = [&](int n) TESSERA_LAMBDA_INLINE { return _mm_loadu_ps(at + (4 * i + n) * ld); };
      v[i] = _mm512_broadcast_f32x4(four(0));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, four(1));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, four(2));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, four(3));
    }
  }
  // Lanes 4 n ... of v[i]: four rows of key 4 i + n. Then v[r]: row r of 16 keys.
  TESSERA_INLINE static void transpose_fours(__m512 (&v)[kRowsTogether]) {
    const __m512d low01 = (__m512d)_mm512_unpacklo_ps(v[0], v[1]), high01 = (__m512d)_mm512_unpackhi_ps(v[0], v[1]);
    const __m512d low23 = (__m512d)_mm512_unpacklo_ps(v[2], v[3]), high23 = (__m512d)_mm512_unpackhi_ps(v[2], v[3]);
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    v[0] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpacklo_pd(low01, low23));
    v[1] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpackhi_pd(low01, low23));
    v[2] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpacklo_pd(high01, high23));
    v[3] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpackhi_pd(high01, high23));
  }
  // rows_s [4][32] of four rows from `row`.
  TESSERA_OWN_FUNCTION void transpose_scores(const DecodeUnit& unit, int64_t row) const {
    for (int64_t key = 0; key < kAmxDecodeKeys; key += kTileSide) {
      __m512 v[kRowsTogether];
      load_fours(v, unit, key, row);
      transpose_fours(v);
      for (int r = 0; r < kRowsTogether; ++r) store(scratch.rows_s + r * kAmxDecodeKeys + key, (VecF)v[r]);
    }
  }
  // P of row r with every option and mask, by the block's maximum, from rows_s.
  TESSERA_OWN_FUNCTION void masked_row(const DecodeUnit& unit, DecodeRow& row, int64_t r) const {
    const DecodeBlock& block = *unit.block;
    float* s = scratch.rows_s + r % kRowsTogether * kAmxDecodeKeys;
    uint32_t *low = p_of(unit, 0) + r * kAmxDecodeKeys, *high = p_of(unit, 1) + r * kAmxDecodeKeys;
    const float rescale = decode_softmax(p, part.sequence, row, s, block.begin, block.count);
    for (int64_t n = 0; n < padded_to(block.count, kLanes); n += kLanes) {
      const VecU word = (VecU)Rounded((__m512i)load(s + n)).bits;
      const VecU kept = load(s + n) == load(s + n) ? word : splat(uint32_t{0x7fc00000});
      store(high + n, kept & 0xffff0000u);
      store(low + n, kept >> 16);
    }
    if (rescale == 1.0f) return;
    for (int64_t half = 0; half < 2; ++half) {
      float* o = o_of(unit.head, half, r);
      for (int64_t d = 0; d < out_ld; d += kLanes) store(o + d, load(o + d) * rescale);
    }
  }

  // S of the next unit, the softmax of the present one and P V of the one before.
  TESSERA_OWN_FUNCTION void stage(const DecodeUnit& next, const DecodeUnit& now, const DecodeUnit& before) {
    Output output(*this, before);
    Softmax softmax(*this, now);
    const auto ask = [&]() TESSERA_LAMBDA_INLINE { prefetch.lines<4>(); };
    if (part.heads == 1) output.rest(ask);  // the softmax may rescale the same head's O
    if (next.block) {
      const int64_t steps = (output.left + q_steps - 1) / q_steps;
      const int64_t pieces_a_product = (softmax.pieces << 16) / (2 * q_steps);
      int64_t pieces = pieces_a_product / 2 + 1;
      scores(
          next,
          [&](auto&& second_product) TESSERA_LAMBDA_INLINE {
            output.step(second_product, ask);
            for (int64_t i = 1; i < steps; ++i) output.step([] {}, ask);
          },
          [&]() TESSERA_LAMBDA_INLINE {
            ask();
            pieces += pieces_a_product;
            softmax.run_to(pieces >> 16);
          });
    }
    softmax.run_to(softmax.pieces);
    output.rest(ask);
  }

 private:
  // Rows first ... first + 15 of `cols` columns, `offset` bytes from where they begin: tiles of 32 columns, zeros past the
  // last row and column.
  TESSERA_OWN_FUNCTION static void copy_rows(char* tiles, const char* const* rows_of_block, int64_t offset,
                                             int64_t first, int64_t count, int64_t cols) {
    const char* pointers[kTileSide];
    for (int64_t r = 0; r < kTileSide && first + r < count; ++r) pointers[r] = rows_of_block[first + r] + offset;
    pack_rows(tiles, pointers, max_of<int64_t>(0, count - first), cols);
  }
  TESSERA_OWN_FUNCTION bool values_are_finite(const DecodeUnit& unit) const {
    return rows_are_finite(p.dtype, unit.block->count, p.head_dim_v,
                           [&](int64_t n) { return unit.block->values[n] + unit.head * p.v.head; });
  }
  // O += P V of what each row sees alone.
  TESSERA_COLD_FUNCTION void output_of_seen(const DecodeUnit& unit) const {
    const DecodeBlock& block = *unit.block;
    const int64_t h = unit.head;
    alignas(64) float value[kMaxRowFloats];
    for (int64_t n = 0; n < block.count; ++n) {
      read_row<Bfloat16Elem>(value, block.values[n] + h * p.v.head, p.head_dim_v);
      for (int64_t r = 0; r < part.row_count; ++r) {
        const DecodeRow& row = rows[h * part.row_count + r];
        if (block.begin + n < row.low || block.begin + n > row.high) continue;
        const int64_t bit = block.begin + n - (part.sequence.sk - part.sequence.sq);
        if (p.tree_mask && !(tree_bits(p, row.tree, bit) & 1)) continue;
        const uint32_t bits = p_of(unit, 1)[r * kAmxDecodeKeys + n];
        float weight;
        __builtin_memcpy(&weight, &bits, sizeof weight);
        for (int64_t d = 0; d < p.head_dim_v; ++d) o_of(h, d % 2, r)[d / 2] += weight * value[d];
      }
    }
  }
};

// Whether O of all rows is finite.
TESSERA_OWN_FUNCTION bool output_is_finite(const AmxDecode& d) {
  VecF sum{};  // of 0 x: 0, or NaN
  for (int64_t h = 0; h < d.part.heads; ++h) {
    const float* o = d.o_of(h, 0, 0);
    for (int64_t i = 0; i < 2 * d.part.row_count * d.out_ld; i += kLanes) sum = fma(load(o + i), VecF{}, sum);
  }
  return !any(sum != VecF{});
}

// All blocks of a part, whose rows are as init_decode_rows leaves them. `look`: every block's V is looked over for NaN and infinities.
TESSERA_OWN_FUNCTION void decode_part(AmxDecode& d, const KeyRange& keys, bool look) {
  const Params& p = d.p;
  const DecodePart& part = d.part;
  __builtin_memset(d.scratch.o, 0, static_cast<size_t>(part.heads * 2 * part.row_count * d.out_ld) * sizeof(float));
  int64_t all_low = 0, all_high = part.key_end;  // keys that every row sees
  for (int64_t i = 0; i < part.heads * part.row_count; ++i) {
    all_low = max_of(all_low, d.rows[i].low), all_high = min_of(all_high, d.rows[i].full_high);
  }
  DecodeBlock blocks[3];  // that of the unit before, the present one, the next one
  const auto unit_of = [&](const DecodeBlock& block, int64_t head, int64_t index) {
    if (block.count == 0) return DecodeUnit{};
    return DecodeUnit{&block, head, index, look || block.begin < all_low || block.begin + block.count - 1 > all_high};
  };
  blocks[0].locate(p, part, keys.low, keys.high + 1);
  d.prefetch.begin(p, part, blocks[0]);
  d.prefetch.rest();
  DecodeUnit before, now = unit_of(blocks[0], 0, 0);
  d.stage(now, {}, {});
  for (int64_t turn = 0; now.block; ++turn) {
    if (p.cancelled && p.cancelled(p.cancel)) return;
    const DecodeBlock &block = blocks[turn % 3], &next_block = blocks[(turn + 1) % 3];
    blocks[(turn + 1) % 3].locate(p, part, block.begin + kAmxDecodeKeys, keys.high + 1);
    d.prefetch.begin(p, part, next_block);
    for (int64_t h = 1; h <= part.heads; ++h) {
      const DecodeUnit next = h < part.heads ? unit_of(block, h, now.index + 1) : unit_of(next_block, 0, now.index + 1);
      d.stage(next, now, before);
      before = now, now = next;
    }
    d.prefetch.rest();
  }
  d.stage({}, {}, before);
}

inline void amx_decode_item(const Params& p, int64_t item, char* scratch_base) {
  const DecodePart part(p, item);
  const AmxDecodeScratch scratch = carve_amx_decode(
      scratch_base, {part.heads, kDecodeRows, p.block_n, p.head_dim, p.head_dim_v, kLanes, sizeof(DecodeRow)});
  const bool neighbours = !p.page_table || p.page_size % kTileSide == 0;  // 16 keys from a multiple of 16
  AmxDecode d{p,
              part,
              scratch,
              reinterpret_cast<DecodeRow*>(scratch.rows),
              padded_to(p.head_dim, kTileSteps_elems) / kTileSteps_elems,
              padded_to(p.head_dim_v, kTileSteps_elems) / 2,
              neighbours && p.head_dim % kTileSteps_elems == 0,
              neighbours && p.head_dim_v % kTileSteps_elems == 0,
              p.softcap == 0 && !p.alibi_slopes,
              {}};
  const KeyRange keys = init_decode_rows(p, part, d.rows);
  for (int64_t h = 0; h < part.heads; ++h) {  // in order: a row of 16 reaches beyond its columns, into the next head's
    const char* q_rows[kTileSide];
    for (int64_t r = 0; r < part.row_count; ++r) q_rows[r] = decode_query(p, part, d.rows[h * part.row_count + r]);
    pack_column_pairs(scratch.q + h * d.q_steps * kTileSide * d.columns(), d.columns(), q_rows, part.row_count,
                      kTileSide, p.head_dim);
  }
  __builtin_memset(scratch.p, 0, static_cast<size_t>(4 * kTileSide * kAmxDecodeKeys) * sizeof(uint32_t));
  tiles_configure(d.rows_of_p(), d.columns() * 4);
  decode_part(d, keys, false);
  if (!output_is_finite(d)) {  // a NaN or an infinity of V has reached its neighbouring column, too, as 0 x NaN
    init_decode_rows(p, part, d.rows);
    decode_part(d, keys, true);
  }
  tiles_release();
  for (int64_t h = 0; h < part.heads; ++h) {
    for (int64_t r = 0; r < part.row_count; ++r) {
      write_decode_row(p, part, d.rows[h * part.row_count + r], d.o_of(h, 0, r),
                       [&](int64_t column) { return column % 2 * part.row_count * d.out_ld + column / 2; });
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
