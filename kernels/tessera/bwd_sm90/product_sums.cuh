// The postprocess of bwd_sm90 that also makes gradients of a score program's tensors: those of elements by which all
// scores of a head are multiplied (LoadSum::kProducts). Where score = f s, with f the same for all pairs of a head,
//
//   df = sum over i, j of dScore_ij s_ij = (sum over i of q_i . dQ_i) / f
//
// because dQ_i = sum over j of dScore_ij f scale k_j and s_ij = scale q_i . k_j. So nothing is summed where the scores
// are, and df has the roundings of dQ. A factor of 0, or one that would make dS so small that it loses digits, is in dS
// only as a part (HeadFactor); dQ gets the rest here.
//
// Grid: as bwd_sm90_after.
#pragma once

#include "tessera/attention/score/head_factor.cuh"
#include "tessera/attention/score/options.cuh"
#include "tessera/bwd_sm90/rows.cuh"

namespace tessera {

// Adds to the sums of the tensors' elements, where `adjoint` is the gradient.
template <class Program, bool kExact>
struct ProductSink {
  const ScoreProgramParams& program;

  template <int kLoad, int kTensor, class... Index>
  TESSERA_DEVICE void add(bool inside, float adjoint, Index... index) {
    if constexpr (Program::load_sum(kLoad) == LoadSum::kProducts) {
      if (!program.sums[kTensor] || !inside) return;
      add_to_sum<kExact>(program.sums[kTensor], sum_index(program.tensors[kTensor], index...), adjoint);
    }
  }
};

// Stores the tile's dQ, and adds its part of the gradients.
template <BwdSm90ProductsConfig kCfg>
TESSERA_DEVICE void store_dq_and_products(const BwdParams& p, const Sequence& s, const QueryTile& t) {
  constexpr BwdSm90RowsConfig kRows = kCfg.rows;
  constexpr int kWarps = kBwdRowsThreads / 32;
  if (t.count <= 0) return;
  const typename ScoreOptions<kCfg.score>::Row row(p, s, t.batch, t.head, t.row0);
  const HeadFactor factor = HeadFactor::of<kRows.dtype>(ProgramOption<kCfg.score>::head_factor(row));
  const int64 first = p.q.batch * t.batch + p.q.row * (static_cast<int64>(s.q_begin) + t.row0) + p.q.head * t.head;
  float products = 0.0f;
  store_dq<kRows>(p, s, t, p.scale * factor.after, [&](int query, int col, float low, float high) {
    if (col >= p.head_dim) return;
    const char* const q =
        static_cast<const char*>(p.q.data) + (first + p.q.row * query + col) * dtype_bytes(kRows.dtype);
    const float2 pair = unpack_pair<kRows.dtype>(*reinterpret_cast<const uint32*>(q));
    products = fmaf(pair.x, low, fmaf(pair.y, high, products));
  });

  __shared__ float sProducts[kWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) products += __shfl_xor_sync(0xffffffff, products, distance);
  if (lane_id() == 0) sProducts[threadIdx.x / 32] = products;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sProducts[warp];
  if (sum == 0.0f) return;
  // The adjoint of an element is dScore times s times what depends on the head: the sum of all pairs' in one.
  Score all{};
  all.before_program = sum * p.scale / factor.in_ds;
  ProductSink<typename ProgramTypes<kCfg.score.program>::Program, kCfg.exact> sink{row.program};
  ProgramOption<kCfg.score>::gradient(all, row, 0, 1.0f, sink);
}

template <BwdSm90ProductsConfig kCfg>
TESSERA_DEVICE void bwd_sm90_after_products(const BwdParams& p) {
  after_tile<kCfg.rows>(p, [&](const Sequence& s, const QueryTile& t) { store_dq_and_products<kCfg>(p, s, t); });
}

}  // namespace tessera
