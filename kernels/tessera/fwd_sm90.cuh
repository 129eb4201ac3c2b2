// Forward on Hopper: O = softmax(scale Q K^T) V and LSE, FlashAttention-3's plan: TMA, wgmma and warpgroups with roles.
//
// A persistent block takes works, tiles of 64 query rows a consumer warpgroup. One producer thread fills rings of K and V
// tiles and runs ahead of the consumers, over the works' borders too. A consumer issues the product with the next tile of
// keys, S' = Q K'^T, and the one with the values of the last, O += P V, and does the softmax of S' while the second runs;
// and consumers take turns in issuing, so that the softmax of one runs under the products of the others. Where the whole
// tile is seen, no maximum is taken (core/online_softmax: optimistic); should that fail, a warp computes its scores again.
//
// Block: (consumers + 1) x 128 threads, one a multiprocessor; registers go from the producer to the consumers. Shared
// memory: FwdSm90SharedMemory. Its page, with what was measured: docs/kernels/fwd_sm90.md.
#pragma once

#include "tessera/core/online_softmax.cuh"
#include "tessera/core/pipeline.cuh"
#include "tessera/core/scheduler.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/ptx/warpgroup.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// One tile of queries of one head, and the blocks of keys [first, last) that it sees.
template <FwdSm90Config kCfg>
struct FwdWork {
  static constexpr int kBlockM = 64 * kCfg.consumers, kEnd = -1;
  int batch, head, row0, count;  // count 0: nothing to do; kEnd: nor anything afterwards
  Sequence s;
  TileRange visible;
  int first, last;

  FwdWork() = default;

  // Works of a section of heads stand together. Causal: the tiles that see the most come first, and every second round of
  // the grid goes backwards, so that all blocks get about as much.
  TESSERA_DEVICE FwdWork(const FwdSm90Params& p, int index) {
    int slot, pair;  // pair: batch * heads_q + head, packed: head
    const int pairs = p.works / p.tiles;
    if constexpr (kCfg.causal) {
      const int section = index / (p.section * p.tiles), in_section = index % (p.section * p.tiles);
      const int width = min(p.section, pairs - section * p.section);
      slot = in_section / width;
      pair = section * p.section + in_section % width;
    } else {
      slot = index % p.tiles;
      pair = index / p.tiles;
    }
    head = pair % p.heads_q, batch = pair / p.heads_q;
    int tile = slot;
    if (p.cu_seqlens_q) {
      batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, slot);
      tile -= slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, batch);
    }
    s = load_sequence(p, batch);
    row0 = ((s.sq + kBlockM - 1) / kBlockM - 1 - tile) * kBlockM;
    count = row0 < 0 ? 0 : min(s.sq - row0, kBlockM);
    visible = visible_keys(p, s, row0, row0 + max(count, 1) - 1);
    first = max(visible.some.low, 0) / kCfg.block_n;
    last = count > 0 ? (visible.some.high + kCfg.block_n) / kCfg.block_n : first;
  }

  // The end of the blocks of keys that query `row` and those before it see.
  TESSERA_DEVICE int last_of(const FwdSm90Params& p, int row) const {
    return min(last, (visible_keys(p, s, row).high + kCfg.block_n) / kCfg.block_n);
  }

  TESSERA_DEVICE static int index_of(int round) {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    return round * blocks + (kCfg.causal && round % 2 ? blocks - 1 - block : block);
  }
};

template <FwdSm90Config kCfg>
struct FwdSm90SharedMemory {
  SwizzledTile<64, kCfg.head_dim> sQ[kCfg.q_stages][kCfg.consumers];
  SwizzledTile<kCfg.block_n, kCfg.head_dim> sK[kCfg.k_stages];
  SwizzledTile<kCfg.block_n, kCfg.head_dim_v> sV[kCfg.v_stages];
  FwdWork<kCfg> work[kCfg.q_stages];  // whose Q that is
  Ring<kCfg.q_stages> q;
  Ring<kCfg.k_stages> k;
  Ring<kCfg.v_stages> v;
};

// ---- producer: one thread ----

template <class Tile>
TESSERA_DEVICE void copy_tile(Tile& sTile, const TensorMap* map, uint32 barrier, int row, int head, int batch) {
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
    ptx::cp_async_bulk_tensor_4d(shared_address(sTile.data) + chunk * Tile::kChunkBytes, map, barrier,
                                 chunk * kChunkCols, row, head, batch);
  }
}

template <FwdSm90Config kCfg>
TESSERA_DEVICE void produce(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared) {
  RingPosition<kCfg.q_stages> q_at;
  RingPosition<kCfg.k_stages> k_at;
  RingPosition<kCfg.v_stages> v_at;
  const auto publish = [&](const FwdWork<kCfg>& work, int bytes) {
    shared.q.wait_empty(q_at);
    shared.work[q_at.stage] = work;
    ptx::mbarrier_arrive_expect_tx(shared.q.full[q_at.stage].address(), bytes);
  };
  for (int round = 0; round * static_cast<int>(gridDim.x) < p.works; ++round) {
    const int index = FwdWork<kCfg>::index_of(round);
    if (index >= p.works) continue;
    const FwdWork<kCfg> work(p, index);
    if (work.count == 0) continue;
    if (work.first >= work.last) {
      publish(work, 0);
      q_at.advance();
      continue;
    }
    const int head_kv = work.head / p.group;
    const int q_batch = p.cu_seqlens_q ? 0 : work.batch, k_batch = p.cu_seqlens_k ? 0 : work.batch;
    const auto load_k = [&](int block) {
      shared.k.acquire(k_at, shared.sK[0].kBytes);
      copy_tile(shared.sK[k_at.stage], &p.k_map, shared.k.full[k_at.stage].address(),
                work.s.k_begin + block * kCfg.block_n, head_kv, k_batch);
      k_at.advance();
    };
    const auto load_v = [&](int block) {
      shared.v.acquire(v_at, shared.sV[0].kBytes);
      copy_tile(shared.sV[v_at.stage], &p.v_map, shared.v.full[v_at.stage].address(),
                work.s.k_begin + block * kCfg.block_n, head_kv, k_batch);
      v_at.advance();
    };
    publish(work, kCfg.consumers * shared.sQ[0][0].kBytes);
#pragma unroll
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      copy_tile(shared.sQ[q_at.stage][consumer], &p.q_map, shared.q.full[q_at.stage].address(),
                work.s.q_begin + work.row0 + consumer * 64, work.head, q_batch);
    }
    q_at.advance();
    // In the order in which consumers want them: from the last block of keys, K one ahead of V.
    load_k(work.last - 1);
    for (int block = work.last - 1; block > work.first; --block) {
      load_k(block - 1);
      load_v(block);
    }
    load_v(work.first);
  }
  FwdWork<kCfg> end;
  end.count = FwdWork<kCfg>::kEnd;
  publish(end, 0);
}

// ---- consumers: a warpgroup each ----

enum NamedBarrier { kTurn = 1, kTailCleared = 5 };  // kTurn + consumer: its turn to issue

template <FwdSm90Config kCfg>
struct Consumer {
  static constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim_v / 8, kSteps = kCfg.block_n / 16;
  static constexpr int kThreads = kCfg.consumers * 128;
  using Q = SwizzledTile<64, kCfg.head_dim>;
  using K = SwizzledTile<kCfg.block_n, kCfg.head_dim>;
  using V = SwizzledTile<kCfg.block_n, kCfg.head_dim_v>;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_n, false>;
  using OutputProduct = ptx::Wgmma<kCfg.dtype, kCfg.head_dim_v, true>;

  const FwdSm90Params& p;
  FwdSm90SharedMemory<kCfg>& shared;
  const int consumer;
  RingPosition<kCfg.q_stages> q_at;
  RingPosition<kCfg.k_stages> k_at;
  RingPosition<kCfg.v_stages> v_at;
  int whole_first, whole_last;  // of this work: blocks that every row sees whole
  float rS[1][kN][4], rO[1][kD][4];
  uint32 rP[kSteps][4];  // A fragments
  OnlineSoftmax<1> softmax;

  TESSERA_DEVICE Consumer(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared, int consumer)
      : p(p), shared(shared), consumer(consumer) {}

  // Of the warpgroup's 64 rows, the warp's 16.
  TESSERA_DEVICE static int warp_row() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)) * 16; }

  // Turns: a consumer issues once the others have issued since its last time. The first has the first turn.
  TESSERA_DEVICE void grant_turns(int after) {
    if constexpr (kCfg.consumers > 1) {
#pragma unroll
      for (int step = 1; step < kCfg.consumers; ++step) {
        ptx::bar_arrive(kTurn + (after + step) % kCfg.consumers, kThreads);
      }
    }
  }
  TESSERA_DEVICE void first_turns() {
#pragma unroll
    for (int other = 0; other < kCfg.consumers; ++other) {
      if (other < consumer) ptx::bar_arrive(kTurn + other, kThreads);
    }
  }
  TESSERA_DEVICE void take_turn() {
    if constexpr (kCfg.consumers > 1) ptx::bar_sync(kTurn + consumer, kThreads);
  }

  TESSERA_DEVICE void issue_scores() {
    const uint32 q = shared_address(shared.sQ[q_at.stage][consumer].data);
    const uint32 k = shared_address(shared.sK[k_at.stage].data);
#pragma unroll
    for (int d = 0; d < kCfg.head_dim; d += 16) {
      ScoreProduct::ss(flat(rS), inner_major<Q>(q, d), inner_major<K>(k, d), d > 0);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void issue_output() {
    const uint32 v = shared_address(shared.sV[v_at.stage].data);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      OutputProduct::rs(flat(rO), rP[step], outer_major<V>(v, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void pack() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pack_a<kCfg.dtype>(rP[step], rS[0], step);
  }

  // -inf for the scores of keys that a row does not see.
  TESSERA_DEVICE void hide(const FwdWork<kCfg>& work, int key0) {
    const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = work.row0 + consumer * 64 + warp_row() + half * 8 + lane / 4;
      const KeyRange keys = visible_keys(p, work.s, row);
      const int low = keys.low - key0 - lane % 4 * 2, high = keys.high - key0 - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e < low || n * 8 + e > high) rS[0][n][2 * half + e] = -infinity();
        }
    }
  }

  // Values behind a sequence's last key, which may be anything and met P = 0: they become 0. All consumers, together.
  TESSERA_DEVICE void clear_tail(int rows_seen) {
    const uint32 base = shared_address(shared.sV[v_at.stage].data);
    const int thread = consumer * 128 + static_cast<int>(not_hoisted(threadIdx.x % 128));
    for (int word = thread; word < (kCfg.block_n - rows_seen) * V::kChunks * 8; word += kThreads) {
      const int row = rows_seen + word / (V::kChunks * 8);
      const uint32 at = V::at(base, row, word % (V::kChunks * 8) * 8);
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    ptx::fence_proxy_async();
    if constexpr (kCfg.consumers > 1) {
      ptx::bar_sync(kTailCleared, kThreads);
    } else {
      ptx::bar_sync(kTailCleared, 128);
    }
  }

  TESSERA_DEVICE void release_keys() {
    shared.k.release(k_at);
    k_at.advance();
  }
  TESSERA_DEVICE void release_values() {
    shared.v.release(v_at);
    v_at.advance();
  }

  // The scores of `block` are in rS: P in rP; what runs beside it, if anything, is O += P V of the block before.
  template <bool kOutputRuns>
  TESSERA_DEVICE void softmax_of(const FwdWork<kCfg>& work, int block) {
    const bool whole = block >= whole_first && block <= whole_last, optimistic = whole && softmax.ready;
    float alpha[1][2];
    bool moves = false, fits = true;
    if (optimistic) {
      fits = softmax.template try_update<kCfg.dtype>(rS, p.scale_log2);
    } else {
      if (!whole) hide(work, block * kCfg.block_n);
      moves = softmax.move_reference(rS, p.scale_log2, alpha);
      softmax.exponentiate(rS, p.scale_log2);
    }
    if (fits) shared.k.release(k_at);
    if constexpr (kOutputRuns) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rO));
      release_values();
    }
    // Again, from the products on. Here, where the registers of the last P are free and no product is under way.
    if (!fits) {
      warp_product_abt<kCfg.dtype, Q, K>(rS, shared_address(shared.sQ[q_at.stage][consumer].data), warp_row(),
                                         shared_address(shared.sK[k_at.stage].data));
      shared.k.release(k_at);
      moves = softmax.move_reference(rS, p.scale_log2, alpha);
      softmax.exponentiate(rS, p.scale_log2);
    }
    k_at.advance();
    if (moves) softmax.rescale(alpha, rO);
    pack();
  }

  // False: there are no more works. The work lies in shared memory, and what the loop needs of it in registers.
  TESSERA_DEVICE bool attend_next() {
    shared.q.wait_full(q_at);
    const FwdWork<kCfg>& work = shared.work[q_at.stage];
    if (work.count < 0) return false;
    softmax.reset();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.live[0][half] = consumer * 64 + warp_row() + half * 8 + lane_row() < work.count;
    }
    clear(rO);
    const int first = work.first;
    // The blocks that every row sees whole.
    whole_first = (max(work.visible.all.low, 0) + kCfg.block_n - 1) / kCfg.block_n;
    whole_last = (work.visible.all.high + 1) / kCfg.block_n - 1;
    int block = work.last - 1;
    if (first <= block) {
      // Values behind a sequence's last key come as zeros only where the tensor ends there.
      const int rows_seen = work.s.sk - block * kCfg.block_n;
      if (rows_seen < kCfg.block_n && (p.cu_seqlens_k || work.s.sk != p.seqlen_k)) {
        shared.v.wait_full(v_at);
        clear_tail(rows_seen);
      }
      // Blocks that none of my rows sees, though another consumer's do: their turns pass by.
      const int my_last = max(work.last_of(p, work.row0 + consumer * 64 + 63) - 1, first);
      for (; block > my_last; --block) {
        shared.k.wait_full(k_at);
        release_keys();
        shared.v.wait_full(v_at);
        release_values();
        take_turn();
        grant_turns(consumer);
      }
      shared.k.wait_full(k_at);
      take_turn();
      ptx::wgmma_fence();
      issue_scores();
      grant_turns(consumer);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rS));
      softmax_of<false>(work, block);
      for (; block > first; --block) {
        shared.k.wait_full(k_at);
        shared.v.wait_full(v_at);
        take_turn();
        ptx::wgmma_fence();
        issue_scores();
        issue_output();
        grant_turns(consumer);
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_pin(flat(rS));
        softmax_of<true>(work, block - 1);
      }
    }
    const FwdWork<kCfg> mine = work;
    shared.q.release(q_at);
    q_at.advance();
    if (first <= block) {
      shared.v.wait_full(v_at);
      take_turn();
      ptx::wgmma_fence();
      issue_output();
      grant_turns(consumer);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rO));
      release_values();
    }
    store(mine);
    return true;
  }

  // O / l and LSE to global memory. The four lanes of a row exchange what they hold of four tiles of 8 columns, so that each
  // has the 16 bytes of one.
  TESSERA_DEVICE void store(const FwdWork<kCfg>& work) {
    softmax.finish();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = consumer * 64 + warp_row() + half * 8 + lane_row();
      const int query = work.row0 + local;
      float ref = softmax.ref[0][half], sum = softmax.sum[0][half], scale = 1.0f;
      const bool seen = sum != 0.0f;  // NaN counts as seen
      const bool mine = local < work.count;
      if (p.sink && seen) {
        const float sink = p.sink[p.sink_head * work.head] * kLog2e;
        const float joint = fmaxf(sink, ref);
        scale = ptx::ex2_approx_ftz(ref - joint);
        sum = sum * scale + ptx::ex2_approx_ftz(sink - joint);
        ref = joint;
      }
      const float factor = seen ? scale / sum : 0.0f;
      if (mine && lane_col() == 0 && p.lse.data) {
        p.lse.data[p.lse.batch * work.batch + p.lse.head * work.head + p.lse.row * (work.s.q_begin + query)] =
            seen ? (ref + log2f(sum)) * kLn2 : -infinity();
      }
      const int64 row = static_cast<int64>(work.s.q_begin) + query;
      char* gO = static_cast<char*>(p.o.data) + (p.o.batch * work.batch + p.o.row * row + p.o.head * work.head) * 2;
#pragma unroll
      for (int d0 = 0; d0 < kD; d0 += 4) {
        uint32 words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const bool there = d0 + t < kD;
          const float low = there && seen ? rO[0][there ? d0 + t : 0][2 * half] * factor : 0.0f;
          const float high = there && seen ? rO[0][there ? d0 + t : 0][2 * half + 1] * factor : 0.0f;
          words[t] = pack_pair<kCfg.dtype>(low, high);
        }
        transpose_quad(words);
        const int col = (d0 + lane_col() / 2) * 8;
        if (mine && col < p.head_dim_v) {
          *reinterpret_cast<uint4*>(gO + col * 2) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // Lane c of a quad holds word t of column-tile t: afterwards it holds the four lanes' words of column-tile c.
  TESSERA_DEVICE static void transpose_quad(uint32 (&w)[4]) {
    const bool odd = lane_id() & 1, upper = lane_id() & 2;
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      const uint32 send = odd ? w[t] : w[t + 1];
      const uint32 got = __shfl_xor_sync(0xffffffff, send, 1);
      (odd ? w[t] : w[t + 1]) = got;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32 send = upper ? w[t] : w[t + 2];
      const uint32 got = __shfl_xor_sync(0xffffffff, send, 2);
      (upper ? w[t] : w[t + 2]) = got;
    }
  }
};

template <FwdSm90Config kCfg>
TESSERA_DEVICE void fwd_sm90(const FwdSm90Params& p) {
  static_assert(kCfg.dtype != Dtype::kFloat32, "wgmma's 16-bit types");
  static_assert(kCfg.consumers == 2 || kCfg.consumers == 3, "registers are dealt for these");
  static_assert(sizeof(FwdSm90SharedMemory<kCfg>::work) + sizeof(FwdSm90SharedMemory<kCfg>::q) +
                        sizeof(FwdSm90SharedMemory<kCfg>::k) + sizeof(FwdSm90SharedMemory<kCfg>::v) <=
                    1024,
                "the host's smem_bytes() has 1 KiB for what is no tile");
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdSm90SharedMemory<kCfg>*>(shared_memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    shared.q.init(kCfg.consumers * 4);
    shared.k.init(kCfg.consumers * 4);
    shared.v.init(kCfg.consumers * 4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // 65536 registers: 168 a thread of three warpgroups, 128 of four, dealt anew.
  constexpr int kProducerRegisters = kCfg.consumers == 2 ? 40 : 32,
                kConsumerRegisters = kCfg.consumers == 2 ? 232 : 160;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) produce<kCfg>(p, shared);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    // From one lane, so that the compiler knows it for the whole warp's: descriptors then live in uniform registers.
    Consumer<kCfg> consumer(p, shared, __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128 - 1, 0));
    consumer.first_turns();
    while (consumer.attend_next()) {
    }
  }
}

}  // namespace tessera
