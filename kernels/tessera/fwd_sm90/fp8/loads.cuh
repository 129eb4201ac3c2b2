// V in fwd_sm90_fp8: a warpgroup transposes its blocks in shared memory, because wgmma reads 8-bit operands only with
// the inner dimension, here the keys, contiguous.
//
// The consumers' P comes from an accumulator, in which lane 4g + c has of each 8 keys the two from 2c on; as an operand
// it must be four neighbours, from position 4c on. So position 4c + 2h + e of each 16 is key 8h + 2c + e, in P as in V:
// a sum does not depend on the order of its terms. ldmatrix turns V's pairs of columns into just these keys.
//
// Likewise row 8e + i of each 16 rows of the result is column 2i + e of V and O, so that the stores are free of bank
// conflicts, and a lane has four neighbouring columns of O.
#pragma once

#include "tessera/fwd_sm90/fp8/shared.cuh"
#include "tessera/fwd_sm90/loads.cuh"

namespace tessera {

// By each of kTransposingWarps warps: its columns of `to` = `from` transposed. Pieces of 32 keys and 16 columns; all
// keys of a column are loaded before the first is stored, since a piece waits for its load.
template <class Raw, class Transposed>
TESSERA_DEVICE void transpose_values(uint32 from, uint32 to, int warp) {
  constexpr int kColumns = Transposed::kRows / kTransposingWarps, kPieces = Raw::kRows / 32;
  static_assert(Raw::kRows % 32 == 0 && kColumns % 16 == 0);
  const int lane = lane_id();
#pragma unroll 1
  for (int col = warp * kColumns; col < (warp + 1) * kColumns; col += 16) {
    const uint32 first = Raw::at(from, lane, col / 2);
    uint32 keys[kPieces][4];  // of eight keys each: the pair of columns of keys 2c and 2c + 1
#pragma unroll
    for (int n = 0; n < kPieces; ++n) ptx::ldmatrix_x4_trans(keys[n], first + n * 32 * kChunkRowBytes);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const uint32(&of)[4] = keys[n];
      const uint32 columns[4] = {ptx::prmt<0x6420>(of[0], of[1]), ptx::prmt<0x7531>(of[0], of[1]),
                                 ptx::prmt<0x6420>(of[2], of[3]), ptx::prmt<0x7531>(of[2], of[3])};
      ptx::stmatrix_x4(Transposed::at(to, col + lane % 16, n * 16 + lane / 16 * 8), columns);
    }
  }
}

// By each of kTransposingWarps warps: transposes its columns of all V blocks that the work tiles see. Rows past a
// sequence's end are cleared first: they are multiplied by P = 0, but in packed and padded tensors they may hold NaN.
template <FwdSm90Fp8Config kCfg>
TESSERA_DEVICE void transpose_blocks(Fp8SharedMemory<kCfg>& shared, int warp) {
  constexpr int kN = kCfg.block_n;
  using Raw = SwizzledTile<kN, kCfg.head_dim_v / 2>;
  using Transposed = SwizzledTile<kCfg.head_dim_v, kN / 2>;
  RingPosition<kWorkTilesAhead> tile_at;
  RingPosition<kCfg.v_stages> at;
  RingPosition<kCfg.raw_stages> raw_at;
  // Equal rings are at equal positions: with two consumers of large heads a register more would spill.
  const auto raw_position = [&]() -> const RingPosition<kCfg.raw_stages>& {
    if constexpr (kCfg.raw_stages == kCfg.v_stages)
      return at;
    else
      return raw_at;
  };
  const RingPosition<kCfg.raw_stages>& raw = raw_position();
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const WorkTile<kCfg.tiles()>& tile = shared.work_tiles[tile_at.stage()];
    if (tile.count < 0) return;
    int keys = tile.s.sk - tile.first * kN;  // of the sequence, from the next block on
    const int blocks = tile.last - tile.first;
    shared.tile_ring.release(tile_at);
    tile_at.advance();
#pragma unroll 1
    for (int n = 0; n < blocks; ++n, keys -= kN) {
      const uint32 from = shared_address(shared.sRawV[raw.stage()].data);
      shared.raw_ring.wait_full(raw);
      if (kCfg.varlen && keys < kN) {
        constexpr int kWords = kCfg.head_dim_v / kTransposingWarps / 16;  // of a row, of 16 bytes
#pragma unroll 1
        for (int word = max(keys, 0) * kWords + lane_id(); word < kN * kWords; word += 32) {
          ptx::st_shared_zero_16(Raw::at(from, word / kWords, (warp * kWords + word % kWords) * 8));
        }
        __syncwarp();
      }
      shared.v_ring.wait_empty(at);
      transpose_values<Raw, Transposed>(from, shared_address(shared.sV[at.stage()].data), warp);
      ptx::fence_proxy_async();
      shared.raw_ring.release(raw);
      if (lane_id() == 0) ptx::mbarrier_arrive(shared.v_ring.full[at.stage()].address());
      raw_at.advance();
      at.advance();
    }
  }
}

}  // namespace tessera
