// Bounds of what a score program's mask reads of columns (keys, or transposed queries), for each block of them and for
// each group of kBoundsGroup blocks: program_lists decides most blocks by these alone. Also empties the lists' pool.
//
// Grid: one block for each of batches x heads x groups. Block: kProgramListsThreads threads.
#pragma once

#include "tessera/block_lists/program_side.cuh"

namespace tessera {

// `program` and Program: the params and the text of the program.
template <ProgramListsConfig kCfg, class Program>
TESSERA_DEVICE void bound_columns(const ProgramListsParams& p, const ScoreProgramParams& program) {
  using Side = MaskSide<Program, !kCfg.transposed>;
  using Bounds = typename Side::Bounds;
  constexpr int kWarps = kProgramListsThreads / 32;
  __shared__ Bounds sBounds[kWarps];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int groups = ColumnBounds<Side>::groups(p);
  const int group = static_cast<int>(blockIdx.x) % groups, mask = static_cast<int>(blockIdx.x) / groups;
  const int batch = mask / p.heads, head = mask % p.heads;
  const Sequence s = load_sequence<false>(p, batch);
  const int end = kCfg.transposed ? s.sq : s.sk;
  const ColumnBounds<Side> columns{p};
  Bounds of_warp;
  of_warp.visit(ClearBounds{});
  for (int n = warp; n < kBoundsGroup; n += kWarps) {
    const int block = group * kBoundsGroup + n;
    if (block >= p.lists.most) break;
    const Bounds bounds =
        bounds_of<Side>(program, p, s, batch, head, block * kCfg.cols, min((block + 1) * kCfg.cols, end));
    if (lane == 0) *columns.block(mask, block) = bounds;
    of_warp.join(bounds);
  }
  if (lane == 0) sBounds[warp] = of_warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (group == 0 && mask == 0) p.lists.words[0] = 0;
  for (int n = 1; n < kWarps; ++n) of_warp.join(sBounds[n]);
  *columns.group(mask, group) = of_warp;
}

template <ProgramListsConfig kCfg>
TESSERA_DEVICE void program_bounds(const ProgramListsParams& p) {
  using Types = ProgramTypes<kCfg.score.program>;
  bound_columns<kCfg, typename Types::Program>(p, static_cast<const typename Types::Params&>(p).program);
}

}  // namespace tessera
