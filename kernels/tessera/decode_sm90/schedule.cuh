// Assigns keys to blocks: split-K as in Flash-Decoding, by the lengths in use, but with ranges of equal size over the
// whole batch. A work tile is at most kCfg.rows query rows of one KV head of one sequence. Its K/V tiles are those
// that its rows see, at least one. The K/V tiles of all work tiles are concatenated and cut into ranges of equal size,
// so sequences of unequal lengths still fill the GPU. A range holds the last K/V tiles of one work tile, then some
// complete work tiles, then the first K/V tiles of another. The results of a work tile that lies in two or more ranges
// are merged (epilogue.cuh).
//
// A range belongs to a group of blocks: each block computes one of group_heads neighbouring KV heads, whose keys are
// neighbours in memory, and one of group_rows row tiles, which read the same keys. The blocks of a group walk through
// the same K/V tiles. A block skips a sequence that has too few rows for it.
//
// `invariant`: a work tile has at most most_parts parts, whose size depends only on the number of its own keys, and
// each is summed by itself. A part belongs to the range that contains its first tile. Groups of kDecodeGroupParts
// neighbouring parts are summed first, then the groups' sums. The same additions are therefore made whatever batch
// contains the sequence. If one group of blocks computes all parts of a group of parts, memory receives only their sum.
#pragma once

#include "tessera/attention/sequence.cuh"
#include "tessera/decode_sm90/config.hpp"

namespace tessera {

// Row r of a sequence is query r / group of head r % group of the KV head's query heads, so neighbouring rows see
// nearly the same keys.
struct DecodeRows {
  int head0;  // first query head of the KV head
  TESSERA_DEVICE DecodeRows(const ProblemParams& p, int head_kv) : head0(head_kv * p.group.value) {}
  TESSERA_DEVICE int query(const ProblemParams& p, int row) const { return row / p.group; }
  TESSERA_DEVICE int head(const ProblemParams& p, int row) const { return head0 + row % p.group; }
};

// What the schedule needs to know of a sequence.
struct SequenceTiles {
  Sequence s;
  int row_groups;  // work tiles of a KV head / group_rows; a range covers one such set for each group of heads
  int first_tile;  // first K/V tile
  int tiles;       // K/V tiles of a work tile
  TESSERA_DEVICE int work_tiles(const DecodeSm90Params& p) const { return row_groups * p.head_groups; }
};

template <DecodeSm90Config kCfg>
TESSERA_DEVICE SequenceTiles sequence_tiles(const DecodeSm90Params& p, int batch) {
  SequenceTiles sequence;
  sequence.s = load_sequence<kCfg.varlen, kCfg.paged, kCfg.score>(p, batch);
  if (kCfg.varlen && (sequence.s.sq > p.most_queries || sequence.s.sq < p.least_queries)) sequence.s.sq = 0;
  const Sequence& s = sequence.s;
  const int row_tiles = (s.sq * p.group.value + kCfg.rows - 1) / kCfg.rows;
  sequence.row_groups = (row_tiles + p.group_rows.value - 1) / p.group_rows;
  const KeyRange first = visible_keys<kCfg.score>(p, s, 0), last = visible_keys<kCfg.score>(p, s, max(s.sq - 1, 0));
  const int low = max(first.low, 0), high = min(last.high, s.sk - 1);
  sequence.first_tile = low / kCfg.block_n;
  sequence.tiles = high < low ? 1 : high / kCfg.block_n - sequence.first_tile + 1;
  return sequence;
}

template <DecodeSm90Config kCfg>
TESSERA_DEVICE int invariant_part_tiles(const DecodeSm90Params& p, int tiles) {
  return max((tiles + p.most_parts.value - 1) / p.most_parts, tiles > p.short_tiles ? 2 * p.min_tiles : p.min_tiles);
}

// The parts of a work tile, and their slots: part 0 is in first_slot, part 1 in second_slot, and each later part `step`
// slots after the one before. Without `invariant`, a block writes at most two parts: of the work tiles with which its
// range begins and ends. With `invariant`, all parts of a work tile are in the slots of the first group of blocks that
// computes some; a work tile that one block computes alone needs no slot.
struct TileParts {
  int count, block_groups;  // parts, and groups of blocks that compute some
  int index;                // index of the part that is the block's segment
  int counter;              // arrivals are counted in the counter of the block with the first part
  int first_slot, second_slot, step;
  TESSERA_DEVICE bool shared() const { return block_groups > 1; }
  TESSERA_DEVICE int slot(int n) const { return n == 0 ? first_slot : second_slot + (n - 1) * step; }
};

// The parts of a work tile that are merged at once, from a part of it. Few parts are all merged by the last block to
// arrive. Many are merged in two levels, because one multiprocessor would read them all from the L2 cache for longer
// than it read its keys: the last block to arrive of a group of group_parts neighbouring parts replaces them by their
// sum, and the last of these blocks merges the sums. No group has a single part: a part left over belongs to the group
// before it. A sum's slot is the second one of a block whose range lies within the work tile, otherwise unused.
struct PartsMerge {
  TileParts parts;  // index: of the block's part or group among those that are merged
  int to_slot;      // of their sum; -1: it is the result

  TESSERA_DEVICE PartsMerge(const DecodeSm90Params& p, const TileParts& all, int level, int blocks)
      : parts(all), to_slot(-1) {
    if (all.count <= p.many_parts) return;
    const int size = p.group_parts.value, groups = (all.count + size - 2) / p.group_parts;
    const int group = min(all.index / p.group_parts, groups - 1), first = group * size;
    const auto slot_of_sum = [&](int of) { return all.slot(max(of * size, 1)) + 1; };
    if (level > 0) {
      parts.count = parts.block_groups = groups, parts.index = group;
      parts.first_slot = slot_of_sum(0), parts.second_slot = slot_of_sum(1), parts.step = size * all.step;
    } else {
      parts.count = parts.block_groups = (group == groups - 1 ? all.count : first + size) - first, parts.index -= first;
      parts.counter = blocks + all.counter + first * p.group_blocks.value;
      if (first > 0) parts.first_slot = all.slot(first), parts.second_slot = parts.first_slot + all.step;
      to_slot = slot_of_sum(group);
    }
  }
};

// A part of a work tile that lies in one range: K/V tiles begin ... end - 1.
struct Segment {
  int batch, head_kv, row0, rows;  // rows row0 ... row0 + rows - 1 of the sequence
  Sequence s;
  int begin, end;
  int tiles_before, tiles;  // K/V tiles of all work tiles before this one, and of this work tile
  int first;                // the part's first K/V tile, counted within the work tile
  int part_tiles;           // invariant: K/V tiles of every part but the last
  bool whole, last;         // whole: the part is the entire work tile; last: it is the last part
  bool whole_group;         // invariant: one group of blocks computes all parts of the part's group (set_parts)
  TileParts parts;          // unset if whole; set when the block reaches the segment (RangeSegments::set_parts)
};

static_assert(sizeof(Segment) == kDecodeSegmentBytes);

// Iterates over the segments of a range.
template <DecodeSm90Config kCfg>
struct RangeWalk {
  int block_group, member;  // which range, and which block of its group
  int head, row_tile;       // the block's KV head and row tile within its group
  int range_tiles;  // K/V tiles of every range but the last: range i is i range_tiles ... (i + 1) range_tiles - 1
  int batch, work_tile, tile;  // work_tile counts within the sequence, tile within the work tile
  int at, end;                 // counted over the K/V tiles of all work tiles
  SequenceTiles sequence;

  TESSERA_DEVICE bool next(const DecodeSm90Params& p, Segment& segment) {
    do {
      if (at >= end) return false;
      while (work_tile >= sequence.work_tiles(p)) {  // the next sequence that has rows
        ++batch, work_tile = 0;
        if constexpr (kCfg.varlen) sequence = sequence_tiles<kCfg>(p, batch);
      }
      take(p, segment);
    } while (segment.rows <= 0);
    return true;
  }

 private:
  // Writes the segment that begins at the current position and advances. rows <= 0: this block has no rows of that work
  // tile.
  TESSERA_DEVICE void take(const DecodeSm90Params& p, Segment& segment) {
    segment.batch = batch;
    const int group = sequence.row_groups == 1 ? work_tile : work_tile / sequence.row_groups;
    segment.head_kv = group * p.group_heads.value + head;
    segment.row0 = ((work_tile - group * sequence.row_groups) * p.group_rows.value + row_tile) * kCfg.rows;
    segment.rows = min(sequence.s.sq * p.group.value - segment.row0, kCfg.rows);
    segment.s = sequence.s;
    const int part = kCfg.invariant ? invariant_part_tiles<kCfg>(p, sequence.tiles) : end - at;
    const int count = min(sequence.tiles - tile, part);
    segment.begin = sequence.first_tile + tile, segment.end = segment.begin + count;
    segment.tiles_before = at - tile, segment.tiles = sequence.tiles;
    segment.first = tile, segment.part_tiles = part;
    segment.whole = count == sequence.tiles, segment.last = tile + count == sequence.tiles;
    at += count, tile += count;
    if (segment.last) ++work_tile, tile = 0;
  }

 public:
  // Advances to the first part that begins at or after the current position.
  TESSERA_DEVICE void align_to_part(const DecodeSm90Params& p) {
    const int part = invariant_part_tiles<kCfg>(p, sequence.tiles);
    const int next = min((tile + part - 1) / part * part, sequence.tiles);
    at += next - tile, tile = next;
    if (tile == sequence.tiles) ++work_tile, tile = 0;
  }
};

// A block's segments, in shared memory. One thread walks ahead of the others, so that no other thread keeps the walk in
// registers or executes its code. Segment n is at n % kRing, from the schedule's start or from segment n - kAhead on.
template <DecodeSm90Config kCfg>
struct RangeSegments {
  static constexpr int kRing = kDecodeSegmentRing,
                       kAhead = kRing - 2;  // the two segments that a block may be reading are never overwritten
  Segment ring[kRing];
  RangeWalk<kCfg> walk;

  TESSERA_DEVICE const Segment& operator[](int n) const { return ring[n & (kRing - 1)]; }
  // Writes segments first ... last - 1, by one thread. Segments past the end of the range have no rows.
  TESSERA_DEVICE void walk_over(const DecodeSm90Params& p, int first, int last) {
#pragma unroll 1
    for (int n = first; n < last; ++n) {
      Segment& next = ring[n & (kRing - 1)];
      if (!walk.next(p, next)) next.rows = 0;
    }
  }
  // Invariant: the first and the last part of a group of parts of a segment's work tile.
  struct PartGroup {
    int first, last;
    TESSERA_DEVICE PartGroup(const Segment& segment, int group)
        : first(group * kDecodeGroupParts), last(min(first + kDecodeGroupParts, segment.parts.count) - 1) {}
  };
  // Invariant: whether each part has a group of blocks of its own, which is so if a part is at least as long as a
  // range. If parts are shorter, every group of blocks from the first to the last has one.
  TESSERA_DEVICE bool group_a_part(const Segment& segment) const { return segment.part_tiles >= walk.range_tiles; }
  // Invariant: whether one group of blocks computes all parts of a group of parts.
  TESSERA_DEVICE bool group_is_whole(const Segment& segment, PartGroup group) const {
    if (group_a_part(segment)) return false;
    const auto group_of_part = [&](int part) {
      return (segment.tiles_before + part * segment.part_tiles) / walk.range_tiles;
    };
    return group_of_part(group.first) == group_of_part(group.last);
  }
  // Invariant: bit n is set if part n is in memory once all blocks have arrived. A group of parts that one group of
  // blocks computes has only its last bit set: that slot holds the group's sum.
  TESSERA_DEVICE uint32 parts_in_memory(const Segment& segment) const {
    uint32 all = (1u << segment.parts.count) - 1;
    if (group_a_part(segment)) return all;  // a short call waits for this
    for (int n = 0; n * kDecodeGroupParts < segment.parts.count; ++n) {
      const PartGroup group(segment, n);
      if (group_is_whole(segment, group)) all &= ~((1u << group.last) - (1u << group.first));
    }
    return all;
  }
  // Sets the parts of segment n, by one thread: otherwise all threads would wait for five divisions where parts are
  // written, counted and merged.
  TESSERA_DEVICE void set_parts(const DecodeSm90Params& p, int n) {
    Segment& segment = ring[n & (kRing - 1)];
    if (segment.whole) return;
    const int range_tiles = walk.range_tiles, first_group = segment.tiles_before / range_tiles;
    TileParts& parts = segment.parts;
    parts.counter = first_group * p.group_blocks.value + walk.member;
    if constexpr (kCfg.invariant) {
      parts.count = (segment.tiles + segment.part_tiles - 1) / segment.part_tiles;
      parts.index = segment.first / segment.part_tiles;
      const int last_group = (segment.tiles_before + (parts.count - 1) * segment.part_tiles) / range_tiles;
      parts.block_groups = group_a_part(segment) ? parts.count : last_group - first_group + 1;
      parts.first_slot = parts.counter * kDecodeMostParts, parts.second_slot = parts.first_slot + 1, parts.step = 1;
      segment.whole_group = group_is_whole(segment, {segment, parts.index / kDecodeGroupParts});
    } else {
      parts.count = parts.block_groups = (segment.tiles_before + segment.tiles - 1) / range_tiles - first_group + 1;
      parts.index = walk.block_group - first_group;
      const bool begins_range = first_group * range_tiles == segment.tiles_before;
      parts.first_slot = 2 * parts.counter + !begins_range;
      parts.second_slot = 2 * (parts.counter + p.group_blocks.value), parts.step = 2 * p.group_blocks.value;
    }
  }
};
static_assert((kDecodeSegmentRing & (kDecodeSegmentRing - 1)) == 0);
static_assert(sizeof(RangeSegments<DecodeSm90Config{}>) == kDecodeSegmentsBytes);

// Returns rest / by and leaves the remainder in rest. A division is a chain of 25 dependent instructions; a single
// sequence skips it.
TESSERA_DEVICE int divide_out(int& rest, int by) {
  if (rest < by) return 0;
  const int times = rest / by;
  rest -= times * by;
  return times;
}

// Finds the range of block `block`, by all of its threads; its first segment is then visible to all of them. sScan:
// [warps].
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void find_range(const DecodeSm90Params& p, int block, int thread, int* sScan,
                               RangeSegments<kCfg>& sSegments) {
  RangeWalk<kCfg> walk;
  walk.block_group = block / p.group_blocks, walk.member = block - walk.block_group * p.group_blocks.value;
  walk.row_tile = walk.member / p.group_heads, walk.head = walk.member - walk.row_tile * p.group_heads.value;
  // Starts the walk at K/V tile `rest` of sequence walk.batch.
  const auto begin = [&](int rest) {
    walk.work_tile = divide_out(rest, walk.sequence.tiles), walk.tile = rest;
    if constexpr (kCfg.invariant) walk.align_to_part(p);
    sSegments.walk = walk;
    sSegments.walk_over(p, 0, 1);
  };
  const auto set_share = [&](int total) {
    walk.range_tiles = max((total + p.block_groups.value - 1) / p.block_groups, p.min_tiles);
    walk.at = walk.block_group * walk.range_tiles, walk.end = min(walk.at + walk.range_tiles, total);
  };
  if constexpr (!kCfg.varlen) {  // all sequences have the same lengths
    walk.sequence = sequence_tiles<kCfg>(p, 0);
    const int each = walk.sequence.work_tiles(p) * walk.sequence.tiles;
    set_share(each * p.batch);
    if (thread == 0) {
      if (walk.at < walk.end) {
        int rest = walk.at;
        walk.batch = divide_out(rest, each);
        begin(rest);
      } else {
        sSegments.ring[0].rows = 0;
      }
    }
  } else {
    // Each thread counts the K/V tiles of some neighbouring sequences; a scan gives the number of tiles before them.
    constexpr int kThreads = kCfg.warps * 32;
    const int each = (p.batch + kThreads - 1) / kThreads, first = min(thread * each, p.batch),
              last = min(first + each, p.batch);
    const auto tiles_of = [&](int batch) {
      walk.sequence = sequence_tiles<kCfg>(p, batch);
      return walk.sequence.work_tiles(p) * walk.sequence.tiles;
    };
    int mine = 0;
#pragma unroll 1
    for (int batch = first; batch < last; ++batch) mine += tiles_of(batch);
    if (thread == 0) sSegments.ring[0].rows = 0;
    int total = mine, before = 0;  // correct as they are for one sequence, which is the first thread's
    if (p.batch > 1) before = sum_before<kCfg.warps>(thread, mine, sScan, total);
    set_share(total);
    if (walk.at < walk.end && walk.at >= before && walk.at < before + mine) {
      walk.batch = first;
      if (each > 1) {
#pragma unroll 1
        for (int tiles; walk.at >= before + (tiles = tiles_of(walk.batch)); ++walk.batch) before += tiles;
      }
      begin(walk.at - before);
    }
  }
  __syncthreads();
}

}  // namespace tessera
