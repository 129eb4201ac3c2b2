// Which block reads which keys (split-K by the lengths in use, as Flash-Decoding's, but with splits of equal size over the batch). A work
// tile is query rows of one KV head of one sequence, at most kDecodeRows of them; its K/V tiles are those that its rows see, at
// least one. The K/V tiles of all work tiles, one work tile's after another's, are cut into shares of equal size: so unequal
// sequences fill the GPU, and a share has the last K/V tiles of one work tile, some whole work tiles,
// and the first tiles of another. What lies in two or more shares is merged (merge.cuh). A share is a team's: its blocks have a
// head each of team_heads neighbouring KV heads, whose keys lie side by side in memory, and team_rows of its work tiles, which read the same keys;
// they walk through the same tiles. A block whose sequence has fewer rows passes over it.
//
// `invariant`: a work tile has parts whose size depends on its own keys alone, at most most_parts of them, each summed by itself;
// a part is in the share that its first tile is in. Groups of kDecodeGroupParts neighbours are added first, then the groups' sums. So the same
// additions are made in whatever batch a sequence stands, and of a group that is one team's alone memory has but the sum.
#pragma once

#include "tessera/attention/mask.cuh"
#include "tessera/attention/sequence_scan.cuh"
#include "tessera/decode_sm90/config.hpp"

namespace tessera {

// Row r of a sequence is query r / group of head r % group of the group: neighbours see nearly the same keys.
struct DecodeRows {
  int head0;  // of the KV head
  TESSERA_DEVICE DecodeRows(const ProblemParams& p, int head_kv) : head0(head_kv * p.group.value) {}
  TESSERA_DEVICE int query(const ProblemParams& p, int row) const { return row / p.group; }
  TESSERA_DEVICE int head(const ProblemParams& p, int row) const { return head0 + row % p.group; }
};

// A sequence as the schedule sees it.
struct SequenceShare {
  Sequence s;
  int row_groups;  // work tiles of each KV head by team_rows; a share has one of each group of heads
  int first_tile;  // of keys
  int tiles;       // of a work tile
  TESSERA_DEVICE int work_tiles(const DecodeSm90Params& p) const { return row_groups * p.head_groups; }
};

template <DecodeSm90Config kCfg>
TESSERA_DEVICE SequenceShare sequence_share(const DecodeSm90Params& p, int batch) {
  SequenceShare share;
  share.s = load_sequence<kCfg.varlen, kCfg.paged, kCfg.score>(p, batch);
  if (kCfg.varlen && (share.s.sq > p.most_queries || share.s.sq < p.least_queries)) share.s.sq = 0;
  const Sequence& s = share.s;
  const int row_tiles = (s.sq * p.group.value + kDecodeRows - 1) / kDecodeRows;
  share.row_groups = (row_tiles + p.team_rows.value - 1) / p.team_rows;
  const KeyRange first = visible_keys<kCfg.score>(p, s, 0), last = visible_keys<kCfg.score>(p, s, max(s.sq - 1, 0));
  const int low = max(first.low, 0), high = min(last.high, s.sk - 1);
  share.first_tile = low / kCfg.block_n;
  share.tiles = high < low ? 1 : high / kCfg.block_n - share.first_tile + 1;
  return share;
}

template <DecodeSm90Config kCfg>
TESSERA_DEVICE int invariant_part_tiles(const DecodeSm90Params& p, int tiles) {
  return max((tiles + p.most_parts.value - 1) / p.most_parts, tiles > p.short_tiles ? 2 * p.min_tiles : p.min_tiles);
}

// The parts of a work tile, and where they are kept: part n > 0 `step` slots after part n - 1. A block has at most two that it shares with
// others, of the work tiles that its share begins and ends with. Invariant: all of a shared work tile's are where its first team keeps
// them; those of one that is a block's alone need no place.
struct TileParts {
  int count, teams;  // parts, and teams that have some
  int index;         // which of them the block's segment is
  int counter;       // of arrivals: that of the block with the first part
  int first_slot, second_slot, step;
  TESSERA_DEVICE bool shared() const { return teams > 1; }
  TESSERA_DEVICE int slot(int n) const { return n == 0 ? first_slot : second_slot + (n - 1) * step; }
};

// A part of a work tile, all of it in one team's share: K/V tiles begin ... end - 1.
struct Segment {
  int batch, head_kv, row0, rows;  // rows row0 ... row0 + rows - 1 of the sequence
  Sequence s;
  int begin, end;
  int tiles_before, tiles;  // K/V tiles of the work tiles before this one, and of it as a whole
  int first;                // of those, the part's first
  int part_tiles;           // invariant: of every part but the last
  bool whole, last;         // the part is the whole work tile; no other comes after it
  bool whole_group;         // invariant: its team has all parts of the part's group (set_parts)
  TileParts parts;          // unless it is whole; once the block is at it (ShareSegments::set_parts)
};

static_assert(sizeof(Segment) == kDecodeSegmentBytes);

// A walk over a share's segments.
template <DecodeSm90Config kCfg>
struct ShareWalk {
  int team, member;            // of the block: which share, which block of a team's
  int head, row_tile;          // of a group: the member's
  int share_tiles;             // of every share but the last: team i has i share_tiles ... (i + 1) share_tiles - 1
  int batch, work_tile, tile;  // the work tile: of the sequence; the K/V tile: of the work tile
  int at, end;                 // K/V tiles of all work tiles
  SequenceShare share;

  TESSERA_DEVICE bool next(const DecodeSm90Params& p, Segment& segment) {
    do {
      if (at >= end) return false;
      while (work_tile >= share.work_tiles(p)) {  // the next sequence that has rows
        ++batch, work_tile = 0;
        if constexpr (kCfg.varlen) share = sequence_share<kCfg>(p, batch);
      }
      take(p, segment);
    } while (segment.rows <= 0);
    return true;
  }

 private:
  // The part of a work tile that begins here. Without rows: none of this member's.
  TESSERA_DEVICE void take(const DecodeSm90Params& p, Segment& segment) {
    segment.batch = batch;
    const int group = share.row_groups == 1 ? work_tile : work_tile / share.row_groups;
    segment.head_kv = group * p.team_heads.value + head;
    segment.row0 = ((work_tile - group * share.row_groups) * p.team_rows.value + row_tile) * kDecodeRows;
    segment.rows = min(share.s.sq * p.group.value - segment.row0, kDecodeRows);
    segment.s = share.s;
    const int part = kCfg.invariant ? invariant_part_tiles<kCfg>(p, share.tiles) : end - at;
    const int count = min(share.tiles - tile, part);
    segment.begin = share.first_tile + tile, segment.end = segment.begin + count;
    segment.tiles_before = at - tile, segment.tiles = share.tiles;
    segment.first = tile, segment.part_tiles = part;
    segment.whole = count == share.tiles, segment.last = tile + count == share.tiles;
    at += count, tile += count;
    if (segment.last) ++work_tile, tile = 0;
  }

 public:
  // To the first part that begins here.
  TESSERA_DEVICE void align_to_part(const DecodeSm90Params& p) {
    const int part = invariant_part_tiles<kCfg>(p, share.tiles);
    const int next = min((tile + part - 1) / part * part, share.tiles);
    at += next - tile, tile = next;
    if (tile == share.tiles) ++work_tile, tile = 0;
  }
};

// A block's segments, in shared memory: one thread walks ahead of the others, so that no other has a walk in its registers, nor its
// code in the way. Segment n is at n % kRing from the schedule's start or segment n - kAhead on.
template <DecodeSm90Config kCfg>
struct ShareSegments {
  static constexpr int kRing = kDecodeSegmentRing,
                       kAhead = kRing - 2;  // the two that a block may have at once are never written
  Segment ring[kRing];
  ShareWalk<kCfg> walk;

  TESSERA_DEVICE const Segment& operator[](int n) const { return ring[n & (kRing - 1)]; }
  // Segments first ... last - 1, by one thread. Past the share's end there are those without rows.
  TESSERA_DEVICE void walk_over(const DecodeSm90Params& p, int first, int last) {
#pragma unroll 1
    for (int n = first; n < last; ++n) {
      Segment& next = ring[n & (kRing - 1)];
      if (!walk.next(p, next)) next.rows = 0;
    }
  }
  // Invariant: the first and the last part of a group of a segment's work tile.
  struct PartGroup {
    int first, last;
    TESSERA_DEVICE PartGroup(const Segment& segment, int group)
        : first(group * kDecodeGroupParts), last(min(first + kDecodeGroupParts, segment.parts.count) - 1) {}
  };
  // Invariant: parts that are at least a share each have a team of their own; of smaller ones no team between has none.
  TESSERA_DEVICE bool team_a_part(const Segment& segment) const { return segment.part_tiles >= walk.share_tiles; }
  // Invariant: whether one team has all parts of a group.
  TESSERA_DEVICE bool group_is_whole(const Segment& segment, PartGroup group) const {
    if (team_a_part(segment)) return false;
    const auto team_of = [&](int part) {
      return (segment.tiles_before + part * segment.part_tiles) / walk.share_tiles;
    };
    return team_of(group.first) == team_of(group.last);
  }
  // Invariant: the parts, a bit each, that are in memory once all have arrived: of a whole group its last alone, which is their sum.
  TESSERA_DEVICE uint32 parts_in_memory(const Segment& segment) const {
    uint32 all = (1u << segment.parts.count) - 1;
    if (team_a_part(segment)) return all;  // a short call waits for this
    for (int n = 0; n * kDecodeGroupParts < segment.parts.count; ++n) {
      const PartGroup group(segment, n);
      if (group_is_whole(segment, group)) all &= ~((1u << group.last) - (1u << group.first));
    }
    return all;
  }
  // Of segment n, by one thread: five divisions that all would wait for where parts are written, counted and merged.
  TESSERA_DEVICE void set_parts(const DecodeSm90Params& p, int n) {
    Segment& segment = ring[n & (kRing - 1)];
    if (segment.whole) return;
    const int share_tiles = walk.share_tiles, first_team = segment.tiles_before / share_tiles;
    TileParts& parts = segment.parts;
    parts.counter = first_team * p.team.value + walk.member;
    if constexpr (kCfg.invariant) {
      parts.count = (segment.tiles + segment.part_tiles - 1) / segment.part_tiles;
      parts.index = segment.first / segment.part_tiles;
      const int last_team = (segment.tiles_before + (parts.count - 1) * segment.part_tiles) / share_tiles;
      parts.teams = team_a_part(segment) ? parts.count : last_team - first_team + 1;
      parts.first_slot = parts.counter * kDecodeMostParts, parts.second_slot = parts.first_slot + 1, parts.step = 1;
      segment.whole_group = group_is_whole(segment, {segment, parts.index / kDecodeGroupParts});
    } else {
      parts.count = parts.teams = (segment.tiles_before + segment.tiles - 1) / share_tiles - first_team + 1;
      parts.index = walk.team - first_team;
      const bool begins_share = first_team * share_tiles == segment.tiles_before;
      parts.first_slot = 2 * parts.counter + !begins_share;
      parts.second_slot = 2 * (parts.counter + p.team.value), parts.step = 2 * p.team.value;
    }
  }
};
static_assert((kDecodeSegmentRing & (kDecodeSegmentRing - 1)) == 0);
static_assert(sizeof(ShareSegments<DecodeSm90Config{}>) == kDecodeSegmentsBytes);

// rest / by, and what remains in rest. A division is 25 instructions, one after another; a sequence alone does without.
TESSERA_DEVICE int divide_out(int& rest, int by) {
  if (rest < by) return 0;
  const int times = rest / by;
  rest -= times * by;
  return times;
}

// Which share is block `block`'s, by all of its threads: its first segment is there for all of them. sScan: [warps].
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void find_share(const DecodeSm90Params& p, int block, int thread, int* sScan,
                               ShareSegments<kCfg>& sSegments) {
  ShareWalk<kCfg> walk;
  walk.team = block / p.team, walk.member = block - walk.team * p.team.value;
  walk.row_tile = walk.member / p.team_heads, walk.head = walk.member - walk.row_tile * p.team_heads.value;
  // From tile `rest` of sequence walk.batch on.
  const auto begin = [&](int rest) {
    walk.work_tile = divide_out(rest, walk.share.tiles), walk.tile = rest;
    if constexpr (kCfg.invariant) walk.align_to_part(p);
    sSegments.walk = walk;
    sSegments.walk_over(p, 0, 1);
  };
  const auto set_share = [&](int total) {
    walk.share_tiles = max((total + p.teams.value - 1) / p.teams, p.min_tiles);
    walk.at = walk.team * walk.share_tiles, walk.end = min(walk.at + walk.share_tiles, total);
  };
  if constexpr (!kCfg.varlen) {  // all sequences are alike
    walk.share = sequence_share<kCfg>(p, 0);
    const int each = walk.share.work_tiles(p) * walk.share.tiles;
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
    // Each thread has some neighbouring sequences: their tiles, and by a scan all tiles before them.
    constexpr int kThreads = kCfg.warps * 32;
    const int each = (p.batch + kThreads - 1) / kThreads, first = min(thread * each, p.batch),
              last = min(first + each, p.batch);
    const auto tiles_of = [&](int batch) {
      walk.share = sequence_share<kCfg>(p, batch);
      return walk.share.work_tiles(p) * walk.share.tiles;
    };
    int mine = 0;
#pragma unroll 1
    for (int batch = first; batch < last; ++batch) mine += tiles_of(batch);
    if (thread == 0) sSegments.ring[0].rows = 0;
    int total = mine, before = 0;  // of a sequence alone, which is the first thread's
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
