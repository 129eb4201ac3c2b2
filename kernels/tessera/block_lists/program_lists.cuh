// Lists of the blocks of columns that each tile of rows sees by a score program's mask, position and a block mask.
// Most blocks are decided by interval arithmetic over what the mask reads of rows and columns, groups of kBoundsGroup
// blocks first. A warp samples each of the others; what may still be full, or hidden, is evaluated pair by pair. A mask
// of documents, or a window, of 2^20 tokens costs each tile of rows some 256 groups and a few evaluated blocks.
//
// A list takes as many entries of the pool as there are blocks that bounds do not exclude. A padded tile index of a
// packed batch that belongs to no sequence has an empty list.
//
// Grid: one block a list, for each mask and tile of rows. Block: kProgramListsThreads threads.
#pragma once

#include "tessera/block_lists/program_tile.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

TESSERA_DEVICE int lowest_bit(uint32 x) { return __popc((x & (0u - x)) - 1); }

// Orders a mask's tiles by the lengths of their lists, the longest first, and later tiles first among equals. The last
// of the mask's blocks does. Thread 0 has written its list.
TESSERA_DEVICE void order_tiles(const BlockLists& lists, int first_list) {
  __shared__ uint32 sCounts[kMostOrderedTiles];  // a list that was not made is the longest
  __shared__ bool sLast;
  if (!orders_tiles(lists)) return;
  if (threadIdx.x == 0) {
    __threadfence();
    sLast = atomicAdd(ordered_tile(lists, first_list, 0), 1) == lists.tiles - 1;  // program_bounds cleared it
  }
  __syncthreads();
  if (!sLast) return;
  for (int tile = static_cast<int>(threadIdx.x); tile < lists.tiles; tile += kProgramListsThreads) {
    sCounts[tile] = static_cast<uint32>(ptx::ld_acquire_s32(lists.words + program_head_at(first_list + tile)));
  }
  __syncthreads();
  for (int tile = static_cast<int>(threadIdx.x); tile < lists.tiles; tile += kProgramListsThreads) {
    const uint32 count = sCounts[tile];
    int place = 0;
    for (int other = 0; other < lists.tiles; ++other) {
      place += sCounts[other] > count || (sCounts[other] == count && other > tile);
    }
    *ordered_tile(lists, first_list, place) = tile;
  }
}

template <ProgramListsConfig kCfg, class Program>
TESSERA_DEVICE void make_list(const ProgramListsParams& p, const ScoreProgramParams& program) {
  static_assert(kCfg.rows % kListHalves == 0, "ProgramListsConfig");
  using Tile = ProgramTile<kCfg, Program>;
  using Columns = ColumnBounds<kCfg, typename Tile::Columns>;
  constexpr int kWarps = kProgramListsThreads / 32, kBlocks = kWarps * kBoundsGroup;  // kBlocks: of a round
  __shared__ typename Tile::RowBounds sHalves[kListHalves];
  [[maybe_unused]] __shared__ int sBits[kBlocks], sGroups[kWarps], sSeen[kWarps], sBegin;
  __shared__ bool sShows[kListHalves][kBlocks], sHides[kListHalves][kBlocks];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int list = static_cast<int>(blockIdx.x), lists = static_cast<int>(gridDim.x);
  const SideTile rows = SideTiles<kCfg, kCfg.transposed, kCfg.rows>{p, p.lists.tiles}.at(list);
  const int batch = rows.batch, head = rows.head;
  const Tile tile{p, program, rows.s, batch, head, rows.tile, sHalves};
  const Columns columns(p, batch, head);
  int* const list_words = p.lists.words + program_head_at(list);

  // Groups of blocks in the list's order, and the block of one of them whose entry is the n-th. If they fit into one
  // round, the groups' own bounds are not needed, and those of the blocks are loaded beside the rows.
  const KeyRange blocks = tile.blocks();
  const int first_group = blocks.low / kBoundsGroup, groups = (blocks.high + kBoundsGroup) / kBoundsGroup - first_group;
  const bool one_round = groups <= kWarps;
  const auto group_at = [&](int n) { return kCfg.transposed ? first_group + groups - 1 - n : first_group + n; };
  const auto block_at = [&](int group, int n) {
    return group * kBoundsGroup + (kCfg.transposed ? kBoundsGroup - 1 - n : n);
  };
  const auto holds = [&](int block) { return blocks.low <= block && block <= blocks.high; };
  typename Columns::Bounds loaded;
  loaded.visit(ClearBounds{});
  if (const int block = block_at(group_at(warp), lane); one_round && holds(block)) loaded = columns.blocks[block];

  if (warp < kListHalves) {
    const auto bounds =
        bounds_of<typename Tile::Rows>(program, p, tile.s, batch, head, tile.first_row(warp), tile.end_row(warp));
    if (lane == 0) sHalves[warp] = bounds;
  }
  __syncthreads();

  // Visits the groups that bounds do not exclude, one a warp in each round. visit(block): the lane's, or -1.
  const auto for_each_round = [&](auto&& visit) {
    for (int from = 0; from < groups; from += 32) {
      bool seen = from + lane < groups;
      if (seen && !one_round) {
        const int group = group_at(from + lane), col = group * kBoundsGroup * kCfg.cols;
        const int bits = tile.template known<false>(col, col + kBoundsGroup * kCfg.cols - 1, columns.groups[group]);
        seen = !Tile::is_hidden(bits);
      }
      uint32 left = __ballot_sync(0xffffffff, seen);
      while (left != 0) {
        int block = -1;
        for (int n = 0; n < kWarps && left != 0; ++n, left &= left - 1) {
          if (n == warp) block = block_at(group_at(from + lowest_bit(left)), lane);
        }
        visit(block);
      }
    }
  };
  const auto known_bits = [&](int block) {
    if (!holds(block)) return kListHidden;
    auto bounds = loaded;
    if (!one_round) bounds = columns.blocks[block];
    return tile.template known<true>(block * kCfg.cols, (block + 1) * kCfg.cols - 1, bounds);
  };

  // 1. Room for every block that bounds do not exclude. The answer is awaited during the first round.
  int bits = kListHidden, rounds = 0, candidates = 0;
  for_each_round([&](int block) {
    bits = known_bits(block);
    candidates += __popc(__ballot_sync(0xffffffff, !Tile::is_hidden(bits)));
    ++rounds;
  });
  if (lane == 0) sSeen[warp] = candidates;
  __syncthreads();
  const int pool = static_cast<int>(program_pool_at(lists)), room = p.end_word - pool;
  int taken = room;
  if (thread == 0) {
    candidates = 0;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) candidates += sSeen[n];
    // A full pool is not added to where the sum could overflow.
    const bool may_overflow = static_cast<int64>(lists) * p.lists.most > 0x7fffffff;
    if (candidates <= room && !(may_overflow && *p.lists.words > room)) taken = atomicAdd(p.lists.words, candidates);
    if (p.tile_counter && list == 0) *p.tile_counter = 0;
  }
  const auto share_begin = [&] {
    if (thread != 0) return;
    const bool made = candidates == 0 || taken <= room - candidates;
    sBegin = made ? pool + taken : kListNotMade;
    if (!made) p.lists.words[kProgramLacksRoom] = 1;
  };

  // 2. The entries. A block that bounds do not decide is sampled by a warp; if the samples do not show that a half of
  // it is partial, all warps evaluate that.
  const auto block_of = [&](int at) { return block_at(sGroups[at / kBoundsGroup], at % kBoundsGroup); };
  const auto for_each_undecided = [&](auto&& visit) {
    for (int first = 0; first < min(groups, kWarps) * kBoundsGroup; first += kBoundsGroup) {
      const int of = sBits[first + lane];
      const bool decided = Tile::is_hidden(of) || (Tile::is_decided(of, 0) && Tile::is_decided(of, 1));
      uint32 left = __ballot_sync(0xffffffff, !decided);
      for (; left != 0; left &= left - 1) visit(first + lowest_bit(left));
    }
  };
  const auto mark = [&](int half, int at, const typename Tile::Pairs& pairs) {
    if (pairs.shows) sShows[half][at] = true;
    if (pairs.hides) sHides[half][at] = true;
  };
  constexpr int kUnknown = 0;
  int count = 0, begin = kUnknown;
  for_each_round([&](int block) {
    if (begin == kListNotMade) return;
    if (rounds > 1) bits = known_bits(block);
    sBits[thread] = bits;
    sShows[0][thread] = sShows[1][thread] = sHides[0][thread] = sHides[1][thread] = false;
    if (lane == 0) sGroups[warp] = max(block, 0) / kBoundsGroup;
    __syncthreads();
    if constexpr (!Program::kMaskNeedsS) {
      int turn = 0;
      for_each_undecided([&](int at) {
        const int half = lane / Tile::kSamples;
        if (turn++ % kWarps != warp || Tile::is_decided(sBits[at], half)) return;
        mark(half, at, tile.sampled(half, block_of(at), lane % Tile::kSamples));
      });
    }
    if (begin == kUnknown) share_begin();
    __syncthreads();
    begin = sBegin;
    if (begin == kListNotMade) return;
    if constexpr (!Program::kMaskNeedsS) {
      for_each_undecided([&](int at) {
#pragma unroll 1
        for (int half = 0; half < kListHalves; ++half) {
          if (Tile::is_decided(sBits[at], half) || (sShows[half][at] && sHides[half][at])) continue;
          mark(half, at, tile.evaluated(half, block_of(at), warp, kWarps));
        }
      });
      __syncthreads();
#pragma unroll
      for (int half = 0; half < kListHalves; ++half) {
        if (!Tile::is_decided(bits, half)) bits |= Tile::bits_of(half, {sShows[half][thread], sHides[half][thread]});
      }
    }
    const bool seen = !Tile::is_hidden(bits);
    const uint32 seen_by = __ballot_sync(0xffffffff, seen);
    if (lane == 0) sSeen[warp] = __popc(seen_by);
    __syncthreads();
    int before = count + __popc(seen_by & ((1u << lane) - 1));
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      before += n < warp ? sSeen[n] : 0;
      count += sSeen[n];
    }
    if (seen) p.lists.words[begin + before] = block << kProgramEntryBits | bits;
  });
  if (thread == 0) {
    const bool made = begin != kListNotMade;
    list_words[0] = made ? count : kListNotMade, list_words[1] = made ? begin : 0;
    if (made && p.long_lists && is_long_list(count, p.lists.most)) atomicAdd(p.long_lists, 1);
  }
  if constexpr (kCfg.ordered) order_tiles(p.lists, list - list % p.lists.tiles);
}

template <ProgramListsConfig kCfg>
TESSERA_DEVICE void program_lists(const ProgramListsParams& p) {
  using Types = ProgramTypes<kCfg.score.program>;
  make_list<kCfg, typename Types::Program>(p, static_cast<const typename Types::Params&>(p).program);
}

}  // namespace tessera
