// A score program as an option of the score: the user's function of the score so far, with its gradient. The kernel is
// compiled with its text (core/score/cuda_text.hpp), which defines program::ScoreProgram, and gets its tensors and
// scalars at the end of its params.
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/attention/score/program.cuh"
#include "tessera/attention/score/program_sums.cuh"

namespace tessera {

template <ScoreConfig kCfg>
struct ProgramOption : ScoreOptionDefaults<ProgramOption<kCfg>, kProgramFacts> {
  static constexpr bool kGiven = kCfg.program;
  using Types = ProgramTypes<kCfg.program>;

  TESSERA_DEVICE static const ScoreProgramParams& params(const ProblemParams& p) {
    return static_cast<const typename Types::Params&>(p).program;
  }

  // The coordinates common to a query's pairs.
  struct Row {
    const ScoreProgramParams& program;
    ProgramPlace place;      // without j
    bool shows_all = false;  // the mask is known to be true: a constant where it is set

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& of)
        : program(params(p)), place{of.batch, of.head, of.head / p.group, of.query, 0, of.query + of.len_k - of.len_q,
                                    of.len_q, of.len_k} {}
    TESSERA_DEVICE ProgramPlace at(int key) const {
      ProgramPlace at = place;
      at.j = key;
      return at;
    }
  };

  template <bool kScaled, bool kFused, class ScoreRow, class ScoreEntry>
  TESSERA_DEVICE static void apply(Score& r, float unit, const Sequence&, const ScoreRow& row, int key, int offset,
                                   const ScoreEntry&) {
    using Program = typename Types::Program;
    const ScoreProgramParams& program = row.program;
    const ProgramPlace at = row.at(key + offset);
    const float s = kScaled ? r.value : __fmul_rn(r.value, unit);
    const auto of_row = Program::row(program, at);
    const auto of_column = Program::column(program, at);
    const bool visible = !Program::kHasMask || row.shows_all || Program::visible(program, of_row, of_column, at, s);
    r.before_program = s;
    r.value = visible ? Program::score(program, of_row, of_column, at, s) : -infinity();
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
    using Program = typename Types::Program;
    const ScoreProgramParams& program = row.program;
    const ProgramPlace at = row.at(key);
    return Program::gradient(program, Program::gradient_row(program, at), Program::gradient_column(program, at), at, d,
                             score.before_program, sink);
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
struct ProgramGradients {  // without a program
  TESSERA_DEVICE explicit ProgramGradients(const ProblemParams&) {}
  TESSERA_DEVICE void begin_block(int) {}
  template <class Row>
  TESSERA_DEVICE void end_query(const Row&) {}
};

template <ScoreConfig kCfg, bool kExact, int kBlocks>
requires(kCfg.program) struct ProgramGradients<kCfg, kExact, kBlocks> {
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
