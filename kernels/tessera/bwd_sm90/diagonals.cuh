// Gradients of a score program's elements that all pairs with the same i - j share (LoadSum::kDiagonals): sums of
// dScore, in float32, along the diagonals of a step's tile of 64 queries and 128 keys.
//
// A score warp has 16 keys of the tile: two rows of 8 x 8 blocks. A lane adds its elements of a block of the lower
// eight keys to those of the block of the upper eight keys and eight queries more, which have the same i - j, and
// stores the sums: nine blocks instead of sixteen. Warps of the producer's warpgroup, otherwise idle, add them up:
//
//   block n of score warp w has i - j = i0 - j0 + 8 c + column - row, where c = n - 1 - 2 w, from -15 to 7
//
// A lane adds one row of all blocks of a c in registers, then to a ring in shared memory, where each warp keeps a sum
// for each diagonal. After a step 64 diagonals are complete, as far as this block's keys have them, and are added to
// the sums in global memory.
#pragma once

#include "tessera/bwd_sm90/shared.cuh"

namespace tessera {

// Where a lane stores its two elements of an 8 x 8 block, as the fragments of S^T have them: row lane / 4, columns
// 2 (lane % 4) and the next. The halves of the lower four rows are exchanged: a lane's loads of half a row meet no bank
// conflict.
TESSERA_DEVICE constexpr int diagonal_offset(int row, int column) {
  return row * 32 + ((column / 4) ^ (row / 4)) * 16 + column % 4 * 4;
}

// The sink of the gradients of a diagonal's elements, one diagonal a lane. Called by all lanes of a warp.
template <class Program>
struct DiagonalSink {
  const ScoreProgramParams& p;
  const bool has_sum;  // the lane's diagonal has pairs

  template <int kLoad, int kTensor, class... Index>
  TESSERA_DEVICE void add(bool inside, float adjoint, Index... index) {
    if constexpr (Program::load_sum(kLoad) == LoadSum::kDiagonals) {
      if (!p.sums[kTensor]) return;
      const int64 element = sum_index(p.tensors[kTensor], index...);
      bool adds = inside && has_sum;
      // Elements of many diagonals (a head's, or those of far keys) are added once a warp.
      const uint32 adding = __ballot_sync(0xffffffff, adds);
      if (adding == 0) return;
      const int first = __ffs(static_cast<int>(adding)) - 1;
      const int low = static_cast<int>(element), high = static_cast<int>(element >> 32);
      const int first_low = __shfl_sync(0xffffffff, low, first), first_high = __shfl_sync(0xffffffff, high, first);
      if (__all_sync(0xffffffff, !adds || (low == first_low && high == first_high))) {
        adjoint = adds ? adjoint : 0.0f;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) adjoint += __shfl_xor_sync(0xffffffff, adjoint, distance);
        adds = static_cast<int>(threadIdx.x % 32) == first;
      }
      if (adds) add_to_sum<false>(p.sums[kTensor], element, adjoint);
    }
  }
};

template <BwdSm90Config kCfg>
struct DiagonalWarp {
  using Shared = BwdSm90Shared<kCfg>;
  using Program = typename ProgramTypes<kCfg.score.program>::Program;
  static constexpr int kRing = 256;  // diagonals; a step's tile has 191
  static_assert(kCfg.block_m == 64 && kCfg.block_n == 128 && !kCfg.deterministic && !kCfg.score.dropout);

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int warp;  // index of kBwdDiagonalWarps

  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }
  TESSERA_DEVICE uint32 ring(int diagonal) const {
    return shared.base + Shared::kAt.rings + warp * (kRing * 4) + diagonal % static_cast<uint32>(kRing) * 4;
  }

  TESSERA_DEVICE void run() const {
    for (int n = lane(); n < kRing; n += 32) ptx::st_shared_s32(ring(n), 0);
    __syncwarp();
    ptx::griddepcontrol_wait();  // an earlier kernel clears the sums
    int head = 0, first = 0;     // i - j of the step's first query and the first key
#pragma unroll 1
    for (int step = 0; step < block.steps; ++step) {
      ptx::mbarrier_wait_parity(shared.diagonals_full(), step & 1);
      const int next_head = ptx::ld_shared_s32(shared.diagonal_step()),
                next = ptx::ld_shared_s32(shared.diagonal_step() + 4) - block.key0;
      // The tile that would continue the diagonals is not the next.
      if (step > 0 && (next_head != head || next != first + kCfg.block_m)) add_sums(head, first - 63, 4);
      head = next_head, first = next;
      add_blocks(first);
      Shared::arrive_warp(shared.diagonals_empty());
      ptx::reconverge_warp();  // the lane that arrives may be left behind, and the votes below are of all lanes
      add_sums(head, first - 127, 2);
    }
    if (block.steps > 0) add_sums(head, first - 63, 4);
  }

  // Adds the step's blocks to the ring: lanes have a row of four neighbouring c each.
  TESSERA_DEVICE void add_blocks(int first) const {
    const int row = lane() % 8;
#pragma unroll 1
    for (int c = -15 + warp * 4 + lane() / 8; c < 9; c += kBwdDiagonalWarps * 4) {
      float sums[8] = {};
      int w = max(0, -c >> 1);  // the first score warp that has such a block
      uint32 from = shared.base + Shared::kAt.diagonals + (w * kBwdDiagonalBlocks + c + 2 * w + 1) * 256;
#pragma unroll 1
      for (; w < 8 && c + 2 * w < 8; ++w, from += (kBwdDiagonalBlocks + 2) * 256) {
        const float4 low = ptx::ld_shared_f32x4(from + diagonal_offset(row, 0)),
                     high = ptx::ld_shared_f32x4(from + diagonal_offset(row, 4));
        sums[0] += low.x, sums[1] += low.y, sums[2] += low.z, sums[3] += low.w;
        sums[4] += high.x, sums[5] += high.y, sums[6] += high.z, sums[7] += high.w;
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < 8; ++k) {  // 32 neighbouring diagonals
        const uint32 at = ring(first + 8 * c + k - row);
        ptx::st_shared_s32(at, __float_as_int(__int_as_float(ptx::ld_shared_s32(at)) + sums[k]));
        __syncwarp();
      }
    }
  }

  // Moves the sums of 32 `rounds` diagonals from the ring to global memory.
  TESSERA_DEVICE void add_sums(int head, int diagonal, int rounds) const {
    diagonal += lane();
#pragma unroll 1
    for (; rounds > 0; --rounds, diagonal += 32) {
      float sum = __int_as_float(ptx::ld_shared_s32(ring(diagonal)));
      ptx::st_shared_s32(ring(diagonal), 0);
      DiagonalSink<Program> sink{ProgramOption<kCfg.score>::params(p), sum != 0.0f};
      if (!__any_sync(0xffffffff, sum != 0.0f)) continue;
      // Any pair of the diagonal.
      const typename ScoreOptions<kCfg.score>::Row row(p, block.s, block.batch, head, max(diagonal, 0));
      sum *= bwd_lower_late(kCfg.dtype);
      if constexpr (kCfg.d_factor) {
        sum /= HeadFactor::of<kCfg.dtype>(ProgramOption<kCfg.score>::head_factor(row)).in_ds;
      }
      ProgramOption<kCfg.score>::gradient(Score{}, row, max(-diagonal, 0), sum, sink);
    }
    __syncwarp();
  }
};

}  // namespace tessera
