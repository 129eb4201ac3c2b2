// The inner loops of the peers, compiled once for each instruction set (loops.cpp) and chosen at run time.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::peers {

struct Loops {
  // Ceilings. Each returns a value that keeps the compiler from dropping the work; FLOPs per iteration are beside it.
  float (*fma)(std::int64_t iterations);
  double fma_flops_per_iteration;
  float (*bf16_dot)(std::int64_t iterations);  // nullptr: this instruction set has none
  double bf16_dot_flops_per_iteration;
  float (*read)(const float* data, std::int64_t elems);  // elems: a multiple of 512

  // Standard attention. A row of scores becomes a row of probabilities; dP becomes dS = P o (dP - sum(P o dP)).
  void (*softmax_row)(float* row, std::int64_t elems);
  void (*softmax_grad_row)(const float* p_row, float* dp_row, std::int64_t elems);
  void (*from_bf16)(const std::uint16_t* in, float* out, std::int64_t elems);
  void (*to_bf16)(const float* in, std::uint16_t* out, std::int64_t elems);
  void (*from_f16)(const std::uint16_t* in, float* out, std::int64_t elems);
  void (*to_f16)(const float* in, std::uint16_t* out, std::int64_t elems);

  // Float64 samples.
  double (*dot_f64)(const double* a, const double* b, std::int64_t elems);
  void (*axpy_f64)(double alpha, const double* x, double* y, std::int64_t elems);  // y += alpha x
};

// AMX's bfloat16 products with operands from the first cache; the caller knows that this process may use AMX.
void amx_products(std::int64_t iterations, bool zeros);
constexpr double kAmxFlopsPerIteration = 4.0 * 2 * 16 * 16 * 32;

// The loops for `isa`, nullptr if this CPU or this build lacks them.
const Loops* loops_for(tessera_isa isa);
// The best that this CPU has.
const Loops& best_loops();

}  // namespace tessera::peers
