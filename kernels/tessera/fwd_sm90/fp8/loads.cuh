// V in fwd_sm90_fp8: a warp loads its blocks by TMA and transposes them, because wgmma reads 8-bit operands only with
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

// By a warp: `to` = `from` transposed. kAhead pieces of 32 keys and 16 columns are loaded before the first is stored,
// since each piece waits for its load.
template <class Raw, class Transposed>
TESSERA_DEVICE void transpose_values(uint32 from, uint32 to) {
  constexpr int kKeys = Raw::kRows, kColumns = Transposed::kRows, kAhead = 2;
  static_assert(kKeys % 32 == 0 && kColumns % (16 * kAhead) == 0);
  const int lane = lane_id();
#pragma unroll 1
  for (int key = 0; key < kKeys; key += 32) {
    // The swizzle is an exclusive or by the row number modulo 8: a row's other words follow from its first one, and
    // rows 16 apart have the same order.
    const uint32 first = Raw::at(from, key + lane, 0);
    const uint32 row = Transposed::at(to, lane % 16, (key + lane / 16 * 16) / 2);
#pragma unroll 2
    for (int col = 0; col < kColumns; col += 16 * kAhead) {
      uint32 keys[kAhead][4];  // of eight keys each: the pair of columns of keys 2c and 2c + 1
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int pair = col / 2 + n * 8, chunk = pair / kChunkCols * Raw::kChunkBytes;
        ptx::ldmatrix_x4_trans(keys[n], (first ^ pair % kChunkCols / 8 * 16) + chunk);
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const uint32(&of)[4] = keys[n];
        const uint32 columns[4] = {ptx::prmt<0x6420>(of[0], of[1]), ptx::prmt<0x7531>(of[0], of[1]),
                                   ptx::prmt<0x6420>(of[2], of[3]), ptx::prmt<0x7531>(of[2], of[3])};
        ptx::stmatrix_x4(row + (col + n * 16) * kChunkRowBytes, columns);
      }
    }
  }
}

// Loads and transposes all V blocks that the work tiles see. Rows past a sequence's end are cleared: they are
// multiplied by P = 0, but in packed and padded tensors they may hold NaN.
template <FwdSm90Fp8Config kCfg>
TESSERA_DEVICE void load_values(const FwdSm90Fp8Params& p, Fp8SharedMemory<kCfg>& shared) {
  constexpr FwdSm90Config kTiles = kCfg.tiles();
  constexpr int kN = kCfg.block_n;
  using Raw = SwizzledTile<kN, kCfg.head_dim_v / 2>;
  using Transposed = SwizzledTile<kCfg.head_dim_v, kN / 2>;
  RingPosition<kWorkTilesAhead> tile_at;
  RingPosition<kCfg.raw_stages> raw;
  RingPosition<kCfg.v_stages> at;
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const WorkTile<kTiles>& tile = shared.work_tiles[tile_at.stage()];
    if (tile.count < 0) return;
    int block = tile.first;
    const int last = tile.last;
    // The tile is released after its last block and read again for each: the producers have few registers.
    const auto load = [&](const RingPosition<kCfg.raw_stages>& to, int of) {
      if (lane_id() != 0 || of >= last) return;
      const uint32 full = shared.raw_full[to.stage()].address();
      ptx::mbarrier_arrive_expect_tx(full, Raw::kBytes);
      copy_tile(shared.sRawV[to.stage()], &p.v_map, full, tile.s.k_begin + of * kN, tile.head / p.group,
                tile.k_batch(p));
    };
    auto ahead = raw;
#pragma unroll 1
    for (int n = 0; n < kCfg.raw_stages; ++n, ahead.advance()) load(ahead, block + n);
#pragma unroll 1
    for (; block < last; ++block) {
      const uint32 from = shared_address(shared.sRawV[raw.stage()].data);
      ptx::mbarrier_wait_parity(shared.raw_full[raw.stage()].address(), raw.parity);
      if (const int keys = tile.s.sk - block * kN; kCfg.varlen && keys < kN) {
        constexpr int kRowWords = Raw::kChunks * 8;  // of 16 bytes
#pragma unroll 1
        for (int word = max(keys, 0) * kRowWords + lane_id(); word < kN * kRowWords; word += 32) {
          ptx::st_shared_zero_16(Raw::at(from, word / kRowWords, word % kRowWords * 8));
        }
        __syncwarp();
      }
      shared.v_ring.wait_empty(at);
      transpose_values<Raw, Transposed>(from, shared_address(shared.sV[at.stage()].data));
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane_id() == 0) ptx::mbarrier_arrive(shared.v_ring.full[at.stage()].address());
      load(raw, block + kCfg.raw_stages);
      raw.advance();
      at.advance();
    }
    shared.tile_ring.release(tile_at);
    tile_at.advance();
  }
}

}  // namespace tessera
