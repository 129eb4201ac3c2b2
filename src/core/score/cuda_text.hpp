// A checked program as CUDA C++: the text that a kernel is compiled with. It is generated from the program, not copied
// from the user's text, and the same program gives the same text everywhere. It contains no names of tensors and
// scalars: values are v0, v1, ... by their indices, and tensors and scalars are referred to by number
// (kernels/tessera/attention/score/config.hpp).
//
//   struct tessera::program::ScoreProgram {
//     static constexpr bool kChangesScore, ...;             facts.hpp
//     static constexpr bool kSteady;                        the score depends on the key by the current one alone
//     static constexpr GradientPattern pattern(int load);
//     struct Head, Row, Column, Diagonal;                   values that depend only on (b, h) and, in this order, on
//     static Head head(params, place);                      nothing else, i, j, or i - j
//     static Row row(params, head, place);                  likewise column and diagonal
//     static constexpr bool kStepsAlongDiagonal;            with it, where all elements that diagonal() loads for some
//     static bool diagonal_addresses(...);                  pairs are inside: diagonal() without a test for each
//     static Diagonal diagonal_inside(...);
//     static float score(params, head, row, column, diagonal, place, s);   the new score
//     static constexpr bool kAffine, ...;                   score = factor s + term (affine.hpp), if kAffine;
//     static float factor(the same without s); term         kHasFactor: the factor is not 1
//     static constexpr bool kCapped;                        score = outer(tanh(inner)) (capped.hpp), if kCapped;
//     static float inner(the same as score);                near its value; outer(params, head, place, tanh of inner)
//     static bool visible(the same as score);               the mask's result; s: the score before the program
//     struct MaskRow, MaskColumn; mask_row, mask_column     for the mask alone: Row or Column with Head's values
//     static bool mask(params, row, column, place, s);
//     struct MaskRowBounds, MaskColumnBounds;               bounds of their members over rows, or columns
//     static BoolBounds mask_bounds(params, row bounds, column bounds, place bounds);
//     struct GradientHead, ...; gradient_head, ...          as Head and so on, for the gradient's values
//     static float gradient(params, head, row, column, diagonal, place, g, s, sink);
//     struct SlopeHead, ...; slope_head, ...                with kSlopeNeedsS or kSumsByHead: as Head and so on
//     static float score_and_slope(params, head, row, column, diagonal, place, s, slope);
//     static void check(params, place);
//   };
//
// `gradient` returns the gradient of s of a visible pair; g is the gradient of the new score. For each load n of a
// floating-point tensor it calls sink.template add<n, tensor>(inside, adjoint, index...): the element at `index`
// (int32, one for each axis of the tensor) receives `adjoint` if `inside`. `check` writes 1 to params.read_outside if
// the mask, or the score of a pair that the mask shows, evaluates a load that is outside its tensor; loads that depend
// on s do not count (indices.hpp). In all other functions such a load gives 0 and reads nothing.
//
// `score_and_slope` returns the new score and sets `slope` to its derivative by s or, with kSumsByHead, by the element
// of its only load; a mask that depends on s makes the score -inf.
//
// `mask_bounds` holds for all pairs of the tile; a value without known bounds, as an element that differs from pair
// to pair, is any value of its type (kernels/tessera/attention/score/program_bounds.cuh).
//
// `diagonal_addresses(params, head, place, least, most, addresses)` returns whether the elements that diagonal() loads
// are inside their tensors for all pairs whose i - j is that of the place and least to most more. If so,
// `diagonal_inside(params, head, addresses, place)` is diagonal() of such a pair, which differs from that place by its
// offsets alone: their difference, known to the compiler, is the number of steps from the addresses.
//
// A place's offsets are the parts of its i and j that the compiler knows: pairs that differ in them alone share the
// conversion of a coordinate, or of a difference of two, to float. It is exact up to 2^24 and within 1 ulp beyond.
//
// A load is not read if each of its uses is on a side of where, && or || that is not evaluated, as far as the
// conditions are known before it.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/score/checked.hpp"

namespace tessera::core::score {

// Incremented with every change of the text, because it is part of a kernel's key.
inline constexpr int kCudaTextVersion = 7;

// What a kernel is compiled for of the strides of a program's tensors.
struct StrideFacts {
  bool near = true;         // all have at most 32 bits, in bytes
  uint32_t dense_rows = 0;  // bit n: elements along the last axis of tensor n follow one another
};

// `dtypes`: those of the program's tensors, as tessera_dtype; all but float64. `name`: the name of the struct.
std::string cuda_text(const Checked& checked, std::span<const int32_t> dtypes, StrideFacts strides,
                      const char* name = "ScoreProgram");

// The number of members of MaskRow and MaskColumn; each has bounds of 8 bytes.
struct MaskValues {
  int row, column;
};
MaskValues mask_values(const Program& program);

// A hash of everything that determines the text but the name.
uint64_t cuda_text_hash(const Checked& checked, std::span<const int32_t> dtypes, StrideFacts strides);

}  // namespace tessera::core::score
