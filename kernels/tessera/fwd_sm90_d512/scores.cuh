// The consumer warpgroups of fwd_sm90_d512: each has 64 query rows of a cluster's tile, and the block's half of O's
// columns.
//
//   S = Q K^T over the block's half of the head's columns. Each thread sends its part to the same thread of the other
//   block, and receives that block's. a + b = b + a: both blocks then have the same bits of S, and the same maxima.
//   O += P V, P from registers, the block's half of V's columns.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/step.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/fwd_sm90_d512/shared.cuh"

namespace tessera {

template <FwdSm90D512Config kCfg>
struct FwdD512Consumer {
  using Shared = FwdD512Shared<kCfg>;
  using Rows = typename Shared::Rows;
  using Keys = typename Shared::Keys;
  static constexpr int kN = kCfg.block_n / 8, kSteps = kCfg.block_n / 16, kD = kCfg.half_dim / 8;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_n, false>;
  using OutputProduct = ptx::Wgmma<kCfg.dtype, kCfg.half_dim, true>;

  // The coordinates (b, h, i, j) of the scores of a block. Bias and mask are loaded for one row at a time, when they
  // are needed.
  struct Coordinates {
    static constexpr int kRows = 2, kAheadRows = 1, kN = FwdD512Consumer::kN, kDiagonalRegisters = 0;
    static constexpr bool kLaneOrder = false, kFused = true;

    const FwdSm90Params& p;
    const FwdD512Consumer& of;
    int key0;

    TESSERA_DEVICE const Sequence& sequence() const { return of.tile.s; }
    TESSERA_DEVICE int batch() const { return of.tile.batch; }
    TESSERA_DEVICE int head(int) const { return of.tile.head; }
    TESSERA_DEVICE int query(int row) const { return row; }
    TESSERA_DEVICE static int col() { return lane() % 4 * 2; }
    TESSERA_DEVICE int row(int i) const { return min(of.query(i), of.tile.s.sq - 1); }
  };
  using Step = ScoreStep<kCfg.score, Coordinates>;

  const FwdSm90Params& p;
  const Shared& shared;
  const FwdD512Tile& tile;
  const int consumer;
  int parity = 0;  // of the block whose scores become P, for barriers with a phase for each block
  int block = 0;   // the block whose scores become P; K is up to two blocks ahead, V one block behind
  OnlineSoftmax<1> softmax;
  float rNext[1][kN][4];  // this block's part of the next scores
  float rS[1][kN][4];
  float rO[1][kD][4];
  uint32 rP[kSteps][4];  // A fragments of P V
  float factor[2];  // of a lane's two rows: 1 / l, with the factors of sink and dropout; negative: the row sees no key

  TESSERA_DEVICE FwdD512Consumer(const FwdSm90Params& p, const Shared& shared, const FwdD512Tile& tile, int consumer)
      : p(p), shared(shared), tile(tile), consumer(consumer) {
    clear(rO);
  }

  // Recomputed where they are used: kept in registers, they would cost registers that the accumulators need.
  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }
  TESSERA_DEVICE static uint32 rank() { return not_hoisted(ptx::cluster_ctarank()); }  // in the cluster
  TESSERA_DEVICE int query(int half) const {
    return tile.row0 + consumer * kConsumerRows + warp() * 16 + half * 8 + lane() / 4;
  }

  TESSERA_DEVICE int exchange_parity() const { return (block - uniform(tile.first_of[consumer])) % 2; }

  TESSERA_DEVICE void run() {
    const int end = uniform(tile.last), first = uniform(tile.first_of[consumer]),
              last = uniform(tile.last_of[consumer]);
    block = uniform(tile.first);
    if (block < end) ptx::mbarrier_wait_parity(shared.barrier(Shared::kQFull + consumer), 0);
    for (; block < first; ++block) skip_block();
    if (block < last) {
      issue_scores(block);
      ptx::wgmma_wait_group<0>();
      send_scores(block, 0);
      take_scores();
      if (block + 1 == last) {
        attend<true, true>();
      } else {
        attend<true, false>();
        while (block + 1 < last) attend<false, false>();
        attend<false, true>();
      }
      issue_output(block - 1);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rO));
      release_v(block - 1);
    }
    for (; block < end; ++block) skip_block();
    finish_sums();
    store();
  }

  // Turns a block's scores into P during the next block's S = Q K^T and the previous block's O += P V: the tensor cores
  // are busy while the other thread block's part of the scores, sent as soon as it was computed, is in transit.
  template <bool kFirst, bool kLast>
  TESSERA_DEVICE void attend() {
    if constexpr (!kLast) issue_scores(block + 1);
    if constexpr (!kFirst) issue_output(block - 1);
    add_other_half();
    apply_options_and_mask();
    float alpha[1][2];
    const bool moves = softmax.update_max(rS, score_unit<kCfg.score>(p), alpha);
    softmax.exponentiate(rS, score_unit<kCfg.score>(p));
    if constexpr (!kLast) {
      ptx::wgmma_wait_group<kFirst ? 0 : 1>();
      send_scores(block + 1, (exchange_parity() ^ 1));
    }
    if constexpr (!kFirst) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rO));
      release_v(block - 1);
      if (moves) softmax.rescale(alpha, rO);
    }
    pack();
    if constexpr (!kLast) take_scores();
    ++block;
  }

  // ---- products ----

  TESSERA_DEVICE void issue_scores(int of) {
    wait_k(of);
    TileDescriptor q = shared.q_descriptor(consumer), k = shared.k_descriptor(place<kCfg.k_stages>(of));
    q.address = not_hoisted(q.address);  // kept over the loop it would cost registers
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.half_dim; d += 16) {
      ScoreProduct::ss(flat(rNext), inner_major<Rows>(q, 0, d), inner_major<Keys>(k, 0, d), d > 0);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void issue_output(int of) {
    wait_v(of);
    const TileDescriptor v = shared.v_descriptor(place<kCfg.v_stages>(of));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      OutputProduct::rs(flat(rO), rP[step], outer_major<Keys>(v, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }

  // ---- rings ----

  // The ring position of a block, computed from its number: this keeps no registers.
  template <int kStages>
  TESSERA_DEVICE RingPosition<kStages> place(int of) const {
    const int n = of - uniform(tile.first);
    RingPosition<kStages> at;
    at.offset = n % kStages * RingPosition<kStages>::kStep, at.parity = n / kStages % 2;
    return at;
  }
  TESSERA_DEVICE void wait_k(int of) const {
    const auto at = place<kCfg.k_stages>(of);
    ptx::mbarrier_wait_parity(shared.barrier(Shared::kKFull) + at.offset, at.parity);
  }
  TESSERA_DEVICE void release_k(int of) const {
    Shared::arrive_warp(shared.barrier(Shared::kKEmpty) + place<kCfg.k_stages>(of).offset);
  }
  // Rows of V past the sequence's end are multiplied by P = 0, but in packed tensors they may hold NaN.
  TESSERA_DEVICE void wait_v(int of) const {
    const auto at = place<kCfg.v_stages>(of);
    ptx::mbarrier_wait_parity(shared.barrier(Shared::kVFull) + at.offset, at.parity);
    if constexpr (kCfg.varlen) {
      const int rows = uniform(tile.s.sk) - of * kCfg.block_n;
      if (rows < kCfg.block_n) clear_v(shared.v(at), rows);
    }
  }
  // Both consumers write the same zeros.
  TESSERA_DEVICE void clear_v(uint32 v, int first) const {
    constexpr int kRowWords = Keys::kChunks * 8;  // of 16 bytes
    for (int word = first * kRowWords + static_cast<int>(threadIdx.x % 128); word < Keys::kRows * kRowWords;
         word += 128) {
      ptx::st_shared_zero_16(Keys::at(v, word / kRowWords, word % kRowWords * 8));
    }
    ptx::fence_proxy_async();
    consumer_sync();
  }
  TESSERA_DEVICE void consumer_sync() const { ptx::barrier_sync(1 + consumer, 128); }
  TESSERA_DEVICE void release_v(int of) const {
    Shared::arrive_warp(shared.barrier(Shared::kVEmpty) + place<kCfg.v_stages>(of).offset);
  }
  TESSERA_DEVICE void skip_block() const {
    wait_k(block);
    release_k(block);
    const auto at = place<kCfg.v_stages>(block);
    ptx::mbarrier_wait_parity(shared.barrier(Shared::kVFull) + at.offset, at.parity);
    release_v(block);
  }

  // ---- S ----

  // Sends this block's part of the next scores to the other block, once that block has read the previous part.
  TESSERA_DEVICE void send_scores(int of, int phase) {
    ptx::wgmma_pin(flat(rNext));
    release_k(of);
    ptx::mbarrier_wait_parity(partial_barrier(Shared::kPartialFree), phase ^ 1);
    const uint32 to = ptx::mapa(partial(), rank() ^ 1),
                 full = ptx::mapa(partial_barrier(Shared::kPartialFull), rank() ^ 1);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float(&x)[4] = rNext[0][n];
      const uint32 words[4] = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                               __float_as_uint(x[3])};
      ptx::st_async_v4_b32(to + n * (128 * 16), words, full);
    }
  }
  TESSERA_DEVICE void take_scores() {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) rS[0][n][e] = rNext[0][n][e];
  }
  TESSERA_DEVICE void add_other_half() {
    const uint32 full = partial_barrier(Shared::kPartialFull), from = partial();
    ptx::mbarrier_wait_parity(full, exchange_parity());
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint4 words = ptx::ld_shared_16(from + n * (128 * 16));
      float(&x)[4] = rS[0][n];
      x[0] += __uint_as_float(words.x), x[1] += __uint_as_float(words.y);
      x[2] += __uint_as_float(words.z), x[3] += __uint_as_float(words.w);
    }
    // The values must be read here, not only requested: after the arrival below the other block may overwrite them.
    ptx::wgmma_pin(flat(rS));
    __syncwarp();
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect_tx(full, Shared::kPartialWarpBytes);
      ptx::mbarrier_arrive_shared_cluster(ptx::mapa(partial_barrier(Shared::kPartialFree), rank() ^ 1));
    }
  }
  TESSERA_DEVICE uint32 partial() const {
    return not_hoisted(shared.base) + Shared::kAt.partial + consumer * (4 * Shared::kPartialWarpBytes) +
           (warp() * 32 + lane()) * 16;
  }
  TESSERA_DEVICE uint32 partial_barrier(int first) const {
    return not_hoisted(shared.base) + Shared::kAt.barriers + (first + consumer * 4 + warp()) * 8;
  }

  TESSERA_DEVICE void apply_options_and_mask() {
    const int key0 = block * kCfg.block_n;
    if constexpr (kCfg.score.any()) {
      const Coordinates at{p, *this, key0};
      const bool pairs = !Step::kLoads || (p.bias_mask_keys > 1 && key0 + kCfg.block_n <= tile.s.sk);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const typename Step::Row row = Step::row(at, at.row(half));
        if (pairs) {
          Step step;
          if constexpr (Step::kLoads) {
            reload_memory();  // the loads of one row stay after the uses of the other
            step.load_row(at, half, row);
          }
          step.apply_row(rS[0], at, half, row);
        } else {
          Step::apply_each_row(rS[0], at, half, row);
        }
      }
    }
    if (block >= tile.full_first_of[consumer] && block <= tile.full_last_of[consumer])
      return;  // read from memory, to save registers
    const int key = key0 + lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = visible_keys<kCfg.score>(p, tile.s, query(half));
      mask_outside(rS[0], half, keys.low - key, keys.high - key);
    }
  }

  // Packs P as A fragments. The sums are computed before: the LSE is that without dropout.
  TESSERA_DEVICE void pack() {
    if constexpr (kCfg.score.dropout) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        drop<kCfg.score.dropout_state>(rS[0], half, p, dropout_head<kCfg.score>(p, tile.batch, tile.head),
                                       dropout_query<kCfg.score>(p, tile.batch, query(half)),
                                       dropout_key<kCfg.score>(p, tile.batch, block * kCfg.block_n));
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pack_a<kCfg.dtype>(rP[step], rS[0], step);
  }

  // ---- results ----

  // Finishes the rows' sums after all keys: one block of the cluster stores the LSE to global memory; sets `factor`.
  TESSERA_DEVICE void finish_sums() {
    softmax.finish();
    const bool seen[2] = {softmax.sum[0][0] != 0.0f, softmax.sum[0][1] != 0.0f};  // NaN counts as seen
    RowTotal total[2] = {softmax.total(0, 0), softmax.total(0, 1)};
    float scale[2] = {1.0f, 1.0f};
    if (p.sink) {
      const float sink = p.sink[p.sink_head * tile.head];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (seen[half]) scale[half] = total[half].join_sink(p, sink);
      }
    }
    if (p.lse.data && rank() == 0) {
      // Of the four lanes that have a row, lane 0 stores the LSE of that row and lane 1 that of the row eight below.
      const int half = lane() % 4, row = consumer * kConsumerRows + warp() * 16 + half * 8 + lane() / 4;
      if (half < 2 && row < tile.count) {
        const RowTotal mine = half ? total[1] : total[0];
        store_lse(
            p, tile.batch, tile.head, static_cast<int64>(tile.s.q_begin) + tile.row0 + row,
            (half ? seen[1] : seen[0]) ? mine.lse(p, ptx::lg2_approx_ftz(mine.sum), p.lse_low.data) : unseen_lse());
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kCfg.score.dropout) scale[half] *= p.dropout_scale;
      factor[half] = seen[half] ? scale[half] * ptx::rcp_approx_ftz(total[half].sum) : 0.0f;
    }
  }

  // O / l: registers -> shared, over Q -> global. TMA stores a warp's 16 rows; if a packed sequence ends among them,
  // the next rows belong to another sequence, and the lanes store only the rows of this one.
  TESSERA_DEVICE void store() {
    const int row0 = consumer * kConsumerRows + warp() * 16, count = min(tile.count - row0, 16);
    const int col0 = static_cast<int>(rank()) * kCfg.half_dim;
    const uint32 to = shared.q(consumer);
    consumer_sync();  // all four warps' products have read Q
    if (count <= 0) return;
#pragma unroll
    for (int col = 0; col < kCfg.half_dim; col += 16) {
      uint32 words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const auto& o = rO[0][col / 8 + t / 2];
        const float l = factor[t % 2];
        words[t] = l == 0.0f ? 0 : pack_pair<kCfg.dtype>(o[t % 2 * 2] * l, o[t % 2 * 2 + 1] * l);
      }
      ptx::stmatrix_x4(Rows::at(to, warp() * 16 + lane() % 16, col + lane() / 16 * 8), words);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (kCfg.varlen && p.cu_seqlens_q && count < 16) {
      constexpr int kRowWords = kCfg.half_dim / 8;
      for (int word = lane(); word < count * kRowWords; word += 32) {
        const int row = word / kRowWords, col = word % kRowWords * 8;
        if (col0 + col >= p.head_dim_v) continue;
        const int64 at = p.o.batch * tile.batch + p.o.head * tile.head +
                         p.o.row * (static_cast<int64>(tile.s.q_begin) + tile.row0 + row0 + row) + col0 + col;
        *reinterpret_cast<uint4*>(static_cast<char*>(p.o.data) + at * 2) =
            ptx::ld_shared_16(Rows::at(to, warp() * 16 + row, col));
      }
    } else if (lane() == 0) {
      for (int col = 0; col < kCfg.half_dim && col0 + col < p.head_dim_v; col += kChunkCols) {
        ptx::cp_async_bulk_tensor_store_4d(&p.o_map, Rows::at(to, warp() * 16, col), col0 + col,
                                           tile.s.q_begin + tile.row0 + row0, tile.head,
                                           tile.template q_batch<kCfg>(p));
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read();  // before another block uses this shared memory
    }
  }
};

}  // namespace tessera
