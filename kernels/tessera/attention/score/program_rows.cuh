// What a score program computes once for several pairs of a lane, or of a warp: for a lane's two rows, for their
// distances to the keys of a tile, for keys or queries that the lanes share.
#pragma once

#include "tessera/attention/score/program.cuh"

namespace tessera {

// A lane's two rows of a tile of 16. If they have one head, and keys in order, kShares: they share what the program
// computes of the head and of a key, and the lower row, eight queries later, what it computes of the distance to a key
// eight before. Otherwise each row computes its own.
template <bool kShares, class Row>
struct ProgramRows {
  using Diagonal = typename Row::Diagonal;

  Row of[2];
  Diagonal lower[2];  // of the lower row and the next block's two keys

  // `key`: the lane's first.
  TESSERA_DEVICE ProgramRows(const Row& upper_row, const Row& lower_row, int key) : of{upper_row, lower_row} {
    if constexpr (kShares) {
      of[1].share_head(of[0]);
      lower[0] = of[1].diagonal_of(key, 0), lower[1] = of[1].diagonal_of(key, 1);
    }
  }
  // Calls visit(row, half) for both rows of key + offset. The keys of each `e`, even and odd, come in order.
  template <class Visit>
  TESSERA_DEVICE void at_key(int key, int offset, int e, Visit&& visit) {
    if constexpr (kShares) {
      const Diagonal upper = of[0].diagonal_of(key, offset);
      at_key(key, offset, upper, lower[e], visit);
      lower[e] = upper;
    } else {
      visit(of[0], 0), visit(of[1], 1);
    }
  }
  // The same with the values of the rows' distances.
  template <class Visit>
  TESSERA_DEVICE void at_key(int key, int offset, const Diagonal& upper, const Diagonal& below, Visit&& visit) const {
    const auto column = of[0].column_of(key, offset);
    Row rows[2] = {of[0], of[1]};
    rows[0].column = rows[1].column = &column;
    rows[0].diagonal = &upper, rows[1].diagonal = &below;
    visit(rows[0], 0), visit(rows[1], 1);
  }
};

// What a program computes of i - j for a lane's two rows and kBlocks blocks of eight keys, at once: whether all
// elements that it loads for them are inside their tensors is tested once for the tile, and a load needs no other
// instruction. At the border of a tensor, each load is tested, in a loop.
template <bool kGiven, int kBlocks, class Row>
struct ProgramDiagonals {};
template <int kBlocks, class Row>
struct ProgramDiagonals<true, kBlocks, Row> {
  using Diagonal = typename Row::Diagonal;
  using Program = typename Row::Program;

  // [e][n]: of the upper row and key 8 (n - 1) + e after the first; of the lower row and the key eight after that.
  Diagonal of[2][kBlocks + 1];

  // Of the upper row; `key`: the lane's first.
  TESSERA_DEVICE void load(const Row& row, int key) {
    typename Program::DiagonalAddresses from;
    const bool inside = Program::diagonal_addresses(row.program, row.head, row.at(key), 7 - 8 * kBlocks, 8, from);
    if (__all_sync(0xffffffff, inside)) {
#pragma unroll
      for (int n = 0; n <= kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          of[e][n] = Program::diagonal_inside(row.program, row.head, from, row.at(key, 8 * (n - 1) + e));
        }
    } else {
#pragma unroll
      for (int n = 0; n <= kBlocks; ++n) of[0][n] = of[1][n] = {};
#pragma unroll 1
      for (int n = 0; n <= kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int to = 0; to < kBlocks; ++to) of[e][to] = of[e][to + 1];
          of[e][kBlocks] = Program::diagonal(row.program, row.head, row.at(key + 8 * (n - 1) + e));
        }
    }
  }
  TESSERA_DEVICE const Diagonal& upper(int n, int e) const { return of[e][n + 1]; }  // of block n
  TESSERA_DEVICE const Diagonal& lower(int n, int e) const { return of[e][n]; }
};

// What a program computes of kCount x 32 consecutive keys, or queries, if it is one word: each lane has its own and
// reads those of the others, so that all are loaded at once, and not again for every lane and every score.
template <class Values, int kCount>
struct LaneValues {
  static constexpr bool kFits = sizeof(Values) == sizeof(uint32);

  uint32 mine[kCount];
  // of(n): the values of the key, or query, that is n after the first.
  template <class Of>
  TESSERA_DEVICE explicit LaneValues(Of&& of) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      mine[n] = __builtin_bit_cast(uint32, of(32 * n + static_cast<int>(threadIdx.x % 32)));
    }
  }
  // The lane's word of values 32 i to 32 i + 31. Without not_hoisted the compiler would index memory by i.
  TESSERA_DEVICE uint32 word(uint32 i) const {
    uint32 word = not_hoisted(mine[0]);
#pragma unroll
    for (uint32 n = 1; n < kCount; ++n) {
      const uint32 other = not_hoisted(mine[n]);
      word = n == i ? other : word;
    }
    return word;
  }
  // Another lane's, from such words of all lanes.
  TESSERA_DEVICE static Values of_lane(uint32 word, uint32 lane) {
    return __builtin_bit_cast(Values, __shfl_sync(0xffffffff, word, lane));
  }
};
template <class Values>
struct LaneValues<Values, 0> {
  template <class Of>
  TESSERA_DEVICE explicit LaneValues(Of&&) {}
};

}  // namespace tessera
