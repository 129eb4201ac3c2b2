// Runs a lowered score program by the kernels' own step, compiled for one instruction set.
#pragma once

#include <cstdint>

#include "cpu/score/code.hpp"

namespace tessera::cpu {

// Queries 0 ... queries - 1 of one head against keys 0 ... keys - 1 of a sequence of as many.
struct ScoreProbe {
  int64_t batch, head, heads_q, heads_kv, queries, keys;
  const float* s;  // [queries][keys] the score so far
  const ScoreCode* code;
  float *by_queries, *by_keys;  // [queries][keys] new scores, -inf where the mask hides; lanes are queries or keys
  // With a gradient: of the new scores; of the score so far; what the tensors receive.
  const ScoreCode* gradient = nullptr;
  const float* g = nullptr;
  float* d_s = nullptr;
  double* sums = nullptr;
  const int64_t* sums_begin = nullptr;
};

void score_probe_baseline(const ScoreProbe& probe);
void score_probe_avx2(const ScoreProbe& probe);
void score_probe_avx512(const ScoreProbe& probe);
void score_probe_avx512_bf16(const ScoreProbe& probe);

}  // namespace tessera::cpu
