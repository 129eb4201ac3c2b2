// Attention by its definition, in three steps, materialising S: the kernels' errors are compared with its errors.
//
// In float32 with 16-bit inputs it rounds the values that a plain implementation of that type would store: P before P
// V, dS before its products, and all outputs. Philox and the masks are its own, so that it also checks the oracle.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "inputs.hpp"

namespace tessera::testing {

// One output: its values, and for each element the error of one rounding a term: the root of the summed squares of one
// rounding's effect on each term of its sum. It matters for tensors of a few elements, where the plain result can be
// exact by chance.
struct PlainTensor {
  std::vector<double> value, noise;
};

struct PlainResult {
  PlainTensor o, lse, lse_to_twice_the_digits, d_q, d_k, d_v, d_bias, d_sink;
  std::map<std::string, PlainTensor> d_captured;  // by the names of their outputs (Call::captured_names)
  std::vector<char> unseen_q;                     // [rows_q, Hq]: this query sees nothing
  std::vector<char> unseen_k;  // [rows_k, Hkv]: no query sees this key; true also for data of no sequence
};

// kSame: float32, and rounding to the case's dtype. kScoresToo: S and dP are stored in it as well, as standard
// attention's are. kFp8TensorCores: exp(s - max), times 2^8, is rounded to e4m3 for its product with V, but not for
// the sum; the noise of Q K^T is that of Hopper's sums of 8-bit products.
enum class Precision { kSame, kScoresToo, kFp8TensorCores, kFloat64 };

PlainResult plain_attention(const Inputs& in, Precision precision);

}  // namespace tessera::testing
