// The score: what happens between the product q . k and its exponential, with the options for which a kernel is
// compiled and the facts by which kernels and plans decide.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// The properties of an option that other code may use. Each option declares its own; ScoreConfig joins those of its
// options.
struct ScoreFacts {
  bool reshapes = false;  // changes the product before anything is added: its gradient needs the product or the score
  bool adds = false;      // adds to the score
  bool hides = false;     // hides scores by entries of a tensor
  bool entries = false;   // reads a tensor with an entry for each score, or for each block of scores
  bool blocks = false;    // the entries are for blocks of scores
  // May raise a row's scores from tile to tile: with a stale max each tile would be computed twice.
  bool varies = false;

  TESSERA_HOST_DEVICE constexpr ScoreFacts joined(const ScoreFacts& o) const {
    return {reshapes || o.reshapes, adds || o.adds,     hides || o.hides,
            entries || o.entries,   blocks || o.blocks, varies || o.varies};
  }
};

inline constexpr ScoreFacts kSoftcapFacts{.reshapes = true};
inline constexpr ScoreFacts kBiasFacts{.adds = true, .entries = true, .varies = true};
inline constexpr ScoreFacts kAlibiFacts{.adds = true, .varies = true};
// A score program reads a score in natural units, as what is added to it does.
inline constexpr ScoreFacts kProgramFacts{.adds = true, .varies = true};
inline constexpr ScoreFacts kMaskFacts{.hides = true, .entries = true, .varies = true};
inline constexpr ScoreFacts kBlockMaskFacts{.hides = true, .entries = true, .blocks = true, .varies = true};

// The options that are tensors with an entry for each score, [B|1, H|1, Sq|1, Sk]. Problem, buffers, ScoreConfig and
// ProblemParams have members of these names.
#define TESSERA_SCORE_TENSORS(tensor) tensor(bias) tensor(mask)

// What is done to a score in addition to scale, causal, window and length, which every kernel supports. The meaning of
// each option is in its file in score/builtin/.
struct ScoreConfig {
  bool softcap;
  bool bias;
  bool places;   // positions and heads of ALiBi and dropout are those of a whole of which the problem is a part
  bool program;  // whose text is compiled with the kernel: score/program_option.cuh
  Dtype bias_dtype;
  bool alibi;
  bool mask;
  bool block_mask;
  bool dropout;
  // A tensor on the device gives seed and offset when the kernel runs: each replay of a CUDA graph differs.
  bool dropout_state;
  bool scale_first;  // scale <= 0: the largest product is not the largest score, so the scale is applied first
  bool causal_seqs;  // each sequence says whether it is causal: attention/mask
  bool tree_mask;

  // The options' facts. A tree mask has none: like a causal mask it is positional (range and hide in its file).
  TESSERA_HOST_DEVICE constexpr ScoreFacts facts() const {
    const ScoreFacts none{};
    return none.joined(softcap ? kSoftcapFacts : none)
        .joined(bias ? kBiasFacts : none)
        .joined(alibi ? kAlibiFacts : none)
        .joined(program ? kProgramFacts : none)
        .joined(mask ? kMaskFacts : none)
        .joined(block_mask ? kBlockMaskFacts : none);
  }
  TESSERA_HOST_DEVICE constexpr bool any() const {
    return facts().reshapes || facts().adds || facts().entries || dropout || scale_first;
  }
  TESSERA_HOST_DEVICE constexpr bool entries() const { return facts().entries; }
  // Whether the entries of a tile are loaded ahead of the product, by pairs of keys.
  TESSERA_HOST_DEVICE constexpr bool entry_pairs() const { return facts().entries && !facts().blocks; }
  // Whether they are loaded by eight neighbours, for which a tile of `keys` keys must be in lane order
  // (tile/shared_tile.cuh). Not with dropout, because a call of Philox decides keys of the other order.
  TESSERA_HOST_DEVICE constexpr bool lane_order(int keys) const { return entry_pairs() && !dropout && keys % 32 == 0; }
  // Whether a tile may be exponentiated against the max of earlier tiles (attention/softmax).
  TESSERA_HOST_DEVICE constexpr bool stale_max() const { return !facts().varies; }
  // Whether something is added to a score.
  TESSERA_HOST_DEVICE constexpr bool adds() const { return facts().adds; }
  // Whether scores are changed before the exponential other than by the scale in the same instruction.
  TESSERA_HOST_DEVICE constexpr bool scaled() const { return facts().reshapes || facts().adds || scale_first; }
};
TESSERA_CONFIG_FIELDS(ScoreConfig, softcap, bias, places, program, bias_dtype, alibi, mask, block_mask, dropout,
                      dropout_state, scale_first, causal_seqs, tree_mask)

}  // namespace tessera
