// The rows and the columns of lists that are made from a score program's mask: queries and keys, or transposed keys and
// queries.
#pragma once

#include "tessera/attention/score/program_bounds.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/block_lists/config.hpp"

namespace tessera {

// The coordinates of a query and a key.
template <ProgramListsConfig kCfg>
TESSERA_DEVICE ProgramPlace pair_place(const ScoreProgramParams& program, const ProblemParams& p, const Sequence& s,
                                       int batch, int head, int query, int key) {
  return with_key<kCfg.score>(program_place<kCfg.score>(p, program, {batch, head, query, s.sq, s.sk}), key);
}

// ---- tiles of queries, or of keys ----

// A tile of some (batch entry, head): its number in the sequence. A padded tile index that belongs to no sequence has
// the number after a sequence's last tile.
struct SideTile {
  Sequence s;
  int batch, head, tile;
};

// The tiles of kRows queries, or keys, of all sequences: [batch, heads, tiles] or packed [heads, padded tile indices].
template <ProgramListsConfig kCfg, bool kOfKeys, int kRows>
struct SideTiles {
  const ProgramListsParams& p;
  int tiles;  // of a sequence, or padded tile indices

  TESSERA_DEVICE SideTile at(int index) const {
    SideTile at;
    const int mask = index / tiles;
    at.tile = index % tiles;
    if (packed()) {
      const int slot = at.tile;
      at.batch = find_sequence<kRows>(p, offsets(), stride(), limit(), 1, slot), at.head = mask;
      at.tile = tile_at_slot<kRows>(p, offsets(), stride(), limit(), 1, slot, at.batch);
    } else {
      at.batch = mask / p.heads, at.head = mask % p.heads;
    }
    at.s = load_sequence<kCfg.varlen, kCfg.paged, kCfg.score>(p, at.batch);
    if (packed()) at.tile = min(at.tile, ((kOfKeys ? at.s.sk : at.s.sq) + kRows - 1) / kRows);
    return at;
  }
  // The index of a sequence's first tile.
  TESSERA_DEVICE int begin(int batch, int head) const {
    if (packed()) return head * tiles + slot_begin<kRows>(p, offsets(), stride(), limit(), 1, batch);
    return (batch * p.heads + head) * tiles;
  }

 private:
  TESSERA_DEVICE const int* offsets() const { return kOfKeys ? p.keys.begins : p.cu_seqlens_q; }
  TESSERA_DEVICE int64 stride() const { return kOfKeys ? p.keys.begins_stride : p.cu_seqlens_q_stride; }
  TESSERA_DEVICE int limit() const { return kOfKeys ? p.keys_limit : p.rows_q; }
  TESSERA_DEVICE bool packed() const { return kCfg.varlen && !(kOfKeys && kCfg.paged) && offsets(); }
};

// ---- what is read of them ----

// What a program's mask reads of queries, or of keys: the values, and their bounds over several.
template <ProgramListsConfig kCfg, class Program, bool kOfKeys>
struct MaskSide {
  using Bounds = typename Program::MaskRowBounds;
  static constexpr int kValues = Program::kMaskRowValues;
  TESSERA_DEVICE static auto value(const ScoreProgramParams& program, const ProblemParams& p, const Sequence& s,
                                   int batch, int head, int query) {
    return Program::mask_row(program, pair_place<kCfg>(program, p, s, batch, head, query, 0));
  }
};
template <ProgramListsConfig kCfg, class Program>
struct MaskSide<kCfg, Program, true> {
  using Bounds = typename Program::MaskColumnBounds;
  static constexpr int kValues = Program::kMaskColumnValues;
  TESSERA_DEVICE static auto value(const ScoreProgramParams& program, const ProblemParams& p, const Sequence& s,
                                   int batch, int head, int key) {
    return Program::mask_column(program, pair_place<kCfg>(program, p, s, batch, head, 0, key));
  }
};

struct ClearBounds {
  template <class Bounds>
  TESSERA_DEVICE void operator()(Bounds& x) const {
    program::bounds_clear(x);
  }
};
struct JoinLanes {
  template <class Bounds>
  TESSERA_DEVICE void operator()(Bounds& x) const {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      program::bounds_join(
          x, {__shfl_xor_sync(0xffffffff, x.low, distance), __shfl_xor_sync(0xffffffff, x.high, distance)});
    }
  }
};

// The bounds over first ... end - 1, by a warp; all lanes receive them.
template <class Side>
TESSERA_DEVICE typename Side::Bounds bounds_of(const ScoreProgramParams& program, const ProblemParams& p,
                                               const Sequence& s, int batch, int head, int first, int end) {
  typename Side::Bounds bounds;
  bounds.visit(ClearBounds{});
  if constexpr (Side::kValues > 0) {
    constexpr int kAtOnce = 4;  // loads of a lane; past the end, the last again
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int from = first; from < end; from += 32 * kAtOnce) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        bounds.include(Side::value(program, p, s, batch, head, min(from + 32 * n + lane, end - 1)));
      }
    }
    bounds.visit(JoinLanes{});
  }
  return bounds;
}

// The bounds of blocks of columns in memory, and of groups of kBoundsGroup blocks.
template <ProgramListsConfig kCfg, class Side>
struct ColumnBounds {
  using Bounds = typename Side::Bounds;
  using Blocks = SideTiles<kCfg, !kCfg.transposed, kCfg.cols>;
  using Groups = SideTiles<kCfg, !kCfg.transposed, kCfg.cols * kBoundsGroup>;
  static_assert(Side::kValues == 0 || sizeof(Bounds) == 8 * Side::kValues, "as the host counts them");

  // Of the first block, or group, of all, or of one sequence and head.
  Bounds *blocks, *groups;
  TESSERA_DEVICE explicit ColumnBounds(const ProgramListsParams& p)
      : blocks(static_cast<Bounds*>(p.bounds)), groups(blocks + static_cast<int64>(p.column_masks) * p.column_blocks) {}
  TESSERA_DEVICE ColumnBounds(const ProgramListsParams& p, int batch, int head) : ColumnBounds(p) {
    blocks += Blocks{p, p.column_blocks}.begin(batch, head);
    groups += Groups{p, p.column_groups}.begin(batch, head);
  }
};

}  // namespace tessera
