// Score programs: the loads of the generated text (core/score/cuda_text.hpp), the sums of the gradients of a program's
// tensors, and the program as an option of the score.
#pragma once

#include "tessera/attention/score/config.hpp"
#include "tessera/attention/score/element.cuh"
#include "tessera/attention/score/program_functions.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// ---- places and loads -----------------------------------------------------------------------------------------------
//
// Loads, for the text that is generated for a score program, from the tensors that it names; its operations are in
// score/program_functions.cuh.

// The coordinates of a score, by the names of the language, and the parts of i, q_pos and of j that the compiler knows.
struct ProgramPlace {
  int b, h, h_kv, i, j, q_pos, len_q, len_k;
  int i_offset = 0, j_offset = 0;
};

// The coordinates of a row of scores and of key 0, in the whole of which the problem may be a part.
template <ScoreConfig kCfg>
TESSERA_DEVICE ProgramPlace program_place([[maybe_unused]] const ProblemParams& p, const ScoreProgramParams& program,
                                          const ScorePlace& of) {
  if constexpr (kCfg.places) {
    const ProgramWhole& whole = program.whole;
    ProgramPlace at;
    at.b = whole.first_sequence + of.batch, at.h = whole.first_head + of.head, at.h_kv = at.h / whole.group;
    if constexpr (kCfg.sequence_places) {
      const SequencePlace place(p, of.batch);
      at.i = place.first_q + of.query, at.j = place.first_k;
      at.len_q = place.total_q, at.len_k = place.total_k;
    } else {
      const bool placed = p.bottom_right != kNoPlace;
      at.i = p.first_q + of.query, at.j = p.first_k;
      at.len_q = placed ? whole.len_q : of.len_q, at.len_k = placed ? whole.len_k : of.len_k;
    }
    at.q_pos = at.i + at.len_k - at.len_q;
    return at;
  } else {
    return {of.batch, of.head, of.head / program.whole.group, of.query, 0, of.query + of.len_k - of.len_q,
            of.len_q, of.len_k};
  }
}

// `of_key_0` with the sequence's key `key` + `offset`.
template <ScoreConfig kCfg>
TESSERA_DEVICE ProgramPlace with_key(const ProgramPlace& of_key_0, int key, int offset = 0) {
  ProgramPlace at = of_key_0;
  at.j = (kCfg.places ? of_key_0.j + key : key) + offset;
  at.j_offset = offset;
  return at;
}

// Specialised by a kernel that is compiled with a program: `Program`, the struct of the program's text, and `Params`,
// ProgrammedParams of the kernel's params.
template <bool kGiven>
struct ProgramTypes;

namespace program {

// Whether an element is inside its tensor. Where only the last index differs between pairs, each needs one comparison.
template <class... Index>
TESSERA_DEVICE bool holds([[maybe_unused]] const ProgramTensor& tensor, Index... index) {
  if constexpr (sizeof...(Index) == 0) {
    return true;
  } else {
    constexpr int kLast = sizeof...(Index) - 1;
    const uint32 at[] = {static_cast<uint32>(index)...};
    uint32 end = tensor.extent[kLast];
#pragma unroll
    for (int axis = 0; axis < kLast; ++axis) end = at[axis] < tensor.extent[axis] ? end : 0;
    return at[kLast] < end;
  }
}

template <bool kNear>
TESSERA_DEVICE int64 stride_bytes(const ProgramStride& stride) {
  return kNear ? static_cast<int64>(stride.low) : stride.bytes();
}

template <ElementType kType>
TESSERA_DEVICE auto element_at(const char* at) {
  if constexpr (kType == ElementType::kFloat32) return *reinterpret_cast<const float*>(at);
  if constexpr (kType == ElementType::kFloat16) return ptx::cvt_f32_f16(*reinterpret_cast<const unsigned short*>(at));
  if constexpr (kType == ElementType::kBFloat16) {
    return __uint_as_float(static_cast<uint32>(*reinterpret_cast<const unsigned short*>(at)) << 16);
  }
  if constexpr (kType == ElementType::kInt32 || kType == ElementType::kInt64) return *reinterpret_cast<const int*>(at);
  if constexpr (kType == ElementType::kInt16) return static_cast<int>(*reinterpret_cast<const short*>(at));
  if constexpr (kType == ElementType::kInt8) return static_cast<int>(*reinterpret_cast<const signed char*>(at));
  if constexpr (kType == ElementType::kUInt8) return static_cast<int>(*reinterpret_cast<const unsigned char*>(at));
  if constexpr (kType == ElementType::kBool) return *reinterpret_cast<const unsigned char*>(at) != 0;
}

// The address of an element, inside its tensor or not. kNear: all strides have at most 32 bits, and an address needs
// one instruction for each axis.
template <bool kNear, class... Index>
TESSERA_DEVICE const char* address_of(const ProgramTensor& tensor, Index... index) {
  const char* at = static_cast<const char*>(tensor.data);
  [[maybe_unused]] int axis = 0;
  ((at += stride_bytes<kNear>(tensor.stride[axis++]) * index), ...);
  return at;
}

// Returns an element; if the load is not executed or the element is outside the tensor, returns 0 and reads nothing.
template <ElementType kType, bool kNear, class... Index>
TESSERA_DEVICE auto load(const ProgramTensor& tensor, bool taken, Index... index) {
  const char* const at = address_of<kNear>(tensor, index...);
  decltype(element_at<kType>(nullptr)) element{};
  if (taken && holds(tensor, index...)) element = element_at<kType>(at);
  return element;
}

}  // namespace program

// ---- sums of gradients ----------------------------------------------------------------------------------------------
//
// The sums of the gradients of a program's tensors: one sum for each element, to which every block adds.

// Adds x to an exact sum (ExactSum): its 24 bits are split at a word's end.
TESSERA_DEVICE void add_exactly(ExactSum& sum, float x) {
  using uint64 = unsigned long long;
  const uint32 bits = __float_as_uint(x);
  const uint32 exponent = bits >> 23 & 0xffu, fraction = bits & 0x7fffffu;
  if (exponent == 0xffu) {
    ptx::red_or_b32(&sum.special, fraction != 0 ? kNanAdded : bits >> 31 ? kMinusInfinityAdded : kPlusInfinityAdded);
    return;
  }
  // |x| = mantissa x 2^(place - 149)
  const uint32 mantissa = exponent > 0 ? fraction | 0x800000u : fraction, place = exponent > 0 ? exponent - 1 : 0;
  if (mantissa == 0) return;
  const uint64 shifted = static_cast<uint64>(mantissa) << (place & 31u);
  const uint64 low = shifted & 0xffffffffu, high = shifted >> 32;
  uint64* const word = sum.words + (place >> 5);
  const bool negative = bits >> 31;
  if (low != 0) ptx::red_add_u64(word, negative ? 0 - low : low);
  if (high != 0) ptx::red_add_u64(word + 1, negative ? 0 - high : high);
}

// The sum as float64, rounded once for each word of which it consists.
TESSERA_DEVICE double value_of(const ExactSum& sum) {
  if (sum.special & kNanAdded || (sum.special & kPlusInfinityAdded && sum.special & kMinusInfinityAdded)) {
    return static_cast<double>(__int_as_float(0x7fc00000));
  }
  if (sum.special) return static_cast<double>(sum.special & kMinusInfinityAdded ? -infinity() : infinity());
  // Carries make all digits but the sign's non-negative, so that nothing cancels.
  uint32 digit[kExactWords];
  int64 carry = 0;
#pragma unroll
  for (int w = 0; w < kExactWords; ++w) {
    const int64 word = static_cast<int64>(sum.words[w]);
    const int64 low = (word & 0xffffffffll) + (carry & 0xffffffffll);
    digit[w] = static_cast<uint32>(low);
    carry = (word >> 32) + (carry >> 32) + (low >> 32);
  }
  const bool negative = carry < 0;
  if (negative) {
    bool borrow = true;  // two's complement
#pragma unroll
    for (int w = 0; w < kExactWords; ++w) {
      digit[w] = ~digit[w] + (borrow ? 1u : 0u);
      borrow = borrow && digit[w] == 0;
    }
    carry = ~carry + (borrow ? 1 : 0);
  }
  double value = static_cast<double>(carry);
#pragma unroll
  for (int w = kExactWords - 1; w >= 0; --w) value = value * 0x1p32 + static_cast<double>(digit[w]);
  value *= 0x1p-149;
  return negative ? -value : value;
}

// Adds a gradient to the sum of the tensor's element. kExact: the result does not depend on the order of additions.
template <bool kExact>
TESSERA_DEVICE void add_to_sum(void* sums, int64 element, float x) {
  if constexpr (kExact) {
    add_exactly(static_cast<ExactSum*>(sums)[element], x);
  } else {
    ptx::red_add_f32(static_cast<float*>(sums) + element, x);
  }
}

// The element's place among the sums of its tensor, which are contiguous.
template <class... Index>
TESSERA_DEVICE int64 sum_index(const ProgramTensor& tensor, Index... index) {
  int64 element = 0;
  [[maybe_unused]] int axis = 0;
  ((element = element * tensor.extent[axis++] + index), ...);
  return element;
}

// ---- the option -----------------------------------------------------------------------------------------------------
//
// A score program as an option of the score: the user's function of the score so far, with its gradient. The kernel is
// compiled with its text (core/score/cuda_text.hpp), which defines program::ScoreProgram, and gets its tensors and
// scalars at the end of its params.

template <ScoreConfig kCfg>
struct ProgramOption : ScoreOptionDefaults<ProgramOption<kCfg>, kProgramOptionFacts> {
  static constexpr bool kGiven = kCfg.program;
  using Types = ProgramTypes<kCfg.program>;

  TESSERA_DEVICE static const ScoreProgramParams& params(const ProblemParams& p) {
    return static_cast<const typename Types::Params&>(p).program;
  }

  // The coordinates common to a query's pairs, and what the program computes of them: once, since the compiler does not
  // join loads that are executed under a condition.
  struct Row {
    using Program = typename Types::Program;
    using Column = typename Program::Column;
    using Diagonal = typename Program::Diagonal;

    const ScoreProgramParams& program;
    ProgramPlace place;  // of key 0
    typename Program::Head head;
    typename Program::Row values;
    // Constants where they are set: the values of the key and of its distance, if the caller has them, whether the mask
    // is known to be true, and whether apply() leaves the outer part of a capped score to cap().
    const Column* column = nullptr;
    const Diagonal* diagonal = nullptr;
    bool shows_all = false, caps_later = false;

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& of)
        : program(params(p)),
          place(program_place<kCfg>(p, program, of)),
          head(Program::head(program, place)),
          values(Program::row(program, head, place)) {}
    // Of key + offset, whose second part the compiler knows.
    TESSERA_DEVICE ProgramPlace at(int key, int offset = 0) const { return with_key<kCfg>(place, key, offset); }
    // What depends on the key and the head alone, or on i - j and the head.
    TESSERA_DEVICE Column column_of(int key, int offset = 0) const {
      return column ? *column : Program::column(program, head, at(key, offset));
    }
    TESSERA_DEVICE Diagonal diagonal_of(int key, int offset = 0) const {
      return diagonal ? *diagonal : Program::diagonal(program, head, at(key, offset));
    }
    // Whether the mask, which does not depend on the score, shows the key.
    TESSERA_DEVICE bool shows(int key) const {
      static_assert(!Program::kMaskNeedsS);
      return Program::visible(program, head, values, column_of(key), diagonal_of(key), at(key), 0.0f);
    }
    // Becomes the row of a query that is `offset`, which the compiler knows, after this one, with the same head.
    TESSERA_DEVICE void move_by(int offset) {
      place.i += offset, place.q_pos += offset, place.i_offset += offset;
      values = Program::row(program, head, place);
    }
    // Has another row's values of their head, so that they are computed once.
    TESSERA_DEVICE void share_head(const Row& other) { head = other.head, values = Program::row(program, head, place); }
  };

  template <bool kScaled, bool kFused, class ScoreRow, class ScoreEntry>
  TESSERA_DEVICE static void apply(Score& r, float unit, const Sequence&, const ScoreRow& row, int key, int offset,
                                   const ScoreEntry&) {
    using Program = typename Types::Program;
    static_assert(kCfg.only_hides == !Program::kChangesScore, "kernels decide by what the program does");
    const ScoreProgramParams& program = row.program;
    const ProgramPlace at = row.at(key, offset);
    const float s = kScaled ? r.value : r.value * unit;
    const auto column = row.column_of(key, offset);
    const auto diagonal = row.diagonal_of(key, offset);
    const bool visible =
        !Program::kHasMask || row.shows_all || Program::visible(program, row.head, row.values, column, diagonal, at, s);
    r.before_program = s;
    if constexpr (Program::kAffine) {
      float factor = Program::kHasFactor ? Program::factor(program, row.head, row.values, column, diagonal, at) : 1.0f;
      if constexpr (!kScaled) factor *= unit;
      r.value = Program::kHasTerm
                    ? fmaf(r.value, factor, Program::term(program, row.head, row.values, column, diagonal, at))
                    : r.value * factor;
    } else if constexpr (Program::kCapped) {
      r.value = Program::inner(program, row.head, row.values, column, diagonal, at, s);
      if (!row.caps_later) r.value = cap<false>(row, r.value);
    } else if constexpr (Program::kChangesScore) {
      r.value = Program::score(program, row.head, row.values, column, diagonal, at, s);
    }
    if (!visible) r.value = -infinity();
  }
  // A capped score of its inner value. kSmall: that is below kSmallTanh in magnitude.
  template <bool kSmall, class ScoreRow>
  TESSERA_DEVICE static float cap(const ScoreRow& row, float inner) {
    const float tanh = kSmall ? program::small_tanh(inner) : program::tanh_(inner);
    return Types::Program::outer(row.program, row.head, row.place, tanh);
  }

  // The factor of kScalesByHead.
  template <class ScoreRow>
  TESSERA_DEVICE static float head_factor(const ScoreRow& row) {
    using Program = typename Types::Program;
    return Program::factor(row.program, row.head, row.values, typename Program::Column{}, typename Program::Diagonal{},
                           row.place);
  }

  // The term of an affine score.
  template <class ScoreRow>
  TESSERA_DEVICE static float term(const ScoreRow& row, int key) {
    return Types::Program::term(row.program, row.head, row.values, row.column_of(key), row.diagonal_of(key),
                                row.at(key));
  }

  // Calls sink.template add<load, tensor>(inside, ..., index...) for each load of the pair; only the index has a
  // meaning.
  template <class ScoreRow, class Sink>
  TESSERA_DEVICE static void visit_loads(const ScoreRow& row, int key, Sink& sink) {
    gradient(Score{}, row, key, 0.0f, sink);
  }

  // The gradient of the score before the program from that of the score, for a visible pair. `sink` receives the
  // gradients of the program's tensors.
  template <class ScoreRow, class Sink>
  TESSERA_DEVICE static float gradient(const Score& score, const ScoreRow& row, int key, float d, Sink& sink) {
    return gradient(gradient_head(row), score, row, key, d, sink);
  }
  template <class ScoreRow>
  TESSERA_DEVICE static auto gradient_head(const ScoreRow& row) {
    return Types::Program::gradient_head(row.program, row.place);
  }
  // The same with the values of the head.
  template <class Head, class ScoreRow, class Sink>
  TESSERA_DEVICE static float gradient(const Head& head, const Score& score, const ScoreRow& row, int key, float d,
                                       Sink& sink) {
    using Program = typename Types::Program;
    const ScoreProgramParams& program = row.program;
    const ProgramPlace at = row.at(key);
    return Program::gradient(program, head, Program::gradient_row(program, head, at),
                             Program::gradient_column(program, head, at), Program::gradient_diagonal(program, head, at),
                             at, d, score.before_program, sink);
  }
};

// For kernels that compute no gradients of a program's tensors.
struct NoProgramGradients {
  template <int kLoad, int kTensor, class... Index>
  TESSERA_DEVICE void add(bool, float, Index...) {}
};

// The gradients of a program's tensors from a warp's transposed tile: lane / 4 is the key of each of kBlocks blocks of
// keys, and lane % 4 the pair of queries. What all pairs of a head, of a query or of a key read is summed in registers
// and then by the lanes that share it; anything else is added one by one. kExact: the results do not depend on the
// order of the additions.
template <ScoreConfig kCfg, bool kExact, int kBlocks>
struct ProgramGradients {
  using Program = typename ProgramTypes<kCfg.program>::Program;
  static constexpr int kLoads = Program::kGradientLoads > 0 ? Program::kGradientLoads : 1;

  const ScoreProgramParams& p;
  float of_head[kLoads] = {}, of_query[kLoads] = {}, of_key[kLoads][kBlocks] = {};
  int block = 0;  // of keys

  TESSERA_DEVICE explicit ProgramGradients(const ProblemParams& problem) : p(ProgramOption<kCfg>::params(problem)) {}
  TESSERA_DEVICE void begin_block(int of) { block = of; }

  template <int kLoad, int kTensor, class... Index>
  TESSERA_DEVICE void add(bool inside, float adjoint, Index... index) {
    constexpr GradientPattern kPattern = Program::pattern(kLoad);
    if (!p.sums[kTensor] || !inside) return;
    if constexpr (kPattern == GradientPattern::kHead) {
      of_head[kLoad] += adjoint;
    } else if constexpr (kPattern == GradientPattern::kRow) {
      of_query[kLoad] += adjoint;
    } else if constexpr (kPattern == GradientPattern::kColumn) {
      of_key[kLoad][block] += adjoint;
    } else {
      add_to_sum<kExact>(p.sums[kTensor], sum_index(p.tensors[kTensor], index...), adjoint);
    }
  }

  // After all keys of a query; `row` is the query's.
  template <class Row>
  TESSERA_DEVICE void end_query(const Row& row) {
    flush<GradientPattern::kRow, 4, 8, 16>(row, 0, lane_row() == 0, of_query);
  }
  // After all pairs; `row` is any query's, and key_of(block) the lane's key in a block.
  template <class Row, class KeyOf>
  TESSERA_DEVICE void end(const Row& row, KeyOf&& key_of) {
    flush<GradientPattern::kHead, 1, 2, 4, 8, 16>(row, 0, lane_id() == 0, of_head);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float sums[kLoads];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) sums[load] = of_key[load][b];
      flush<GradientPattern::kColumn, 1, 2>(row, key_of(b), lane_col() == 0, sums);
    }
  }

 private:
  // Adds the sums of the loads with a pattern to the elements that a pair of theirs reads.
  template <GradientPattern kPattern>
  struct Flush {
    const ScoreProgramParams& p;
    const float (&sums)[kLoads];

    template <int kLoad, int kTensor, class... Index>
    TESSERA_DEVICE void add(bool inside, float, Index... index) {
      if constexpr (Program::pattern(kLoad) == kPattern) {
        if (!p.sums[kTensor] || !inside || sums[kLoad] == 0.0f) return;
        add_to_sum<kExact>(p.sums[kTensor], sum_index(p.tensors[kTensor], index...), sums[kLoad]);
      }
    }
  };

  // kLanes: by how much the numbers of lanes with the same element differ.
  template <GradientPattern kPattern, int... kLanes, class Row>
  TESSERA_DEVICE static void flush(const Row& row, int key, bool adds, float (&sums)[kLoads]) {
    if constexpr (has(kPattern)) {
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (Program::pattern(load) != kPattern) continue;
        ((sums[load] += __shfl_xor_sync(0xffffffff, sums[load], kLanes)), ...);
      }
      Flush<kPattern> sink{row.program, sums};
      if (adds) ProgramOption<kCfg>::visit_loads(row, key, sink);
#pragma unroll
      for (int load = 0; load < kLoads; ++load) sums[load] = 0.0f;
    }
  }
  TESSERA_DEVICE static constexpr bool has(GradientPattern pattern) {
    for (int load = 0; load < Program::kGradientLoads; ++load) {
      if (Program::pattern(load) == pattern) return true;
    }
    return false;
  }
};

}  // namespace tessera
