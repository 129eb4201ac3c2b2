// A checked program as CUDA C++: the text that a kernel is compiled with. It is made from the program, never from what
// its user wrote, and the same program gives the same text everywhere. Names of tensors and scalars do not occur in it:
// values are v0, v1, ... by their places, tensors and scalars are numbers of them
// (kernels/tessera/attention/score/program_params.hpp).
//
//   struct tessera::program::ScoreProgram {
//     static constexpr bool kChangesScore, ...;             facts.hpp
//     static constexpr GradientPattern pattern(int load);
//     struct Row, Column;                                   values that depend on (b, h, i), or on (b, h, j), alone
//     static Row row(params, place);
//     static Column column(params, place);
//     static float score(params, row, column, place, s);    the new score
//     static bool visible(params, row, column, place, s);   what the mask says; s: the score before the program
//     struct GradientRow, GradientColumn;                   the same of the gradient's values
//     static GradientRow gradient_row(params, place);
//     static GradientColumn gradient_column(params, place);
//     static float gradient(params, row, column, place, g, s, sink);
//     static void check(params, place);
//   };
//
// `gradient` returns the gradient of s of a visible pair, g being that of the new score, and calls, for each load n of
// a floating-point tensor, sink.template add<n, tensor>(inside, adjoint, index...): the element at `index` (int32, as
// many as the tensor has axes) receives `adjoint` where `inside`. `check` writes 1 to params.read_outside where the
// mask, or the score of a pair that the mask shows, takes a load that is outside its tensor; what depends on s does not
// count (indices.hpp). All others give 0 for such a load, and read nothing.
//
// A load is not read where each of its uses is on a side of where, && or || that is not taken, as far as the conditions
// are known before it.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/score/checked.hpp"

namespace tessera::core::score {

// Incremented with every change of the text: part of a kernel's key.
inline constexpr int kCudaTextVersion = 1;

// `dtypes`: of the program's tensors, as tessera_dtype; all but float64. `name`: of the struct.
std::string cuda_text(const Checked& checked, std::span<const int32_t> dtypes, const char* name = "ScoreProgram");

// Of what the text follows from: the program, the generator's version and the tensors' element types.
uint64_t cuda_text_hash(const Checked& checked, std::span<const int32_t> dtypes);

}  // namespace tessera::core::score
