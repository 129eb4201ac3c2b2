// Bounds of what a score program's mask reads of columns (keys, or transposed queries), for each block of them and for
// each group of kBoundsGroup blocks: program_lists decides most blocks by these alone. Also empties the lists' pool.
//
// Grid: one block for each of column_masks x column_groups. Block: kProgramBoundsThreads threads, a warp for each block
// of columns of the group.
#pragma once

#include "tessera/block_lists/program_side.cuh"

namespace tessera {

// `program` and Program: the params and the text of the program.
template <ProgramListsConfig kCfg, class Program>
TESSERA_DEVICE void bound_columns(const ProgramListsParams& p, const ScoreProgramParams& program) {
  using Side = MaskSide<kCfg, Program, !kCfg.transposed>;
  using Bounds = typename Side::Bounds;
  constexpr int kWarps = kProgramBoundsThreads / 32;
  static_assert(kWarps == kBoundsGroup && kWarps == 32, "a lane for each");
  __shared__ Bounds sBounds[kWarps];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  using Columns = ColumnBounds<kCfg, Side>;
  const int index = static_cast<int>(blockIdx.x);
  const SideTile group = typename Columns::Groups{p, p.column_groups}.at(index);
  const int end = kCfg.transposed ? group.s.sq : group.s.sk;
  const Columns columns(p, group.batch, group.head);
  Bounds of_warp;
  of_warp.visit(ClearBounds{});
  const int block = group.tile * kBoundsGroup + warp;
  if (block < (end + kCfg.cols - 1) / kCfg.cols) {
    of_warp = bounds_of<Side>(program, p, group.s, group.batch, group.head, block * kCfg.cols,
                              min((block + 1) * kCfg.cols, end));
    if (lane == 0) columns.blocks[block] = of_warp;
  }
  if (lane == 0) sBounds[warp] = of_warp;
  __syncthreads();
  if constexpr (kCfg.ordered) {  // the numbers of lists that are made
    const int masks = (p.lists.batch > 0 ? p.batch : 1) * p.heads;
    for (int mask = static_cast<int>(threadIdx.x); index == 0 && mask < masks; mask += kProgramBoundsThreads) {
      *ordered_tile(p.lists, mask * p.lists.tiles, 0) = 0;
    }
  }
  if (warp != 0) return;
  Bounds of_group = sBounds[lane];
  of_group.visit(JoinLanes{});
  if (lane != 0) return;
  if (index == 0) p.lists.words[0] = p.lists.words[kProgramLacksRoom] = 0;
  Columns(p).groups[index] = of_group;
}

template <ProgramListsConfig kCfg>
TESSERA_DEVICE void program_bounds(const ProgramListsParams& p) {
  using Types = ProgramTypes<kCfg.score.program>;
  bound_columns<kCfg, typename Types::Program>(p, static_cast<const typename Types::Params&>(p).program);
}

}  // namespace tessera
