// A block's shared memory in decode_sm90: the rings of K and V, Q of the segment in progress, and what its warps
// exchange.
#pragma once

#include "tessera/decode_sm90/epilogue.cuh"
#include "tessera/decode_sm90/loads.cuh"

namespace tessera {

// Q of a segment's rows in shared memory.
template <DecodeSm90Config kCfg>
struct DecodeQueryTile {
  SharedTile<kCfg.dtype, kCfg.rows, kCfg.head_dim> sQ;

  // Global -> shared, by all threads, after all of them have finished reading the previous rows. Rows and columns past
  // the end become 0.
  TESSERA_DEVICE void load(const DecodeSm90Params& p, const Segment& segment) {
    constexpr int kBytes = dtype_bytes(kCfg.dtype), kLoads = kCfg.head_dim * kBytes / kLoadBytes;
    const DecodeRows rows(p, segment.head_kv);
    const char* const base = static_cast<const char*>(p.q.data);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kCfg.rows * kLoads; i += kCfg.warps * 32) {
      const int local = i / kLoads, offset = i % kLoads * kLoadBytes, row = segment.row0 + local;
      const int wanted = local < segment.rows ? clamp(p.head_dim * kBytes - offset, 0, kLoadBytes) : 0;
      const char* const from =
          base + offset +
          (p.q.batch * segment.batch + p.q.row * (static_cast<int64>(segment.s.q_begin) + rows.query(p, row)) +
           p.q.head * rows.head(p, row)) *
              kBytes;
      ptx::cp_async_cg_16(sQ.at(local, 0) + offset, wanted > 0 ? from : base, wanted);
    }
    ptx::cp_async_commit_group();
  }
};

// The same, and what 8-bit K need beside it: codes.cuh.
template <DecodeSm90Config kCfg>
struct DecodeQueries : DecodeQueryTile<kCfg> {};

// The same as the A operand; for 8-bit K: codes.cuh.
template <DecodeSm90Config kCfg>
class DecodeQueryFragments {
 public:
  TESSERA_DEVICE explicit DecodeQueryFragments(const DecodeQueries<kCfg>& shared) : queries(shared) {}
  // rS = Q K^T.
  template <class Tile>
  TESSERA_DEVICE void product(DecodeScoreTile<kCfg>& rS, const Tile& sK) const {
    clear(rS);
    product_abt(rS, queries.sQ, 0, sK, 0);
  }

 private:
  const DecodeQueries<kCfg>& queries;
};

template <DecodeSm90Config kCfg>
struct DecodeSharedOfAll {
  DecodeStage<kCfg> stages[kCfg.warps][kCfg.stages];
  DecodeMergeBuffers<kCfg> merge;
  DecodeQueries<kCfg> queries;
  Barrier full[kCfg.bulk ? kCfg.warps * kCfg.stages * 2 : 1];  // barriers of K and of V
  RangeSegments<kCfg> segments;
  Segment parted;  // the range's first segment if other blocks compute parts of its work tile; else it has no rows
  // the last two: whether this block merges the work tile of `parted`, and that of the last segment
  int scan[kCfg.warps + 2];
};
template <DecodeSm90Config kCfg>
struct DecodeShared : DecodeSharedOfAll<kCfg> {
  TESSERA_DEVICE DecodeTileScales<kCfg>* tile_scales(int) { return nullptr; }
};
template <DecodeSm90Config kCfg>
requires(kCfg.key_scales) struct DecodeShared<kCfg> : DecodeSharedOfAll<kCfg> {
  DecodeTileScales<kCfg> scales[kCfg.warps][kCfg.stages];
  TESSERA_DEVICE DecodeTileScales<kCfg>* tile_scales(int warp) { return scales[warp]; }
};

}  // namespace tessera
