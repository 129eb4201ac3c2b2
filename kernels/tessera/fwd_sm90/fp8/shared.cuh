// A block's shared memory in fwd_sm90_fp8; fwd_sm90_fp8_layout (config.hpp) gives the offset of each member.
#pragma once

#include "tessera/fwd_sm90/fp8/config.hpp"
#include "tessera/fwd_sm90/shared.cuh"

namespace tessera {

// The part that fwd_sm90's producers and consumers use, in place of theirs. An element of a tile is two of 8 bits.
template <FwdSm90Config kCfg>
requires(kCfg.dtype == Dtype::kFloat8E4M3) struct FwdSm90SharedMemory<kCfg> {
  SwizzledTile<kConsumerRows, kCfg.head_dim> sQ[kCfg.q_stages];  // consumer after consumer, work tile after work tile
  SwizzledTile<kCfg.block_n, kCfg.head_dim> sK[kCfg.k_stages];
  SwizzledTile<kCfg.head_dim_v, kCfg.block_n / 2> sV[kCfg.v_stages];     // transposed (loads.cuh)
  SwizzledTile<kCfg.block_n, kCfg.head_dim_v / 2> sRawV[kCfg.o_chunks];  // as TMA loads it
  WorkTile<kCfg> work_tiles[kWorkTilesAhead];
  Ring<kWorkTilesAhead> tile_ring;
  Ring<kCfg.q_stages> q_ring;
  Ring<kCfg.k_stages> k_ring;
  Ring<kCfg.v_stages> v_ring;    // transposed blocks
  Ring<kCfg.o_chunks> raw_ring;  // blocks as TMA loads them
};

template <FwdSm90Fp8Config kCfg>
using Fp8SharedMemory = FwdSm90SharedMemory<kCfg.tiles()>;

// Members follow one another without padding, so their sizes give their offsets.
template <FwdSm90Fp8Config kCfg>
TESSERA_DEVICE constexpr bool has_fwd_sm90_fp8_layout() {
  using Shared = Fp8SharedMemory<kCfg>;
  constexpr FwdSm90Fp8Layout kAt = fwd_sm90_fp8_layout(kCfg);
  return sizeof(Shared::sQ) == kAt.k && sizeof(Shared::sK) == kAt.v - kAt.k &&
         sizeof(Shared::sV) == kAt.raw_v - kAt.v && sizeof(Shared::sRawV) == kAt.work_tiles - kAt.raw_v &&
         sizeof(Shared::work_tiles) == kAt.tile_ring - kAt.work_tiles &&
         sizeof(Shared::tile_ring) == kAt.q_ring - kAt.tile_ring && sizeof(Shared::q_ring) == kAt.k_ring - kAt.q_ring &&
         sizeof(Shared::k_ring) == kAt.v_ring - kAt.k_ring && sizeof(Shared::v_ring) == kAt.raw_ring - kAt.v_ring &&
         sizeof(Shared) == kAt.bytes;
}

}  // namespace tessera
