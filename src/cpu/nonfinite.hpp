// NaN and infinities in keys (in the backward pass, queries) that some rows of a tile do not see. A product of full
// tiles would compute 0 x NaN for these rows. So if a tile has masked entries, its rows are checked, which costs one
// operation for each vector of the tile; if there are any such numbers, the tile's products are computed pair by pair,
// over what is visible.
#pragma once

#include "cpu/kv_block.hpp"
#include "cpu/score/coordinates.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kMaxRowFloats = 576 + kLanes;  // the largest head size, as read_row writes it

// Whether rows 0 ... count - 1 of Elem, at row(n), hold neither NaN nor infinity.
template <class Elem, class Row>
TESSERA_INLINE bool elements_are_finite(int64_t count, int64_t cols, const Row& row) {
  VecF a{}, b{}, c{}, e{};  // sums of 0 x, which are 0 or NaN
  for (int64_t n = 0; n < count; ++n) {
    const char* at = row(n);
    const auto read = [&](int64_t d) TESSERA_LAMBDA_INLINE { return Elem::read(at + d * Elem::kBytes); };
    int64_t d = 0;
    for (; d + 4 * kLanes <= cols; d += 4 * kLanes) {
      a = fma(read(d), VecF{}, a);
      b = fma(read(d + kLanes), VecF{}, b);
      c = fma(read(d + 2 * kLanes), VecF{}, c);
      e = fma(read(d + 3 * kLanes), VecF{}, e);
    }
    for (; d + kLanes <= cols; d += kLanes) a = fma(read(d), VecF{}, a);
    if (d < cols) b = fma(Elem::read(at + d * Elem::kBytes, cols - d), VecF{}, b);
  }
  return !any((a + b) + (c + e) != VecF{});
}
template <class Row>
TESSERA_INLINE bool rows_are_finite(int32_t dtype, int64_t count, int64_t cols, const Row& row) {
  bool finite = true;
  with_float_elem(
      dtype, [&](auto elem) TESSERA_LAMBDA_INLINE { finite = elements_are_finite<decltype(elem)>(count, cols, row); });
  return finite;
}

// Whether a row as read_codes writes it holds neither.
TESSERA_OWN_FUNCTION inline bool codes_are_finite(const float* row, int64_t cols) {
  VecF sum{};
  for (int64_t d = 0; d < cols; d += kLanes) sum = fma(load(row + d), VecF{}, sum);
  return !any(sum != VecF{});
}

// The same for keys j ... of K or V.
TESSERA_OWN_FUNCTION bool keys_are_finite(const Params& p, const RowTensor& tensor, const Sequence& sequence,
                                          int64_t batch, int64_t head_kv, int64_t j, int64_t count, int64_t cols) {
  if (p.kv_elem_bytes == 1) {
    alignas(64) float row[kMaxRowFloats];
    bool finite = true;
    for (int64_t n = 0; n < count && finite; ++n) {
      read_code_key(row, p, tensor, sequence, batch, head_kv, j + n, cols);
      finite = codes_are_finite(row, cols);
    }
    return finite;
  }
  return rows_are_finite(p.kv_dtype, count, cols,
                         [&](int64_t n) { return key_row(p, tensor, sequence, batch, head_kv, j + n); });
}

// The same for rows of the tile in Q's or dO's tensor.
TESSERA_OWN_FUNCTION bool queries_are_finite(const Params& p, const RowTensor& tensor, const Tile& tile, int64_t cols) {
  return rows_are_finite(p.dtype, tile.count, cols, [&](int64_t n) { return row_at(tensor, tile, n); });
}

// The lanes of the tile that see the key (all ones or 0): by position, masks and a bias of -inf.
inline void visible_lanes(int32_t* visible, const Params& p, const Tile& tile, int64_t key) {
  const QueryLanes at{tile, key};
  for (int64_t lane = 0; lane < kBlockM; ++lane) {
    const int64_t row = min_of<int64_t>(lane, tile.count - 1);
    const bool sees = tile.low[lane] <= key && key <= tile.high[lane] && sees_entry(p, at.entry(row, key));
    visible[lane] = sees ? -1 : 0;
  }
}

// y[d] += a x[d], neither padded.
TESSERA_INLINE void add_scaled(float a, const float* x, float* y, int64_t cols) {
  for (int64_t d = 0; d < cols; ++d) y[d] += a * x[d];
}

TESSERA_INLINE float float_of_bf16(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

}  // namespace
}  // namespace tessera::cpu
