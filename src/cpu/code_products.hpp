// Products with keys and values of 8 bits, whose codes are converted to bf16 in registers. Every number of the three
// formats is a bf16, so nothing is rounded. A unit of its own, for an instruction set that decoding chooses apart from
// the other kernels' (src/CMakeLists.txt).
#pragma once

#include <cstdint>

namespace tessera::cpu {

constexpr int kCodeKeys = 16;     // keys at a time
constexpr int kCodeValues = 32;   // values at a time
constexpr int kCodeColumns = 64;  // rows of q and O are padded to a multiple of it

// Where pair n of a row of q begins: it has this column and the one two further.
constexpr int64_t code_pair_column(int64_t n) { return n / 2 * 4 + n % 2; }

// Rows of kCodeKeys keys of the first of some heads.
struct CodeRows {
  const char* rows[kCodeKeys];
  int64_t head_bytes;  // between the rows of neighbouring heads
};

struct CodeProducts {
  // scores[h][r][n] = q_hr . (codes of row n of head h), n < kCodeKeys, with [rows][scores_ld] scores a head. q: pairs
  // of bf16 (code_pair_column), [heads][padded head dimension / 2][rows], zeros past the head dimension. `dtype`: of
  // the codes. Rows `ahead` are prefetched.
  void (*scores)(int32_t dtype, float* scores, int64_t scores_ld, const uint32_t* q, int64_t rows, int64_t heads,
                 const CodeRows& keys, const CodeRows& ahead, int64_t head_dim);
  // out[r][code_column(c)] += sum_n weights[r][n] (code c of values[n]), n < kCodeValues. weights: bf16.
  void (*values)(int32_t dtype, float* out, int64_t out_ld, const uint16_t* weights, int64_t weights_ld, int64_t rows,
                 const char* const* values, int64_t head_dim_v);
};

// AVX-512 with BF16 and VBMI, whose byte permutation is a table of 128 codes.
extern const CodeProducts code_products_avx512_vbmi;

}  // namespace tessera::cpu
