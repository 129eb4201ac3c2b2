// The compile-time config, the launch parameters and the shared memory layout of fwd_sm90_fp8, as one text for host and
// device.
#pragma once

#include "tessera/attention/scales.hpp"
#include "tessera/fwd_sm90/config.hpp"

namespace tessera {

// Beside the consumers: one warpgroup loads, the other transposes V.
inline constexpr int kFp8ProducerWarpgroups = 2, kTransposingWarps = 4;

struct FwdSm90Fp8Config {
  int head_dim;    // padded to a multiple of 32
  int head_dim_v;  // padded to a multiple of 64
  int block_n;     // keys of a K/V block, a multiple of 32
  int consumers;   // consumer warpgroups, each with kConsumerRows query rows
  int q_stages;    // tiles of kConsumerRows queries: whole_q_stages
  int k_stages;    // K blocks in shared memory
  int v_stages;    // transposed V blocks
  int raw_stages;  // V blocks before they are transposed
  int o_cols;      // columns of O that one product computes, whose accumulators are then added to O: 64 or 128
  Dtype dtype_o;
  bool varying_tile_cost;  // as in FwdSm90Config
  bool varlen;             // likewise
  bool block_scales;       // k or v have a scale for each 128 keys, which block_n divides
  ScoreConfig score;

  // What the parts of fwd_sm90 that this kernel shares (work tiles, producers, masks, sums) are compiled for. They see
  // two neighbouring elements of q or k as one of 16 bits: head_dim counts such pairs.
  TESSERA_HOST_DEVICE constexpr FwdSm90Config tiles() const {
    FwdSm90Config c{};
    c.dtype = Dtype::kFloat8E4M3;
    c.head_dim = head_dim / 2, c.head_dim_v = head_dim_v, c.block_n = block_n, c.consumers = consumers;
    c.k_stages = k_stages, c.v_stages = v_stages, c.q_stages = q_stages, c.cluster = 1;
    c.o_chunks = raw_stages;  // O is stored from registers; the member has what is in O's place, the blocks of V
    c.varying_tile_cost = varying_tile_cost, c.varlen = varlen, c.score = score;
    return c;
  }
};
TESSERA_CONFIG_FIELDS(FwdSm90Fp8Config, head_dim, head_dim_v, block_n, consumers, q_stages, k_stages, v_stages,
                      raw_stages, o_cols, dtype_o, varying_tile_cost, varlen, block_scales, score)

struct FwdSm90Fp8Params : FwdSm90Params {
  ScaleTensor q_scales, k_scales, v_scales;
  int o_bytes;  // of an element of o
};

// Offsets in bytes from the start of shared memory.
struct FwdSm90Fp8Layout {
  int k, v, raw_v, work_tiles, tile_ring, q_ring, k_ring, v_ring, raw_ring, bytes;
};

TESSERA_HOST_DEVICE constexpr FwdSm90Fp8Layout fwd_sm90_fp8_layout(const FwdSm90Fp8Config& c) {
  FwdSm90Fp8Layout at{};
  at.k = c.q_stages * swizzled_bytes(kConsumerRows, c.head_dim / 2);
  at.v = at.k + c.k_stages * swizzled_bytes(c.block_n, c.head_dim / 2);
  at.raw_v = at.v + c.v_stages * swizzled_bytes(c.head_dim_v, c.block_n / 2);
  at.work_tiles = at.raw_v + c.raw_stages * swizzled_bytes(c.block_n, c.head_dim_v / 2);
  at.tile_ring = at.work_tiles + kWorkTilesAhead * kWorkTileBytes;
  at.q_ring = at.tile_ring + kWorkTilesAhead * kRingStageBytes;
  at.k_ring = at.q_ring + c.q_stages * kRingStageBytes;
  at.v_ring = at.k_ring + c.k_stages * kRingStageBytes;
  at.raw_ring = at.v_ring + c.v_stages * kRingStageBytes;
  at.bytes = (at.raw_ring + c.raw_stages * kRingStageBytes + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
  return at;
}

}  // namespace tessera
