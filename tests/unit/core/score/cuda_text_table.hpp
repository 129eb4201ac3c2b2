// The CUDA text of score programs as functions of the host, in the order of cuda_programs().
#pragma once

#include <initializer_list>
#include <vector>

#include "tessera/attention/score/program.cuh"

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
  bool (*visible)(const ScoreProgramParams& p, const ProgramPlace& at, float s);
  float (*gradient)(const ScoreProgramParams& p, const ProgramPlace& at, float g, float s, Sink& sink);
  void (*check)(const ScoreProgramParams& p, const ProgramPlace& at);
};
extern const CudaTextEntry kCudaTexts[];

template <class Program>
CudaTextEntry entry_of() {
  return {[](const ScoreProgramParams& p, const ProgramPlace& at, float s) {
            return Program::score(p, Program::row(p, at), Program::column(p, at), at, s);
          },
          [](const ScoreProgramParams& p, const ProgramPlace& at, float s) {
            return Program::visible(p, Program::row(p, at), Program::column(p, at), at, s);
          },
          [](const ScoreProgramParams& p, const ProgramPlace& at, float g, float s, Sink& sink) {
            return Program::gradient(p, Program::gradient_row(p, at), Program::gradient_column(p, at), at, g, s, sink);
          },
          [](const ScoreProgramParams& p, const ProgramPlace& at) { Program::check(p, at); }};
}

}  // namespace tessera::testing
