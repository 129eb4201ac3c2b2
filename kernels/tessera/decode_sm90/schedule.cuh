// Who reads which keys. A work is the query rows of one KV head of one sequence, at most kDecodeRows of them; its tiles of keys
// are those that its rows see, at least one. The tiles of all works, one work's after another's, are cut into shares of equal
// size, a block each, from the lengths in use: so unequal sequences fill the GPU, and a block has the last tiles of one work,
// some whole works, and the first tiles of another. What lies in two or more shares is merged (merge.cuh).
#pragma once

#include "tessera/attention/mask.cuh"
#include "tessera/decode_sm90/config.hpp"

namespace tessera {

// Row r of a sequence is query r / group of head r % group of the group: neighbours see nearly the same keys.
struct DecodeRows {
  int head0, group_rows;  // of the KV head; rows of the sequence
  TESSERA_DEVICE int query(const ProblemParams& p, int row) const { return row / p.group; }
  TESSERA_DEVICE int head(const ProblemParams& p, int row) const { return head0 + row % p.group; }
};

// A sequence as the schedule sees it.
struct SequenceShare {
  Sequence s;
  int row_tiles;      // works of each KV head
  int first_tile;     // of keys
  int tiles;          // of a work
  TESSERA_DEVICE int works(const ProblemParams& p) const { return row_tiles * p.heads_kv.value; }
};

template <DecodeSm90Config kCfg>
TESSERA_DEVICE SequenceShare sequence_share(const ProblemParams& p, int batch) {
  SequenceShare share;
  share.s = load_sequence<kCfg.varlen>(p, batch);
  const Sequence& s = share.s;
  share.row_tiles = (s.sq * p.group.value + kDecodeRows - 1) / kDecodeRows;
  const KeyRange first = visible_keys(p, s, 0), last = visible_keys(p, s, max(s.sq - 1, 0));
  const int low = max(first.low, 0), high = min(last.high, s.sk - 1);
  share.first_tile = low / kCfg.block_n;
  share.tiles = high < low ? 1 : high / kCfg.block_n - share.first_tile + 1;
  return share;
}

// A part of a work that lies in one block's share: tiles begin ... end - 1 of keys.
struct Segment {
  int batch, head_kv, row0, rows;  // rows row0 ... row0 + rows - 1 of the sequence
  Sequence s;
  int begin, end;
  int work_begin, work_tiles;  // of the whole work: its first tile among those of all, and how many
  bool whole;
};

// A walk over a share's segments.
template <DecodeSm90Config kCfg>
struct ShareWalk {
  int batch, work, tile;  // of the sequence; of the work
  int at, end;            // tiles of all works
  SequenceShare share;

  TESSERA_DEVICE bool next(const ProblemParams& p, Segment& segment) {
    if (at >= end) return false;
    while (work >= share.works(p)) {  // the next sequence that has rows
      ++batch, work = 0;
      share = sequence_share<kCfg>(p, batch);
    }
    segment.batch = batch;
    segment.head_kv = share.row_tiles == 1 ? work : work / share.row_tiles;
    segment.row0 = (work - segment.head_kv * share.row_tiles) * kDecodeRows;
    segment.rows = min(share.s.sq * p.group.value - segment.row0, kDecodeRows);
    segment.s = share.s;
    const int count = min(share.tiles - tile, end - at);
    segment.begin = share.first_tile + tile, segment.end = segment.begin + count;
    segment.work_begin = at - tile, segment.work_tiles = share.tiles;
    segment.whole = count == share.tiles;
    at += count;
    ++work, tile = 0;
    return true;
  }
};

struct Share {
  int total;  // tiles of all works
  int size;   // tiles of a block: block i has i size ... (i + 1) size - 1
};

// Which share is this block's, by all threads. sScan: [warps + 4].
template <DecodeSm90Config kCfg>
TESSERA_DEVICE Share find_share(const DecodeSm90Params& p, int* sScan, ShareWalk<kCfg>& walk) {
  const auto size_of = [&](int total) {
    const int blocks = static_cast<int>(gridDim.x);
    return max((total + blocks - 1) / blocks, p.min_tiles);
  };
  Share share;
  const int block = static_cast<int>(blockIdx.x);
  if (!kCfg.varlen || (!p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_k)) {  // all sequences are alike
    walk.share = sequence_share<kCfg>(p, 0);
    const int each = walk.share.works(p) * walk.share.tiles;
    share.total = each * p.batch;
    share.size = size_of(share.total);
    walk.at = block * share.size, walk.end = min(walk.at + share.size, share.total);
    if (walk.at >= walk.end) return share;
    walk.batch = walk.at / each;
    const int rest = walk.at - walk.batch * each;
    walk.work = rest / walk.share.tiles, walk.tile = rest - walk.work * walk.share.tiles;
    return share;
  }
  // Each thread has some neighbouring sequences: their tiles, and by a scan all tiles before them.
  constexpr int kThreads = kCfg.warps * 32;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int each = (p.batch + kThreads - 1) / kThreads, first = min(thread * each, p.batch),
            last = min(first + each, p.batch);
  const auto tiles_of = [&](int batch) {
    const SequenceShare s = sequence_share<kCfg>(p, batch);
    return s.works(p) * s.tiles;
  };
  int mine = 0;
  for (int batch = first; batch < last; ++batch) mine += tiles_of(batch);
  int before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) sScan[warp] = before;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int w = 0; w < kCfg.warps; ++w) {
    const int tiles = sScan[w];
    if (w < warp) before += tiles;
    total += tiles;
  }
  before -= mine;
  share.total = total, share.size = size_of(total);
  walk.at = block * share.size, walk.end = min(walk.at + share.size, total);
  if (walk.at >= walk.end) return share;
  if (walk.at >= before && walk.at < before + mine) {
    int batch = first;
    for (int tiles; walk.at >= before + (tiles = tiles_of(batch)); ++batch) before += tiles;
    sScan[kCfg.warps] = batch, sScan[kCfg.warps + 1] = walk.at - before;
  }
  __syncthreads();
  walk.batch = sScan[kCfg.warps];
  const int rest = sScan[kCfg.warps + 1];
  walk.share = sequence_share<kCfg>(p, walk.batch);
  walk.work = rest / walk.share.tiles, walk.tile = rest - walk.work * walk.share.tiles;
  return share;
}

}  // namespace tessera
