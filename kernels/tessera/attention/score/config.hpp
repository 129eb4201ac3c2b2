// The score: what happens between the product q . k and its exponential. The options for which a kernel is compiled,
// the facts by which kernels and plans decide, and the tensors and scalars of a score program.
#pragma once

#include "tessera/attention/score/list.hpp"
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

// kSoftcapFacts and so on.
#define TESSERA_NUMBER(Class, flag, ...) inline constexpr ScoreFacts k##Class##Facts{__VA_ARGS__};
#define TESSERA_TENSOR(Class, flag, tensor, ...) inline constexpr ScoreFacts k##Class##Facts{__VA_ARGS__};
TESSERA_SCORE_OPTIONS(TESSERA_NUMBER, TESSERA_TENSOR, TESSERA_TENSOR)
#undef TESSERA_NUMBER
#undef TESSERA_TENSOR

// What is done to a score in addition to scale, causal, window and length, which every kernel supports. The meaning of
// each option is in its file in score/builtin/; a program's text is compiled with the kernel: score/program.cuh.
struct ScoreConfig {
#define TESSERA_FLAG(Class, flag, ...) bool flag;
  TESSERA_SCORE_OPTIONS(TESSERA_FLAG, TESSERA_FLAG, TESSERA_FLAG)
#undef TESSERA_FLAG
  // Positions and heads of ALiBi, dropout and programs are those of a whole of which the problem is a part.
  bool places;
  Dtype bias_dtype;
  bool dropout;
  // A tensor on the device gives seed and offset when the kernel runs: each replay of a CUDA graph differs.
  bool dropout_state;
  bool scale_first;      // scale <= 0: the largest product is not the largest score, so the scale is applied first
  bool causal_seqs;      // each sequence says whether it is causal
  bool sequence_places;  // each sequence has a place of its own in the whole
  bool only_hides;       // of a program: it has a mask and leaves the score as it is (core/score/facts.hpp)

  // The options' facts. A tree mask has none: like a causal mask it is positional (range and hide in its file). Nor has
  // a program that only hides: kernels whose scores are -inf then treat it as they do such masks.
  TESSERA_HOST_DEVICE constexpr ScoreFacts facts() const {
    ScoreFacts all{};
    ScoreConfig scoring = *this;
    scoring.program = program && !only_hides;
#define TESSERA_FACTS(Class, flag, ...) \
  if (scoring.flag) all = all.joined(k##Class##Facts);
    TESSERA_SCORE_OPTIONS(TESSERA_FACTS, TESSERA_FACTS, TESSERA_FACTS)
#undef TESSERA_FACTS
    return all;
  }
  TESSERA_HOST_DEVICE constexpr bool any() const { return scaled() || facts().entries || program || dropout; }
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
  // Whether something other than the position decides between a product and its exponential.
  TESSERA_HOST_DEVICE constexpr bool has_step() const { return scaled() || program; }
};
#define TESSERA_FLAG(Class, flag, ...) flag,
TESSERA_CONFIG_FIELDS(ScoreConfig, TESSERA_SCORE_OPTIONS(TESSERA_FLAG, TESSERA_FLAG, TESSERA_FLAG) places, bias_dtype,
                      dropout, dropout_state, scale_first, causal_seqs, sequence_places, only_hides)
#undef TESSERA_FLAG

// ---- score programs -------------------------------------------------------------------------------------------------
//
// The tensors and scalars that a score program names, as a kernel receives them, in the program's order.

inline constexpr int kProgramTensors = 8, kProgramScalars = 16, kProgramRank = 4;

// The type of a captured tensor's elements, by tessera_dtype's numbers.
enum class ElementType : int {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kInt32 = 4,
  kBool = 5,   // a byte: 0 is false
  kInt64 = 6,  // the values fit 32 bits: the high ones are not read
  kInt8 = 7,
  kInt16 = 8,
  kUInt8 = 9
};

// How the pairs (i, j) of one (b, h) read the elements of a tensor that a program loads (core/score/facts.hpp).
enum class GradientPattern : int {
  kHead = 0,      // all pairs read one element
  kRow = 1,       // all pairs of a query read one element
  kColumn = 2,    // all pairs of a key read one element
  kDiagonal = 3,  // all pairs of the same i - j read one element
  kElement = 4,   // no two pairs read the same element
  kGather = 5     // anything else
};

// Of what the gradient of a load's element can be made (core/score/facts.hpp).
enum class LoadSum : int { kProducts = 0, kDiagonals = 1, kPairs = 2 };

// Of an axis, in bytes. In two halves, so that a stride of 32 bits is multiplied as one: by a single instruction.
struct ProgramStride {
  int low, high;

  TESSERA_HOST_DEVICE constexpr int64 bytes() const {
    return static_cast<int64>(high) * (int64{1} << 32) + static_cast<uint32>(low);
  }
};

// A tensor of any strides, with the `rank` axes of its program.
struct ProgramTensor {
  const void* data;
  ProgramStride stride[kProgramRank];
  uint32 extent[kProgramRank];  // at most 2^31: an index, which is an int32, is below that
};

// A float or an int, by its type in the program; a bool is an int, 0 or 1.
union ProgramScalar {
  float real;
  int integer;
};

// The whole of which a problem is a part, beyond what ProblemParams has of it; without ScoreConfig::places the problem.
struct ProgramWhole {
  int first_sequence, first_head;
  Divisor group;     // query heads that share a KV head; ProblemParams::group may be a part of it (bwd_sm90)
  int len_q, len_k;  // of every sequence, if one place serves all
};

struct ScoreProgramParams {
  ProgramTensor tensors[kProgramTensors];
  // Backward: the sums of the tensors' gradients, float or ExactSum for each element; NULL: not requested.
  void* sums[kProgramTensors];
  int* read_outside;  // check() writes 1 if a load that is executed is outside its tensor. NULL: not reported
  ProgramScalar scalars[kProgramScalars];
  ProgramWhole whole;
};

// A kernel's params with those of its program.
template <class Params>
struct ProgrammedParams : Params {
  ScoreProgramParams program;
};

// A sum of floats whose result does not depend on the order of additions: word w counts multiples of 2^(32 w - 149), so
// every finite float is two words' digits of 32 bits, and 2^31 floats can be added before a word overflows. What is not
// finite is remembered apart.
inline constexpr int kExactWords = 9;
inline constexpr uint32 kPlusInfinityAdded = 1, kMinusInfinityAdded = 2, kNanAdded = 4;
struct ExactSum {
  unsigned long long words[kExactWords];
  uint32 special, padding;
};

}  // namespace tessera
