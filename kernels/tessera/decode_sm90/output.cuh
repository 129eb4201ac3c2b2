// What a warp of decode_sm90 accumulates over the tiles of a segment: the rows' softmax, and O before the division.
#pragma once

#include "tessera/attention/softmax.cuh"
#include "tessera/decode_sm90/config.hpp"
#include "tessera/tile/product.cuh"
#include "tessera/tile/product_codes.cuh"

namespace tessera {

// S and P of a tile.
template <DecodeSm90Config kCfg>
using DecodeScoreTile = float[kCfg.row_tiles()][kCfg.block_n / 8][4];
template <DecodeSm90Config kCfg>
using DecodeSoftmax = OnlineSoftmax<kCfg.row_tiles(), kCfg.row_halves()>;

// The buffers of a warp's sums have kBufferRows rows of head_dim + kDecodeMergePad numbers.
template <DecodeSm90Config kCfg>
struct DecodeOutput {
  static constexpr int kBufferRows = decode_merge_rows(kCfg.head_dim), kPitch = kCfg.head_dim + kDecodeMergePad;
  float sum[1][kCfg.head_dim / 8][4];

  TESSERA_DEVICE DecodeOutput() { clear(sum); }
  // Adds P V.
  template <class Tile>
  TESSERA_DEVICE void add(const DecodeScoreTile<kCfg>& rP, const Tile& sV) {
    product_pb(sum, rP, sV, 0);
  }
  // needed: some of the lane's rows have a factor other than 1.
  TESSERA_DEVICE void rescale(const float (&alpha)[1][2], bool needed) {
    if (needed) DecodeSoftmax<kCfg>::rescale(alpha, sum);
  }
  // Stores rows first ... first + kBufferRows - 1 to a buffer.
  TESSERA_DEVICE void put(int first, float (&buffer)[kBufferRows][kPitch]) const {
    const int row = lane_row() + (first < 8 ? 0 : 8) - first;
    if (row < 0 || row >= kBufferRows) return;
    if (first < 8) {
      put_half<0>(buffer[row]);
    } else {
      put_half<1>(buffer[row]);
    }
  }

 private:
  template <int kHalf>
  TESSERA_DEVICE void put_half(float* row) const {
    float* const to = row + lane_col();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim / 8; ++d) {
      *reinterpret_cast<float2*>(to + d * 8) = make_float2(sum[0][d][2 * kHalf], sum[0][d][2 * kHalf + 1]);
    }
  }
};

// The same of 8-bit V, transposed.
template <DecodeSm90Config kCfg>
requires(kCfg.codes()) struct DecodeOutput<kCfg> {
  static constexpr int kBufferRows = decode_merge_rows(kCfg.head_dim), kPitch = kCfg.head_dim + kDecodeMergePad;
  static constexpr int kT = kCfg.rows / 8, kD = kCfg.head_dim / 16;
  float sum[kT][kD][4];

  TESSERA_DEVICE DecodeOutput() { clear(sum); }
  template <class Tile>
  TESSERA_DEVICE void add(const DecodeScoreTile<kCfg>& rP, const Tile& sV) {
    product_btpt_codes<kCfg.cache>(sum, rP, sV);
  }
  TESSERA_DEVICE void rescale(const float (&alpha)[kCfg.row_tiles()][kCfg.row_halves()], bool needed) {
    if (!__any_sync(0xffffffff, needed)) return;
#pragma unroll
    for (int t = 0; t < kT; ++t) {
      const float2 factor = across_rows(alpha[t / 2][t % 2]);
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[t][d][e] *= e % 2 == 0 ? factor.x : factor.y;
    }
  }
  TESSERA_DEVICE void multiply(float factor) {
#pragma unroll
    for (int t = 0; t < kT; ++t)
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[t][d][e] *= factor;
  }
  // kTile: the first tile of eight rows that may have these. A loop over tiles would put all of them in memory.
  template <int kTile = 0>
  TESSERA_DEVICE void put(int first, float (&buffer)[kBufferRows][kPitch]) const {
    if constexpr (kTile + 1 < kT) {
      if (first >= (kTile + 1) * 8) return put<kTile + 1>(first, buffer);
    }
    const int row = kTile * 8 + lane_col() - first;
    if (row < 0 || row >= kBufferRows) return;
    float* const to = buffer[row] + lane_row() * 2;
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      *reinterpret_cast<float2*>(to + d * 16) = code_columns<0>(sum[kTile][d]);
      *reinterpret_cast<float2*>(to + d * 16 + kPitch) = code_columns<1>(sum[kTile][d]);
    }
  }
};

}  // namespace tessera
