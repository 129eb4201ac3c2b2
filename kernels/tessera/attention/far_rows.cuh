// The backward pass of rows whose scores have a large common offset (padding of -1e9, activations in the thousands): in
// a single float, the error of the LSE times log2(e) would exceed the error allowed for P. The preprocess marks query
// tiles that contain such a row as far. Their P is computed from the two floats that the forward pass saved, in the way
// in which the forward pass computed it: the large part is subtracted first. All other tiles pay one comparison.
#pragma once

#include "tessera/attention/backward.hpp"
#include "tessera/attention/lse.cuh"
#include "tessera/attention/score/unit.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/ptx/math.cuh"

namespace tessera {

// The values of row_lse_log2 for all rows of a marked tile.
inline constexpr float kFarRow = -0x1p126f, kFarUnseenRow = -0x1p127f;
TESSERA_DEVICE bool is_far(float row_lse_log2) { return row_lse_log2 <= kFarRow; }
TESSERA_DEVICE bool row_sees(float row_lse_log2) { return row_lse_log2 != infinity() && row_lse_log2 != kFarUnseenRow; }

// The preprocess has a group of lanes for each row, of which the first three load lse, lse_low and d_lse, each into the
// same register.
struct RowStats {
  const float* rows;  // of a sequence and a head; NULL: nothing to load
  int64 step;
  TESSERA_DEVICE RowStats(const BwdParams& p, int lane, int batch, int head) {
    const StatTensor& from = lane == 0 ? p.lse : lane == 1 ? p.lse_low : p.d_lse;
    rows = lane < 3 && from.data ? from.at(batch, head, 0) : nullptr, step = from.row;
  }
  TESSERA_DEVICE void load(float& stat, int64 row) const {
    if (rows) stat = rows[step * row];
  }
};
// To be called by all lanes of a warp: the first lane receives another lane's value.
TESSERA_DEVICE float row_stat(float stat, int lane) { return __shfl_xor_sync(0xffffffff, stat, lane); }

// Called by a whole block of the preprocess after it has written a tile's row_lse_log2; `found`: this thread found a
// far row.
template <int kRows, int kThreads>
TESSERA_DEVICE void mark_far_tile(float* row_lse_log2, bool found) {
  if (!__syncthreads_or(found)) return;
  for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kThreads) {
    row_lse_log2[row] = row_lse_log2[row] == infinity() ? kFarUnseenRow : kFarRow;
  }
}

// The LSE in log2 units for scores that are not far, less raise_log2.
TESSERA_DEVICE float lse_log2(const BwdParams& p, TwoFloats lse, float raise_log2 = 0.0f) {
  return fmaf(lse.high, p.lse_log2e, fmaf(lse.high, p.lse_log2e_low, fmaf(lse.low, p.lse_log2e, -raise_log2)));
}
TESSERA_DEVICE bool is_far(const BwdParams& p, TwoFloats lse) {
  return !(fabsf(lse.high * p.lse_log2e) < p.far_lse_log2);
}

// A row of a marked tile: converts scores, in the units in which they are held, to log2 P.
struct FarRow {
  float first, second, high, low_log2;

  TESSERA_DEVICE FarRow(const BwdParams& p, const Sequence& s, int batch, int head, int query, ScoreUnit unit) {
    TwoFloats lse{infinity(), 0.0f};
    if (query < s.sq) lse = load_lse(p, batch, head, static_cast<int64>(s.q_begin) + query);
    if (lse.high == -infinity()) lse.high = infinity();  // the row sees nothing
    const bool huge = is_huge(lse.high * kLog2e);
    first = huge ? unit.natural : 1.0f, second = huge ? 1.0f : unit.natural;
    high = lse.high, low_log2 = lse.low * kLog2e;
  }
  // An LSE without its low float may be too small, so weights are limited to 1. NaN stays NaN.
  TESSERA_DEVICE float log2_weight(float score) const {
    const float x = fmaf(fmaf(__fmul_rn(score, first), second, -high), kLog2e, -low_log2);
    return x > 0.0f ? 0.0f : x;
  }
};

}  // namespace tessera
