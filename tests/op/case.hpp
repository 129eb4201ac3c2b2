// One case of attention as plain data, with a one-line text form that can be parsed back: the same line drives the
// table, the fuzzer and a replay.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::testing {

// The layout of queries or keys: [B, S, H, D], [T, H, D] with cu_seqlens, or pages with a table.
enum Form { kDense = 0, kPacked = 1, kPaged = 2 };

// Memory order of a dense tensor's dimensions, outermost first.
enum Order { kBshd = 0, kBhsd = 1, kSbhd = 2 };

// Which of [B, H, Sq] a broadcastable tensor spans; Sk always.
enum Span { kAbsent = -1, kSpanB = 4, kSpanH = 2, kSpanQ = 1 };

enum Data {
  kNormal = 0,
  kOutlier,   // normal, plus with p = 0.001 a normal of sd 10
  kGrowing,   // keys, and so scores, grow by four orders of magnitude along the sequence
  kHuge,      // values near the end of what float16 holds, or 1e15
  kNanQuery,  // some query rows hold a NaN
  kNanKey,    // some keys hold a NaN
  kInfKey,    // some keys hold +-Inf
  kInfValue,  // some values hold +-Inf
  kInfBias,   // some bias entries hold -Inf
  kFalling,   // as kGrowing, from the last key to the first: a kernel takes its tiles in one order or the other
  kNanOnce,   // one key, a third into the sequence, holds a NaN
  kInfOnce,   // it holds an Inf
  kNanValue,  // one value in a hundred, and one two thirds into the sequence, hold a NaN
  kNanDO,     // some rows of dO hold a NaN
  // Rows of the bias are the lowest or largest numbers of its dtype, or such numbers beside others, or share one.
  kHugeBias,
  kShared  // the keys of a sequence have a large vector in common, and so a row's scores a large number
};

// Of 8-bit tensors. kScalesFine: of blocks of 128 tokens, or with pages of tokens.
enum ScaleShape { kNoScales, kScalesOne, kScalesHead, kScalesBatch, kScalesFine };

inline constexpr double kDefaultScale = std::numeric_limits<double>::infinity();

struct Case {
  int64_t dtype = 0;  // tessera_dtype of q; of 8 bits also that of k and v, and o is bfloat16
  int64_t kv = -1;    // of k and v under 16-bit queries: an 8-bit tessera_dtype; -1: as q
  int64_t scales = kNoScales;
  int64_t b = 1, sq = 16, sk = 16, hq = 1, hkv = 1, d = 16, dv = 16;
  int64_t backward = 0;
  int64_t q_form = kDense, k_form = kDense;
  int64_t page = 16;      // rows a page
  int64_t csr = 0;        // the page table is page_indptr and page_indices
  int64_t lead = 0;       // rows of packed tensors before the first sequence
  int64_t tail = 2;       // and after the last
  int64_t few = 0;        // packed: every sequence but the first has at most so many queries; 0: any number
  int64_t used = 0;       // seqused_k is given; always when paged
  int64_t order = kBshd;  // of dense q, k, v, o and gradients
  int64_t gap = 0;        // elements of padding after each row; makes the rest irregular too
  int64_t reversed = 0;   // inputs are reversed in memory along the sequence: negative strides
  int64_t shared_kv = 0;  // dense k and v: batch stride 0
  int64_t causal = 0, top_left = 0, wl = -1, wr = -1;
  int64_t causal_seqs = 0;  // some sequences, chosen at random, are causal; causal is 0 then
  // The part's place in a whole: its first query and key, how many follow its last ones, and its first KV head and
  // sequence.
  int64_t first_q = 0, first_k = 0, after_q = 0, after_k = 0, first_kv = 0, first_b = 0;
  int64_t places = 0;            // 1: as a tensor, with another place for each sequence
  int64_t tree = 0;              // words of tree_mask; 0: none
  int64_t prefix = 0;            // keys of the longest prefix that random groups of sequences share; 0: none
  int64_t mask = kAbsent;        // Span
  int64_t block_mask = kAbsent;  // Span of B and H
  int64_t block_q = 16, block_k = 16;
  int64_t bias = kAbsent;  // Span
  int64_t bias_f32 = 0, d_bias = 0;
  int64_t alibi = 0;  // 1: [H], 2: [B, H]
  double softcap = 0, dropout = 0, scale = kDefaultScale;
  // The texts of a score program over the names of World (definitions.hpp); the dtype of its floating-point tensors,
  // by which its integers are int32, int64 or int16; whether it asks for their gradients.
  std::string score_mod{}, mask_mod{};
  int64_t captured = TESSERA_FLOAT32, d_captured = 0;
  int64_t lists = 0;             // the problem's list_capacity
  int64_t sink = 0, d_sink = 0;  // sink 2: far above the scores and far below, by turns of the heads
  int64_t state = 0;             // dropout_state in place of seed and offset
  int64_t lse = 1, d_lse = 0;    // lse: requested in the forward pass
  int64_t low = 0;               // lse_low: written by forward, read by backward
  int64_t invariant = 0;
  int64_t deterministic = 0;  // backward; the CPU's bits are the same anyway
  int64_t cores = 2;          // the cores or multiprocessors of the plan
  int64_t data = kNormal;
  int64_t seed = 1;

  bool operator==(const Case&) const = default;
};

// "dtype=bf16 b=2 sq=65 ...": what differs from a Case{}, and always dtype and sizes.
std::string to_text(const Case& c);

// The case that a line describes; none, and the reason, if it describes none.
std::optional<Case> parse_case(std::string_view text, std::string* error);

// Cases with one more field set back to its default or halved: the steps of shrinking.
std::vector<Case> simpler_cases(const Case& c);

// Its data has NaN or infinities in q, k, v or dO.
bool holds_nonfinite(const Case& c);

// The dtypes of k and v, and of o.
int32_t kv_dtype(const Case& c);
int32_t o_dtype(const Case& c);
bool has_8bit(const Case& c);
bool has_program(const Case& c);

// Makes a case obey the rules of a problem (hq a multiple of hkv, no gradient of an absent bias, ...).
Case legalised(Case c);

// The table.
std::vector<Case> case_table();

// Whether a GPU of this compute capability (10 * major + minor) supports the case, in a direction; in all directions of
// the case.
bool served_by_gpu(const Case& c, tessera_direction direction, int32_t arch);
bool served_by_gpu(const Case& c, int32_t arch);

// Its part for fwd_sm90, before legalised() and without seeds.
std::vector<Case> hopper_cases();

}  // namespace tessera::testing
