// Lists of the blocks of columns that each tile of rows sees by a score program's mask, position and a block mask.
// Most blocks are decided by interval arithmetic over what the mask reads of rows and columns, groups of kBoundsGroup
// blocks first; the others are evaluated entry by entry. A mask of documents, or a window, of 2^20 tokens costs each
// tile of rows some 256 groups and a few evaluated blocks.
//
// A list takes as many entries of the pool as there are blocks that bounds do not exclude. A padded tile index of a
// packed batch that belongs to no sequence has an empty list.
//
// Grid: one block a list, for each mask and tile of rows. Block: kProgramListsThreads threads.
#pragma once

#include "tessera/block_lists/program_tile.cuh"

namespace tessera {

template <ProgramListsConfig kCfg, class Program>
TESSERA_DEVICE void make_list(const ProgramListsParams& p, const ScoreProgramParams& program) {
  static_assert(kCfg.rows % kListHalves == 0, "ProgramListsConfig");
  using Tile = ProgramTile<kCfg, Program>;
  constexpr int kWarps = kProgramListsThreads / 32;
  __shared__ typename Tile::RowBounds sHalves[kListHalves];
  __shared__ int sBits[kBoundsGroup], sCandidates, sBegin;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int list = static_cast<int>(blockIdx.x), lists = static_cast<int>(gridDim.x);
  const SideTile rows = SideTiles<kCfg, kCfg.transposed, kCfg.rows>{p, p.lists.tiles}.at(list);
  const int batch = rows.batch, head = rows.head;
  const Tile tile{p, program, rows.s, batch, head, rows.tile, sHalves};
  const ColumnBounds<kCfg, typename Tile::Columns> columns(p, batch, head);
  int* const list_words = p.lists.words + kProgramHeadsAt + 2 * static_cast<int64>(list);

  if (warp < kListHalves) {
    const auto bounds =
        bounds_of<typename Tile::Rows>(program, p, tile.s, batch, head, tile.first_row(warp), tile.end_row(warp));
    if (lane == 0) sHalves[warp] = bounds;
  }
  if (threadIdx.x == 0) sCandidates = 0;
  __syncthreads();

  // Visits groups that bounds do not exclude, in the list's order; every warp visits all of them.
  const KeyRange blocks = tile.blocks();
  const int first_group = blocks.low / kBoundsGroup, groups = (blocks.high + kBoundsGroup) / kBoundsGroup - first_group;
  const auto group_at = [&](int n) { return kCfg.transposed ? first_group + groups - 1 - n : first_group + n; };
  const auto for_each_group = [&](auto&& visit) {
    for (int from = 0; from < groups; from += 32) {
      bool seen = false;
      if (from + lane < groups) {
        const int group = group_at(from + lane), col = group * kBoundsGroup * kCfg.cols;
        const int bits = tile.template known<false>(col, col + kBoundsGroup * kCfg.cols - 1, columns.groups[group]);
        seen = !Tile::is_hidden(bits);
      }
      const uint32 seen_by = __ballot_sync(0xffffffff, seen);
      for (int n = 0; n < 32; ++n) {
        if (seen_by >> n & 1) visit(from + n);
      }
    }
  };
  // The block of a group whose entry is the n-th, and what bounds say of it.
  const auto block_at = [&](int group, int n) {
    return group * kBoundsGroup + (kCfg.transposed ? kBoundsGroup - 1 - n : n);
  };
  const auto known_bits = [&](int block) {
    if (block < blocks.low || block > blocks.high) return kListHidden;
    return tile.template known<true>(block * kCfg.cols, (block + 1) * kCfg.cols - 1, columns.blocks[block]);
  };

  // 1. Room for every block that bounds do not exclude.
  int candidates = 0;
  for_each_group([&](int n) {
    if (n % kWarps != warp) return;
    const bool seen = !Tile::is_hidden(known_bits(block_at(group_at(n), lane)));
    candidates += __popc(__ballot_sync(0xffffffff, seen));
  });
  if (lane == 0 && candidates > 0) atomicAdd(&sCandidates, candidates);
  __syncthreads();
  if (threadIdx.x == 0) {
    const int pool = kProgramHeadsAt + 2 * lists, room = p.end_word - pool;
    // A full pool is not added to, so that the sum cannot overflow.
    const int begin = sCandidates > room || *p.lists.words > room ? room : atomicAdd(p.lists.words, sCandidates);
    const bool made = sCandidates == 0 || begin <= room - sCandidates;
    sBegin = made ? pool + begin : kListNotMade;
    if (!made) p.lists.words[kProgramLacksRoom] = 1;
    if (p.tile_counter && list == 0) *p.tile_counter = 0;
  }
  __syncthreads();
  const int begin = sBegin;
  if (begin == kListNotMade) {
    if (threadIdx.x != 0) return;
    list_words[0] = kListNotMade, list_words[1] = 0;
    return;
  }

  // 2. The entries, a group at a time.
  int count = 0;  // known to warp 0
  for_each_group([&](int n) {
    const int group = group_at(n);
    if (warp == 0) sBits[lane] = known_bits(block_at(group, lane));
    __syncthreads();
    if constexpr (!Program::kMaskNeedsS) {
      for (int at = warp; at < kBoundsGroup; at += kWarps) {
        int bits = sBits[at];
#pragma unroll
        for (int half = 0; half < kListHalves; ++half) {
          if (!Tile::is_decided(bits, half)) bits |= tile.evaluated(half, block_at(group, at));
        }
        __syncwarp();
        if (lane == 0) sBits[at] = bits;
      }
      __syncthreads();
    }
    if (warp == 0) {
      const int bits = sBits[lane];
      const bool seen = !Tile::is_hidden(bits);
      const uint32 seen_by = __ballot_sync(0xffffffff, seen);
      int* const entries = p.lists.words + begin + count;
      if (seen) entries[__popc(seen_by & ((1u << lane) - 1))] = block_at(group, lane) << kProgramEntryBits | bits;
      count += __popc(seen_by);
    }
    __syncthreads();
  });
  if (threadIdx.x != 0) return;
  list_words[0] = count, list_words[1] = begin;
  if (p.long_lists && is_long_list(count, p.lists.most)) atomicAdd(p.long_lists, 1);
}

template <ProgramListsConfig kCfg>
TESSERA_DEVICE void program_lists(const ProgramListsParams& p) {
  using Types = ProgramTypes<kCfg.score.program>;
  make_list<kCfg, typename Types::Program>(p, static_cast<const typename Types::Params&>(p).program);
}

}  // namespace tessera
