// The options of a score, in the order in which they change it, for both back ends. A row has the option's class, its
// flag in ScoreConfig, the tensor that it reads (by its name in tessera_problem and tessera_buffers), and its facts
// (ScoreFacts). Its meaning is in a file for each back end: score/builtin/ for GPUs, src/cpu/score/ for CPUs.
//
//   number(Class, flag, facts ...)           reads no tensor
//   tensor(Class, flag, tensor, facts ...)   the kernels' params have the tensor as a member of its name, a ScoreTensor
//   special(Class, flag, tensor, facts ...)  on GPUs the params have it in a form of its own, filled in by params.cpp:
//                                            ALiBi's slopes, and the masks by position, which not all kernels have
//
// A score program that changes the score reads it in natural units, as what is added to it does: it "adds".
//
// A file that defines TESSERA_SCORE_FILES_GPU or TESSERA_SCORE_FILES_CPU first includes the files with their meanings.
#ifndef TESSERA_SCORE_OPTIONS
// clang-format off
#define TESSERA_SCORE_OPTIONS(number, tensor, special) \
  number(Softcap, softcap, .reshapes = true) \
  tensor(Bias, bias, bias, .adds = true, .entries = true, .varies = true) \
  special(Alibi, alibi, alibi_slopes, .adds = true, .varies = true) \
  number(ProgramOption, program, .adds = true, .varies = true) \
  tensor(Mask, mask, mask, .hides = true, .entries = true, .varies = true) \
  tensor(BlockMask, block_mask, block_mask, .hides = true, .entries = true, .blocks = true, .varies = true) \
  special(TreeMask, tree_mask, tree_mask)
// clang-format on

// For a kind of options that a use of the list leaves out.
#define TESSERA_NO_OPTION(...)
#endif

// The options' meanings.
#if defined(TESSERA_SCORE_FILES_GPU)
#undef TESSERA_SCORE_FILES_GPU
#include "tessera/attention/score/builtin/bias.cuh"
#include "tessera/attention/score/builtin/masks.cuh"
#include "tessera/attention/score/builtin/softcap.cuh"
#include "tessera/attention/score/program.cuh"
#endif

#if defined(TESSERA_SCORE_FILES_CPU)
#undef TESSERA_SCORE_FILES_CPU
#include "cpu/score/alibi.hpp"
#include "cpu/score/bias.hpp"
#include "cpu/score/block_mask.hpp"
#include "cpu/score/mask.hpp"
#include "cpu/score/program.hpp"
#include "cpu/score/softcap.hpp"
#include "cpu/score/tree_mask.hpp"
#endif
