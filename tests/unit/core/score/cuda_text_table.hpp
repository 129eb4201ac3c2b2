// The CUDA text of score programs as functions of the host, in the order of cuda_programs().
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "tessera/attention/score/program.cuh"
#include "tessera/block_lists/program_bounds.cuh"
#include "tessera/block_lists/program_lists.cuh"
#include "unit_launch.hpp"

namespace tessera::testing {

// What a load's element receives.
struct Received {
  int tensor;
  bool inside;
  float adjoint;
  std::vector<int> index;
};

struct Sink {
  std::vector<Received> all;
  template <int kLoad, int kTensor, class... Index>
  void add(bool inside, float adjoint, Index... index) {
    all.push_back({kTensor, inside, adjoint, {index...}});
  }
};

struct CudaTextEntry {
  float (*score)(const ScoreProgramParams& p, const ProgramPlace& at, float s);
  float (*affine)(const ScoreProgramParams& p, const ProgramPlace& at, float s);  // NULL: the score is not affine in s
  float (*capped)(const ScoreProgramParams& p, const ProgramPlace& at, float s);  // NULL: it is not one tanh
  // The score with what is loaded by steps from the place without its offsets; inside: whether that can be. NULL: the
  // program has no such loads.
  float (*stepped)(const ScoreProgramParams& p, const ProgramPlace& at, float s, bool& inside);
  bool (*visible)(const ScoreProgramParams& p, const ProgramPlace& at, float s);
  float (*gradient)(const ScoreProgramParams& p, const ProgramPlace& at, float g, float s, Sink& sink);
  // NULL: the program has none.
  float (*score_and_slope)(const ScoreProgramParams& p, const ProgramPlace& at, float s, float& slope);
  void (*check)(const ScoreProgramParams& p, const ProgramPlace& at);
  // Runs the two kernels that make `count` lists of the mask; NULL: the program has no mask.
  void (*lists)(const ProgramListsParams& p, int count, const ScoreProgramParams& program);
  void (*transposed_lists)(const ProgramListsParams& p, int count, const ScoreProgramParams& program);
  bool mask_needs_s;
  int mask_row_values, mask_column_values;
};
inline constexpr int kListRows = 64, kListCols = 32;  // of a tile and of a block
extern const CudaTextEntry kCudaTexts[];

template <class Program, bool kTransposed>
void run_lists(const ProgramListsParams& p, int count, const ScoreProgramParams& program) {
  constexpr ScoreConfig kScore = [] {
    ScoreConfig score{};
    score.program = true;
    return score;
  }();
  constexpr ProgramListsConfig kConfig{.rows = kListRows,
                                       .cols = kListCols,
                                       .transposed = kTransposed,
                                       .varlen = true,
                                       .paged = false,
                                       .ordered = true,
                                       .score = kScore};
  const auto groups = static_cast<unsigned>(p.column_masks * p.column_groups);
  emulated::run_blocks({groups, 1, 1}, kProgramBoundsThreads, 0, [&] { bound_columns<kConfig, Program>(p, program); });
  emulated::run_blocks({static_cast<unsigned>(count), 1, 1}, kProgramListsThreads, 0,
                       [&] { make_list<kConfig, Program>(p, program); });
}

template <class Program, bool kTransposed>
auto lists_of() -> decltype(CudaTextEntry::lists) {
  if constexpr (Program::kHasMask) return run_lists<Program, kTransposed>;
  return nullptr;
}

template <class Program>
auto score_and_slope_of() -> decltype(CudaTextEntry::score_and_slope) {
  if constexpr (Program::kSlopeNeedsS || Program::kSumsByHead) {
    return [](const ScoreProgramParams& p, const ProgramPlace& at, float s, float& slope) {
      const auto head = Program::slope_head(p, at);
      return Program::score_and_slope(p, head, Program::slope_row(p, head, at), Program::slope_column(p, head, at),
                                      Program::slope_diagonal(p, head, at), at, s, slope);
    };
  }
  return nullptr;
}

template <class Program>
auto affine_of() -> decltype(CudaTextEntry::affine) {
  if constexpr (Program::kAffine) {
    return [](const ScoreProgramParams& p, const ProgramPlace& at, float s) {
      const auto head = Program::head(p, at);
      const auto row = Program::row(p, head, at);
      const auto column = Program::column(p, head, at);
      const auto diagonal = Program::diagonal(p, head, at);
      const float factor = Program::factor(p, head, row, column, diagonal, at);
      return std::fma(s, factor, Program::term(p, head, row, column, diagonal, at));
    };
  }
  return nullptr;
}

template <class Program>
auto capped_of() -> decltype(CudaTextEntry::capped) {
  if constexpr (Program::kCapped) {
    return [](const ScoreProgramParams& p, const ProgramPlace& at, float s) {
      const auto head = Program::head(p, at);
      const float inner = Program::inner(p, head, Program::row(p, head, at), Program::column(p, head, at),
                                         Program::diagonal(p, head, at), at, s);
      const bool is_small = std::fabs(inner) < program::kSmallTanh;
      return Program::outer(p, head, at, is_small ? program::small_tanh(inner) : program::tanh_(inner));
    };
  }
  return nullptr;
}

template <class Program>
auto stepped_of() -> decltype(CudaTextEntry::stepped) {
  if constexpr (Program::kStepsAlongDiagonal) {
    return [](const ScoreProgramParams& p, const ProgramPlace& at, float s, bool& inside) {
      const auto head = Program::head(p, at);
      ProgramPlace from = at;
      from.i -= at.i_offset, from.q_pos -= at.i_offset, from.j -= at.j_offset, from.i_offset = from.j_offset = 0;
      const int steps = at.i_offset - at.j_offset;
      typename Program::DiagonalAddresses addresses;
      inside = Program::diagonal_addresses(p, head, from, std::min(steps, 0), std::max(steps, 0), addresses);
      if (!inside) return 0.0f;
      return Program::score(p, head, Program::row(p, head, at), Program::column(p, head, at),
                            Program::diagonal_inside(p, head, addresses, at), at, s);
    };
  }
  return nullptr;
}

template <class Program>
CudaTextEntry entry_of() {
  return {[](const ScoreProgramParams& p, const ProgramPlace& at, float s) {
            const auto head = Program::head(p, at);
            return Program::score(p, head, Program::row(p, head, at), Program::column(p, head, at),
                                  Program::diagonal(p, head, at), at, s);
          },
          affine_of<Program>(),
          capped_of<Program>(),
          stepped_of<Program>(),
          [](const ScoreProgramParams& p, const ProgramPlace& at, float s) {
            const auto head = Program::head(p, at);
            return Program::visible(p, head, Program::row(p, head, at), Program::column(p, head, at),
                                    Program::diagonal(p, head, at), at, s);
          },
          [](const ScoreProgramParams& p, const ProgramPlace& at, float g, float s, Sink& sink) {
            const auto head = Program::gradient_head(p, at);
            return Program::gradient(p, head, Program::gradient_row(p, head, at), Program::gradient_column(p, head, at),
                                     Program::gradient_diagonal(p, head, at), at, g, s, sink);
          },
          score_and_slope_of<Program>(),
          [](const ScoreProgramParams& p, const ProgramPlace& at) { Program::check(p, at); },
          lists_of<Program, false>(),
          lists_of<Program, true>(),
          Program::kMaskNeedsS,
          Program::kMaskRowValues,
          Program::kMaskColumnValues};
}

}  // namespace tessera::testing
