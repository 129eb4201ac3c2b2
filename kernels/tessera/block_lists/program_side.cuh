// The rows and the columns of lists that are made from a score program's mask: queries and keys, or transposed keys and
// queries.
#pragma once

#include "tessera/attention/score/program_bounds.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/block_lists/config.hpp"

namespace tessera {

// The place of a query, without a key; or of a key, without a query.
TESSERA_DEVICE ProgramPlace query_place(const ProblemParams& p, const Sequence& s, int batch, int head, int query) {
  return {batch, head, head / p.group, query, 0, query + s.sk - s.sq, s.sq, s.sk};
}
TESSERA_DEVICE ProgramPlace key_place(const ProblemParams& p, const Sequence& s, int batch, int head, int key) {
  return {batch, head, head / p.group, 0, key, s.sk - s.sq, s.sq, s.sk};
}

// What a program's mask reads of queries, or of keys: the values, and their bounds over several.
template <class Program, bool kOfKeys>
struct MaskSide {
  using Bounds = typename Program::MaskRowBounds;
  static constexpr int kValues = Program::kMaskRowValues;
  TESSERA_DEVICE static auto value(const ScoreProgramParams& program, const ProblemParams& p, const Sequence& s,
                                   int batch, int head, int query) {
    return Program::mask_row(program, query_place(p, s, batch, head, query));
  }
};
template <class Program>
struct MaskSide<Program, true> {
  using Bounds = typename Program::MaskColumnBounds;
  static constexpr int kValues = Program::kMaskColumnValues;
  TESSERA_DEVICE static auto value(const ScoreProgramParams& program, const ProblemParams& p, const Sequence& s,
                                   int batch, int head, int key) {
    return Program::mask_column(program, key_place(p, s, batch, head, key));
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
    for (int n = first + static_cast<int>(threadIdx.x % 32); n < end; n += 32) {
      bounds.include(Side::value(program, p, s, batch, head, n));
    }
    bounds.visit(JoinLanes{});
  }
  return bounds;
}

// The bounds of blocks of columns in memory.
template <class Side>
struct ColumnBounds {
  using Bounds = typename Side::Bounds;
  static_assert(Side::kValues == 0 || sizeof(Bounds) == 8 * Side::kValues, "as the host counts them");

  const ProgramListsParams& p;
  TESSERA_DEVICE static int groups(const ProgramListsParams& p) {
    return (p.lists.most + kBoundsGroup - 1) / kBoundsGroup;
  }
  TESSERA_DEVICE Bounds* block(int mask, int at) const {
    return static_cast<Bounds*>(p.bounds) + static_cast<int64>(mask) * p.lists.most + at;
  }
  TESSERA_DEVICE Bounds* group(int mask, int at) const {
    return block(p.batches * p.heads, 0) + static_cast<int64>(mask) * groups(p) + at;
  }
};

}  // namespace tessera
