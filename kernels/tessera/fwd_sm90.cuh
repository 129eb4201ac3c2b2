// Forward on Hopper: O = softmax(scale Q K^T) V and LSE, FlashAttention-3's plan: TMA, wgmma and warpgroups with roles.
//
// A persistent block takes works, tiles of 64 query rows a consumer warpgroup (core/fwd_work), whose Q, K and V producer
// threads bring (core/fwd_sm90_producers). A consumer asks for the scores of the next block of keys, S' = Q K'^T, and for
// O += P V of the last one: the exponentials of S' run under P V and under the products of the other consumers, which keep
// no step with this one. The first scores of the next work run under the store of this one. Behind a row's first block no
// maximum is taken (core/online_softmax: as it is); should a sum then pass a bound, a warp computes its scores again.
//
// Block: (consumers + 1) x 128 threads, one a multiprocessor; registers go from the producers to the consumers. Shared
// memory: FwdSm90SharedMemory. Its page, with what was measured: docs/kernels/fwd_sm90.md.
#pragma once

#include "tessera/core/fwd_sm90_producers.cuh"
#include "tessera/core/online_softmax.cuh"
#include "tessera/ptx/barrier.cuh"
#include "tessera/ptx/warpgroup.cuh"

namespace tessera {

inline constexpr int kCleared = 1;  // a barrier of each consumer: kCleared + consumer

// A lane's sum of a block against references that may be too low: above it the block is done again with the rows' maxima.
// Low, so that a key that outweighs all before becomes the reference itself, and its weight in 16 bits is exact.
inline constexpr float kPromptBound = 0x1p6f;

// A warpgroup, with 64 rows of each work.
template <FwdSm90Config kCfg>
struct Consumer {
  static constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim_v / 8, kSteps = kCfg.block_n / 16;
  using Q = SwizzledTile<64, kCfg.head_dim>;
  using K = SwizzledTile<kCfg.block_n, kCfg.head_dim>;
  using V = SwizzledTile<kCfg.block_n, kCfg.head_dim_v>;
  // Every consumer's next queries have a place of their own, and are there when it asks for their scores before its store.
  static constexpr bool kAhead = kCfg.q_stages >= 2 * kCfg.consumers;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_n, false>;
  using OutputProduct = ptx::Wgmma<kCfg.dtype, kCfg.head_dim_v, true>;

  const FwdSm90Params& p;
  FwdSm90SharedMemory<kCfg>& shared;
  const int consumer;
  RingPosition<kCfg.q_stages> q_at;
  RingPosition<FwdSm90SharedMemory<kCfg>::kWorks> work_at;
  RingPosition<kCfg.k_stages> k_at;  // whose scores are asked for next
  RingPosition<kCfg.v_stages> v_at;  // whose product with P comes next
  int whole_first, whole_last;       // of this work: blocks that every row sees whole
  float rS[1][kN][4], rO[1][kD][4];
  uint32 rP[kSteps][4];  // A fragments
  OnlineSoftmax<1> softmax;
  float factor[2];

  TESSERA_DEVICE Consumer(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared, int consumer)
      : p(p), shared(shared), consumer(consumer) {
    q_at.advance(consumer);
  }

  // Of the warpgroup's 64 rows, the warp's 16.
  TESSERA_DEVICE static int warp_row() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)) * 16; }

  // ---- products ----

  // S = Q K^T of the next block.
  TESSERA_DEVICE void ask_scores() {
    const uint32 q = descriptor_address(shared_address(shared.sQ[q_at.stage].data));
    const uint32 k = descriptor_address(shared_address(shared.sK[k_at.stage].data));
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim; d += 16) {
      ScoreProduct::ss(flat(rS), inner_major<Q>(q, 0, d), inner_major<K>(k, 0, d), d > 0);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void ask_output() {
    const uint32 v = descriptor_address(shared_address(shared.sV[v_at.stage].data));
    shared.v.wait_full(v_at);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      OutputProduct::rs(flat(rO), rP[step], outer_major<V>(v, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void release_keys() {
    shared.k.release(k_at);
    k_at.advance();
  }
  TESSERA_DEVICE void release_values() {
    shared.v.release(v_at);
    v_at.advance();
  }

  // -inf for the scores of keys that a row does not see. Under a staircase they lie behind.
  TESSERA_DEVICE void hide(const FwdWork<kCfg>& work, int block) {
    const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
    const int key0 = block * kCfg.block_n + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = work.row0 + consumer * 64 + warp_row() + half * 8 + lane / 4;
      const KeyRange keys = visible_keys(p, work.s, row);
      hide_outside(rS[0], half, kCfg.causal ? 0 : keys.low - key0, keys.high - key0);
    }
  }

  TESSERA_DEVICE void pack() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pack_a<kCfg.dtype>(rP[step], rS[0], step);
  }
  TESSERA_DEVICE bool sees_whole(int block) const {
    return (kCfg.causal || block >= whole_first) && block <= whole_last;
  }

  // A work's first scores become P, with the rows' maxima.
  TESSERA_DEVICE void attend_first(const FwdWork<kCfg>& work, int block) {
    if (!sees_whole(block)) hide(work, block);
    release_keys();
    float alpha[1][2];
    softmax.move_reference(rS, p.scale_log2, alpha, 0.0f);
    softmax.exponentiate(rS, p.scale_log2);
    pack();
  }

  // The scores that were asked for become P against the references of the blocks before, without maxima; meanwhile
  // O += P V of the block before. A warp that has no reference, or should have a new one, goes another way, but all of a
  // consumer's ask for the same products.
  TESSERA_DEVICE void attend(const FwdWork<kCfg>& work, int block) {
    ask_output();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(flat(rS));
    const bool whole = sees_whole(block);
    if (!whole) hide(work, block);
    const bool optimistic = softmax.ready;
    bool fits = false;
    if (optimistic) {
      float total[1][2] = {};
      softmax.exponentiate_as_is(rS, p.scale_log2, total);
      fits = softmax.accept(total, kPromptBound);
    }
    if (fits) shared.k.release(k_at);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rO));
    release_values();
    if (!fits) [[unlikely]] {
      // Again, from the products on. Here, where the registers of the last P are free and no product is under way.
      if (optimistic) {
        warp_product_abt<kCfg.dtype, Q, K>(rS, shared_address(shared.sQ[q_at.stage].data), warp_row(),
                                           shared_address(shared.sK[k_at.stage].data));
        if (!whole) hide(work, block);
      }
      shared.k.release(k_at);
      float alpha[1][2];
      const bool moves = softmax.move_reference(rS, p.scale_log2, alpha, 0.0f);
      softmax.exponentiate(rS, p.scale_log2);
      if (moves) softmax.rescale(alpha, rO);
    }
    k_at.advance();
    pack();
  }

  // O, not yet divided, from the blocks from `block` on that my rows see, the last product still under way; the answer is the
  // block behind them.
  TESSERA_DEVICE int attend_blocks(const FwdWork<kCfg>& work, int block) {
    whole_first = uniform(work.whole_first), whole_last = uniform(work.whole_last_of[consumer]);
    const int last = uniform(work.last_of[consumer]);  // that my rows see
    const bool cut_off = (p.cu_seqlens_k || p.seqused_k) && work.s.sk < (last + 1) * kCfg.block_n;
    attend_first(work, block);
    for (++block; block <= last; ++block) {
      shared.k.wait_full(k_at);
      ask_scores();
      attend(work, block);
    }
    if (cut_off) clear_tail(work.s.sk % kCfg.block_n);
    ask_output();
    return block;
  }

  // Waits for the queries of the work at q_at and asks for the scores of its first block; if my rows see none, of whatever lies
  // there, since a product in a branch would serialise all. False: there are no more works.
  TESSERA_DEVICE bool open() {
    shared.q.wait_full(q_at);
    const FwdWork<kCfg>& work = shared.work[work_at.stage];
    const int count = uniform(work.count);
    if (count > consumer * 64 && uniform(work.first) < uniform(work.last)) {
      if (p.cu_seqlens_q && count < (consumer + 1) * 64) clear_rows(count - consumer * 64);
      shared.k.wait_full(k_at);
    }
    ask_scores();
    return count >= 0;
  }
  TESSERA_DEVICE void await_scores() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
  }

  TESSERA_DEVICE void attend_works() {
    bool more = open();
    await_scores();
    while (more) {
      const FwdWork<kCfg>& work = shared.work[work_at.stage];
      const int count = uniform(work.count), end = uniform(work.last);
      int block = uniform(work.first);
      softmax.reset();
      clear(rO);
      const bool sees = count > consumer * 64 && block < end;
      if (sees) block = attend_blocks(work, block);
      if (count > consumer * 64) finish_rows(work);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rO));
      if (sees) release_values();
      // What others see and my rows do not, or I have none.
      for (; block < end; ++block) {
        shared.k.wait_full(k_at);
        release_keys();
        shared.v.wait_full(v_at);
        release_values();
      }
      const RingPosition<kCfg.q_stages> done = q_at;
      q_at.advance(kCfg.consumers);
      work_at.advance();
      if constexpr (kAhead) more = open();
      if (count > consumer * 64) store(work, shared_address(shared.sQ[done.stage].data));
      if constexpr (kAhead) await_scores();
      ptx::cp_async_bulk_wait_group_read();  // O has left Q's rows
      shared.q.release(done);
      if constexpr (!kAhead) {
        more = open();
        await_scores();
      }
    }
  }

  // ---- tails ----

  // Queries behind a sequence's last, which are another's: they become 0.
  TESSERA_DEVICE void clear_rows(int count) { clear_from<Q>(shared_address(shared.sQ[q_at.stage].data), count); }

  // Values behind a sequence's last key, where the tensor does not end: they may be anything and met P = 0, and become 0.
  TESSERA_DEVICE void clear_tail(int rows) {
    shared.v.wait_full(v_at);
    clear_from<V>(shared_address(shared.sV[v_at.stage].data), rows);
  }

  // Rows `first` ... of a tile: 0. By this consumer, before its own products; another that does the same writes the same.
  template <class Tile>
  TESSERA_DEVICE void clear_from(uint32 base, int first) {
    constexpr int kRowWords = Tile::kChunks * 8;  // of 16 bytes
    for (int word = first * kRowWords + static_cast<int>(not_hoisted(threadIdx.x % 128));
         word < Tile::kRows * kRowWords; word += 128) {
      ptx::st_shared_zero_16(Tile::at(base, word / kRowWords, word % kRowWords * 8));
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kCleared + consumer, 128);
  }

  // ---- epilogue ----

  // What the rows' sums give: LSE to global memory, and `factor`, by which O is to be multiplied.
  TESSERA_DEVICE void finish_rows(const FwdWork<kCfg>& work) {
    softmax.finish();
    const int count = work.count, head = work.head, row0 = consumer * 64 + warp_row();
    float scale[2] = {1.0f, 1.0f};
    if (p.sink) {
      const float sink = p.sink[p.sink_head * head] * kLog2e;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (softmax.sum[0][half] != 0.0f) scale[half] = join_sink(sink, softmax.ref[0][half], softmax.sum[0][half]);
      }
    }
    const auto& sum = softmax.sum[0];  // 0: the row saw nothing; NaN counts as seen
    if (p.lse.data) {
      // Of a row's four lanes the first stores for one row, the second for the row eight below.
      const int half = lane_col() / 2;
      const float l = half ? sum[1] : sum[0], ref = half ? softmax.ref[0][1] : softmax.ref[0][0];
      if (half < 2 && row0 + half * 8 + lane_row() < count) {
        const int64 query = static_cast<int64>(work.s.q_begin) + work.row0 + row0 + half * 8 + lane_row();
        p.lse.data[p.lse.batch * work.batch + p.lse.head * head + p.lse.row * query] =
            l != 0.0f ? (ref + ptx::lg2_approx_ftz(l)) * kLn2 : -infinity();
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = scale[half] * ptx::rcp_approx_ftz(sum[half]);
  }

  // O / l to global memory. O passes through this warp's rows of Q at `base`, which nobody needs any more: from there it is a
  // bulk copy, or where rows behind a packed sequence's last are another's, stores of whole lines.
  TESSERA_DEVICE void store(const FwdWork<kCfg>& work, uint32 base) {
    const int count = work.count, head = work.head, batch = work.batch, row0 = consumer * 64 + warp_row();
    const int64 query0 = static_cast<int64>(work.s.q_begin) + work.row0 + row0;
    const auto& sum = softmax.sum[0];
    if (__any_sync(0xffffffff, sum[0] == 0.0f || sum[1] == 0.0f)) [[unlikely]] {
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) rO[0][d][e] = sum[e / 2] == 0.0f ? 0.0f : rO[0][d][e] * factor[e / 2];
    } else {
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) rO[0][d][e] *= factor[e / 2];
    }
    const bool whole = !p.cu_seqlens_q || row0 + 16 <= count;
    constexpr int kPassCols = Q::kChunks * kChunkCols;
#pragma unroll
    for (int col0 = 0; col0 < kCfg.head_dim_v; col0 += kPassCols) {
      const int cols = col0 + kPassCols < kCfg.head_dim_v ? kPassCols : kCfg.head_dim_v - col0;
      if (col0 > 0) ptx::cp_async_bulk_wait_group_read();
      __syncwarp();  // the pass before is read
#pragma unroll
      for (int col = 0; col < cols; col += 16) {
        uint32 words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const auto& o = rO[0][(col0 + col) / 8 + t / 2];
          words[t] = pack_pair<kCfg.dtype>(o[t % 2 * 2], o[t % 2 * 2 + 1]);
        }
        ptx::stmatrix_x4(Q::at(base, warp_row() + lane_id() % 16, col + lane_id() / 16 * 8), words);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (!whole) [[unlikely]] {
        char* gO = static_cast<char*>(p.o.data) + (p.o.batch * batch + p.o.head * head + p.o.row * query0 + col0) * 2;
        for (int word = lane_id(); word < (count - row0) * cols / 8; word += 32) {
          const int row = word / (cols / 8), col = word % (cols / 8) * 8;
          if (col0 + col >= p.head_dim_v) continue;
          *reinterpret_cast<uint4*>(gO + (p.o.row * row + col) * 2) =
              ptx::ld_shared_16(Q::at(base, warp_row() + row, col));
        }
      } else if (lane_id() == 0) {
#pragma unroll
        for (int chunk = 0; chunk < cols; chunk += kChunkCols) {
          ptx::cp_async_bulk_tensor_store_4d(&p.o_map, Q::at(base, warp_row(), chunk), col0 + chunk,
                                             static_cast<int>(query0), head, p.cu_seqlens_q ? 0 : batch);
        }
        ptx::cp_async_bulk_commit_group();
      }
    }
    if (!whole) ptx::fence_proxy_async();  // the rows are read before the next queries come
  }
};

template <FwdSm90Config kCfg>
TESSERA_DEVICE void fwd_sm90(const FwdSm90Params& p) {
  static_assert(kCfg.q_stages >= kCfg.consumers);
  static_assert(kCfg.dtype != Dtype::kFloat32, "wgmma's 16-bit types");
  static_assert(kCfg.consumers == 2 || kCfg.consumers == 3, "registers are dealt for these");
  static_assert(kCfg.cluster == 1 || !kCfg.causal, "a cluster's blocks see the same keys");
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdSm90SharedMemory<kCfg>*>(shared_memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    ptx::prefetch_tensormap(&p.o_map);
    shared.q.init(4);
    shared.k.init(kCfg.consumers * 4);
    shared.v.init(kCfg.consumers * 4);
    ptx::fence_mbarrier_init();
  }
  if constexpr (kCfg.cluster > 1) {
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
  // 65536 registers: 168 a thread of three warpgroups, 128 of four, dealt anew.
  constexpr int kProducerRegisters = kCfg.consumers == 2 ? 40 : 32,
                kConsumerRegisters = kCfg.consumers == 2 ? 232 : 160;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) produce_queries<kCfg>(p, shared);
    if constexpr (kCfg.page_rows > 0) {
      if (threadIdx.x / 32 == 1) produce_pages<kCfg>(p, shared.k, shared.sK, &p.k_map);
      if (threadIdx.x / 32 == 2) produce_pages<kCfg>(p, shared.v, shared.sV, &p.v_map);
    } else {
      if (threadIdx.x == 32) produce_keys<kCfg>(p, shared.k, shared.sK, &p.k_map);
      if (threadIdx.x == 64) produce_keys<kCfg>(p, shared.v, shared.sV, &p.v_map);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Consumer<kCfg> consumer(p, shared, uniform(static_cast<int>(threadIdx.x) / 128 - 1));
    consumer.attend_works();
  }
  if constexpr (kCfg.cluster > 1) {  // the other block may still arrive at this one's barriers
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace tessera
