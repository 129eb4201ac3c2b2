// One sequence of the batch. Offsets and lengths outside the tensors are clamped to the nearest valid value, because a
// kernel cannot return an error.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera {

struct Sequence {
  int q_begin, sq;  // its queries are rows q_begin ... of q
  // Its keys in use are rows k_begin ... of k and v; CSR page table: the index of its first page's entry.
  int k_begin, sk;
  int k_rows;       // all of its keys, also those from seqused_k on
  int causal;       // with ScoreConfig::causal_seqs: whether this sequence is causal
  int64 row_begin;  // index of its first query among all queries of the batch
};

TESSERA_DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

// Paged: the address of the page table entry of the sequence's first page; the entries are p.page_table_col apart.
TESSERA_DEVICE const int* pages_of(const ProblemParams& p, const Sequence& s, int b) {
  return p.page_table + p.page_table_batch * b + p.page_table_col * s.k_begin;
}

// kVarlen: sequences may be packed, or use only some of their keys (seqused_k). kPaged: offsets of keys count pages.
template <bool kVarlen = true, bool kPaged = false>
TESSERA_DEVICE Sequence load_sequence(const ProblemParams& p, int b) {
  Sequence s;
  s.q_begin = 0, s.sq = p.seqlen_q;
  s.k_begin = 0, s.k_rows = p.seqlen_k;
  s.row_begin = static_cast<int64>(b) * p.seqlen_q;
  if (kVarlen && p.cu_seqlens_q) {
    s.q_begin = clamp(p.cu_seqlens_q[b * p.cu_seqlens_q_stride], 0, p.rows_q);
    const int end = clamp(p.cu_seqlens_q[(b + 1) * p.cu_seqlens_q_stride], s.q_begin, p.rows_q);
    s.sq = min(end - s.q_begin, p.max_seqlen_q);
    if (s.sq <= p.decoded_queries) s.sq = 0;
    s.row_begin = s.q_begin;
  }
  if (kVarlen && p.cu_seqlens_k) {
    s.k_begin = clamp(p.cu_seqlens_k[b * p.cu_seqlens_k_stride], 0, p.rows_k);
    const int end = clamp(p.cu_seqlens_k[(b + 1) * p.cu_seqlens_k_stride], s.k_begin, p.rows_k);
    if constexpr (kPaged) {
      const int64 keys = static_cast<int64>(end - s.k_begin) * p.page_size;
      s.k_rows = static_cast<int>(min(keys, static_cast<int64>(p.max_seqlen_k)));
    } else {
      s.k_rows = min(end - s.k_begin, p.max_seqlen_k);
    }
  }
  s.sk = s.k_rows;
  if (kVarlen && p.seqused_k) s.sk = clamp(p.seqused_k[b * p.seqused_k_stride], 0, min(s.k_rows, p.max_seqlen_k));
  return s;
}

// The same; also loads whether the sequence is causal if each sequence says so itself.
template <bool kVarlen, bool kPaged, ScoreConfig kScore, class Params>
TESSERA_DEVICE Sequence load_sequence(const Params& p, int b) {
  Sequence s = load_sequence<kVarlen, kPaged>(p, b);
  if constexpr (kScore.causal_seqs) s.causal = p.masks.causal_seqs[b * p.masks.causal_seqs_stride];
  return s;
}

template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE Sequence uniform(Sequence s) {
  s.q_begin = uniform(s.q_begin), s.sq = uniform(s.sq);
  s.k_begin = uniform(s.k_begin), s.sk = uniform(s.sk), s.k_rows = uniform(s.k_rows);
  if constexpr (kScore.causal_seqs) s.causal = uniform(s.causal);
  return s;
}

// The head and the sequence of a block.
struct SequenceHead {
  int batch, head;
};

// The head and the sequence at `index`; packed: the head. Normally all heads of one sequence are neighbours, because
// they usually read the same mask and keys. If all sequences read the same bias (or mask), which differs between heads,
// all sequences of one head are neighbours instead: the bias is read from memory once, and from the L2 cache for the
// other sequences' tiles.
template <ScoreConfig kScore, class Heads>
TESSERA_DEVICE SequenceHead sequence_head(const ProblemParams& p, int index, const Heads& heads) {
  if (kScore.entries() && p.head_by_head) return {index % p.batch, index / p.batch};
  return {index / heads, index % heads};
}

}  // namespace tessera
