// With a block mask: the list entry of the K block in each stage.
template <int kStages>
struct ListEntries {
  int of[kStages];
};
template <>
struct ListEntries<0> {};

// A block's shared memory in fwd_sm90, as types; fwd_sm90_layout (config.hpp) gives the offset of each member.
#pragma once

#include "tessera/fwd_sm90/work_tile.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

template <FwdSm90Config kCfg>
struct FwdSm90SharedMemory {
  using OutputTile = SwizzledTile<16, kCfg.o_chunks * kChunkCols>;
  SwizzledTile<kConsumerRows, kCfg.head_dim> sQ[kCfg.q_stages];  // consumer after consumer, work tile after work tile
  SwizzledTile<kCfg.block_n, kCfg.head_dim> sK[kCfg.k_stages];
  SwizzledTile<kCfg.block_n, kCfg.head_dim_v> sV[kCfg.v_stages];
  OutputTile sO[kCfg.consumers * 4];  // a warp's rows of O, before they are stored to global memory
  WorkTile<kCfg> work_tiles[kWorkTilesAhead];
  Ring<kWorkTilesAhead> tile_ring;
  Ring<kCfg.q_stages> q_ring;
  Ring<kCfg.k_stages, kCfg.cluster> k_ring;
  Ring<kCfg.v_stages, kCfg.cluster> v_ring;
  [[no_unique_address]] ListEntries<kCfg.block_mask ? kCfg.k_stages : 0> k_entries;
};

// One of the consumer warpgroups.
template <FwdSm90Config kCfg>
struct ConsumerGroup {
  const FwdSm90Params& p;
  FwdSm90SharedMemory<kCfg>& shared;
  const int consumer;  // index; of a work tile it has rows consumer * kConsumerRows ...
  // Of the block's shared memory; a tile's descriptor is one addition and its index away.
  const uint32 shared_descriptor;

  TESSERA_DEVICE ConsumerGroup(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared, int consumer)
      : p(p), shared(shared), consumer(consumer), shared_descriptor(descriptor_address(shared_address(&shared))) {}
};

// Members follow one another without padding, so their sizes give their offsets.
template <FwdSm90Config kCfg>
TESSERA_DEVICE constexpr bool has_fwd_sm90_layout() {
  using Shared = FwdSm90SharedMemory<kCfg>;
  constexpr FwdSm90Layout kAt = fwd_sm90_layout(kCfg);
  return kAt.q == 0 && sizeof(Shared::sQ) == kAt.k - kAt.q && sizeof(Shared::sK) == kAt.v - kAt.k &&
         sizeof(Shared::sV) == kAt.o - kAt.v && sizeof(Shared::sO) == kAt.work_tiles - kAt.o &&
         sizeof(Shared::work_tiles) == kAt.tile_ring - kAt.work_tiles &&
         sizeof(Shared::tile_ring) == kAt.q_ring - kAt.tile_ring && sizeof(Shared::q_ring) == kAt.k_ring - kAt.q_ring &&
         sizeof(Shared::k_ring) == kAt.v_ring - kAt.k_ring &&
         sizeof(Shared::v_ring) == kCfg.v_stages * kRingStageBytes && sizeof(Shared) == kAt.bytes;
}

}  // namespace tessera
