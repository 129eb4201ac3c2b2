// What is to be computed: layouts and options, without data pointers.
#pragma once

#include <cstdint>

#include "tessera/tensor.hpp"
#include "tessera/tessera.h"

namespace tessera {

// Attention over one batch, O = softmax(scale Q K^T + ...) V. tessera_problem, the base, documents every member. A new
// problem has every tensor absent and no option set. At least these must be given:
//   q [B, Sq, Hq, D]   k [B, Sk, Hkv, D]   v [B, Sk, Hkv, Dv]   o [B, Sq, Hq, Dv]
struct Problem : tessera_problem {
  Problem() { tessera_problem_init(this); }
  Problem(const tessera_problem& problem) : tessera_problem(problem) {}  // NOLINT: the same plain data

  // Replaces the default 1 / sqrt(D). Must be finite.
  Problem& set_scale(double value) {
    has_scale = 1;
    scale = value;
    return *this;
  }

  // Query i sees keys i - left .. i + right, measured from the diagonal; -1 = all on that side.
  Problem& set_window(std::int64_t left, std::int64_t right) {
    window_left = left;
    window_right = right;
    return *this;
  }

  // The queries and keys of every sequence are rows `first_query` .. and `first_key` .. of a whole with `queries` and
  // `keys`.
  Problem& set_place(std::int64_t first_query, std::int64_t queries, std::int64_t first_key, std::int64_t keys) {
    first_q = first_query, total_q = queries;
    first_k = first_key, total_k = keys;
    return *this;
  }

  // Drops entries of the softmax with probability p (0 <= p < 1, in steps of 2^-16): the same entries for the same seed
  // and offset on every device.
  Problem& set_dropout(double p, std::uint64_t seed, std::uint64_t offset = 0) {
    dropout_p = p;
    dropout_seed = seed;
    dropout_offset = offset;
    return *this;
  }
};

// Contiguous layout of lse for a problem with its q set: float32 [B, Hq, Sq], or [Hq, Tq] if q is packed.
inline Layout lse_layout(const tessera_problem& problem) {
  const Layout& q = problem.q;
  if (q.rank == 3) return layout(float32, {q.shape[1], q.shape[0]});
  return layout(float32, {q.shape[0], q.shape[2], q.shape[1]});
}

// The backward problem of a forward one: d_o, d_q, d_k, d_v have the layouts of o, q, k, v, and lse is contiguous
// unless given. d_bias, d_sink and d_lse are copied: set their layouts to request them.
inline Problem gradient_of(const tessera_problem& forward) {
  Problem problem = forward;
  problem.direction = TESSERA_BACKWARD;
  problem.accumulate = 0;
  problem.o_accum = {};
  problem.d_o = problem.o;
  problem.d_q = problem.q;
  problem.d_k = problem.k;
  problem.d_v = problem.v;
  if (problem.lse.rank == 0) problem.lse = lse_layout(problem);
  return problem;
}

}  // namespace tessera
