// Forward on Hopper: O = softmax(scale Q K^T) V and LSE, FlashAttention-3's plan: TMA, wgmma and warpgroups with roles.
//
// A persistent block takes work tiles, of 64 query rows a consumer warpgroup (fwd_sm90/work_tile), whose indices
// producer threads decode, and whose Q, K and V they bring (fwd_sm90/producers). Of two or three consumers each issues
// the scores of the next block of keys, S' = Q K'^T, and for O += P V of the last one: the exponentials of S' run under
// P V and under the products of the others, which keep no step with this one. Four take one step after the other, for
// three other warps' products are enough to run them under. After a row's first block no maximum is taken
// (attention/softmax: the stale max), unless slopes or biases may raise scores from block to block; should a sum then
// pass a bound, a warp computes its scores again.
//
// Block: (consumers + 1) x 128 threads, one a multiprocessor; registers go from the producers to the consumers. Shared
// memory: FwdSm90SharedMemory. Its page, with what was measured: docs/reference/kernels/fwd_sm90.md.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/fragment.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/fwd_sm90/producers.cuh"
#include "tessera/ptx/barrier.cuh"
#include "tessera/ptx/warpgroup.cuh"

namespace tessera {

inline constexpr int kCleared = 1;  // a barrier of each consumer: kCleared + consumer

// A lane's sum of a block against references that may be too low: above it the block is done again with the rows' maxima.
// Low, so that a key that outweighs all before becomes the reference itself, and its weight in 16 bits is exact.
inline constexpr float kStaleMaxRetryBound = 0x1p6f;

// By how much a first block's maximum is raised where a row may see few of its keys: these say little of what comes, and a
// reference that is too low costs a block twice. A power of two: the largest weight stays exact.
inline constexpr float kFewKeysLead_log2 = 4.0f;

// A warpgroup, with 64 rows of each work.
template <FwdSm90Config kCfg>
struct Consumer {
  static constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim_v / 8, kSteps = kCfg.block_n / 16;
  using Q = SwizzledTile<64, kCfg.head_dim>;
  using K = SwizzledTile<kCfg.block_n, kCfg.head_dim>;
  using V = SwizzledTile<kCfg.block_n, kCfg.head_dim_v>;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_n, false>;
  using OutputProduct = ptx::Wgmma<kCfg.dtype, kCfg.head_dim_v, true>;
  static constexpr bool kOverlaps = kCfg.consumers < 4;  // softmax runs under my own products, not the others' alone
  // S becomes P in place where a consumer's 112 registers hold no S, P and O beside each other.
  static constexpr bool kInPlace = !kOverlaps && kN * 4 + kSteps * 4 + kD * 4 > 80;
  // Bias and mask of a block are issued before its products where a consumer's registers hold them beside S, P and O, else
  // a row's at a time when they are needed.
  static constexpr int kBiasMaskRegisters =
      (kCfg.score.bias ? kN * dtype_bytes(kCfg.score.bias_dtype) : 0) + (kCfg.score.mask ? kN : 0);
  static constexpr bool kBiasMaskAhead =
      kBiasMaskRegisters <= 48 &&
      kN * 4 + kD * 4 + (kInPlace ? 0 : kSteps * 4) + kBiasMaskRegisters <= (kCfg.consumers == 2   ? 192
                                                                             : kCfg.consumers == 3 ? 128
                                                                                                   : 96);
  using Entries = BiasMaskFragment<kCfg.score, kBiasMaskAhead ? 2 : 1, kN, false>;
  // Slopes and biases may raise scores from block to block, so that each would be done again.
  static constexpr bool kStaleMax = !kCfg.score.alibi && !kCfg.score.entries();

  const FwdSm90Params& p;
  FwdSm90SharedMemory<kCfg>& shared;
  const int consumer;
  const uint32
      shared_descriptor;  // a descriptor's address of shared memory: of a tile, one addition and its index away
  RingPosition<kCfg.q_stages> q_at;
  RingPosition<FwdSm90SharedMemory<kCfg>::kWorks> work_at;
  RingPosition<kCfg.k_stages> k_at;  // whose scores are issued next
  RingPosition<kCfg.v_stages> v_at;  // whose product with P comes next
  int block = 0, last = 0, end = 1;  // whose scores come; the last of its work that my rows see; behind all of its work
  int whole_first, whole_last;       // of its work: blocks that every row sees whole
  int unseen_values = 0;             // blocks behind v_at's that others see and my rows do not
  float rS[1][kN][4], rO[1][kD][4];
  uint32 rP[kSteps][4];  // A fragments
  OnlineSoftmax<1> softmax;
  Entries entries;  // of the block whose scores come
  int tail;         // the first key of its last block behind the sequence's end, where V may be anything, else 0
  float factor[2];  // by which its rows of O are to be multiplied; below 0: the row saw nothing

  TESSERA_DEVICE Consumer(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared, int consumer)
      : p(p), shared(shared), consumer(consumer), shared_descriptor(descriptor_address(shared_address(&shared))) {
    q_at.advance(consumer);
    // No result depends on these values. But products are issued even where there is nothing to multiply yet, and a compiler
    // (NVRTC 12.8) that brings any value there between two of them serialises them all.
    clear(rS);
    clear(rO);
    ptx::wgmma_pin(flat(rS));
    ptx::wgmma_pin(flat(rO));
    if constexpr (!kInPlace) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        rP[step][0] = rP[step][1] = rP[step][2] = rP[step][3] = 0;
        ptx::wgmma_pin(rP[step]);
      }
    }
  }

  TESSERA_DEVICE void attend_tiles() {
    if constexpr (kOverlaps) {
      attend_overlapping();
    } else {
      attend_in_steps();
    }
    ptx::cp_async_bulk_wait_group_read();  // shared memory is about to be another block's
  }

  // Products, softmax, products: one step after the other, and one work after the other.
  TESSERA_DEVICE void attend_in_steps() {
    while (uniform(next_work(false))) {
      issue_scores();
      if constexpr (kBiasMaskAhead) load_bias_mask();
      wait_scores();
      attend_first();
      pack();
      clear(rO);
      if (block < last) {
        do {
          issue_output();
          ++block;
          shared.k.wait_full(k_at);
          if constexpr (kInPlace) wait_output();
          issue_scores();
          if constexpr (kBiasMaskAhead) load_bias_mask();
          wait_scores();
          if constexpr (!kInPlace) wait_output();
          attend([] {});
        } while (block < last);
        release_queries();
      }
      if (kCfg.uneven && tail > 0) clear_tail();
      issue_output();
      finish_rows(shared.work[work_at.stage()]);
      wait_output();
      for (; end - 1 > last; --end) skip_keys(), skip_values();
      store(shared.work[work_at.stage()]);
      shared.works.release(work_at);
      work_at.advance();
    }
  }

  // The blocks of all works come one behind the other. The scores of each are issued together with O += P V of the block
  // before, and become the next P meanwhile; so at a work's end run the first exponentials of the next.
  TESSERA_DEVICE void attend_overlapping() {
    int pending = 0;  // 1: P, of a work's last block, waits for its V. From one lane, for a uniform register
    while (true) {
      const auto before = work_at;
      if (pending) work_at.advance();
      const int found = uniform(next_work(pending != 0));
      if (!found && !pending) break;
      issue_scores();
      if (kCfg.uneven && pending && tail > 0) clear_tail();
      issue_output(pending);
      if (kBiasMaskAhead && found) load_bias_mask();
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_pin(flat(rS));
      if (pending) finish_rows(shared.work[before.stage()]);
      if (found) attend_first();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(rO));
      if (pending) {
        release_values();
        for (; unseen_values > 0; --unseen_values) skip_values();
        store(shared.work[before.stage()]);
        shared.works.release(before);
      }
      pending = found;
      if (!found) continue;
      pack();
      clear(rO);
      if (block == last) continue;
      do {
        ++block;
        shared.k.wait_full(k_at);
        issue_scores();
        issue_output();
        if constexpr (kBiasMaskAhead) load_bias_mask();
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_pin(flat(rS));
        attend([this] { wait_output(); });
      } while (block < last);
      release_queries();
    }
  }

  // ---- products: of whatever lies there where there is nothing to multiply, since one in a branch would serialise all ----

  // What the descriptors of a stage's tile have in common.
  template <class Tile, int kStages>
  TESSERA_DEVICE TileDescriptor descriptor(const Tile* tiles, const RingPosition<kStages>& at, uint32 high) const {
    const auto first = reinterpret_cast<const char*>(tiles) - reinterpret_cast<const char*>(&shared);
    constexpr int kStep = static_cast<int>(sizeof(Tile) / 16) / RingPosition<kStages>::kStep;
    return {shared_descriptor + static_cast<int>(first) / 16 + at.offset * kStep, high};
  }

  // S = Q K^T.
  TESSERA_DEVICE void issue_scores() {
    const TileDescriptor q = descriptor(shared.sQ, q_at, p.q_descriptor_high);
    const TileDescriptor k = descriptor(shared.sK, k_at, p.kv_descriptor_high);
    if constexpr (kInPlace) ptx::wgmma_forget(flat(rS));
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim; d += 16) {
      ScoreProduct::ss(flat(rS), inner_major<Q>(q, 0, d), inner_major<K>(k, 0, d), d > 0);
    }
    ptx::wgmma_commit_group();
  }
  // O += P V.
  TESSERA_DEVICE void issue_output(bool pending = true) {
    const TileDescriptor v = descriptor(shared.sV, v_at, p.kv_descriptor_high);
    if (pending) shared.v.wait_full(v_at);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      OutputProduct::rs(flat(rO), rP[step], outer_major<V>(v, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }
  // Waits for all products that were issued.
  TESSERA_DEVICE void wait_scores() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
  }
  TESSERA_DEVICE void wait_output() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rO));
    release_values();
  }

  // ---- which block comes ----

  // The next work in which my rows see keys, the first of them there. False: there is none any more; or it is behind works
  // that I have nothing to do with, whose V I cannot let go while P waits for an earlier one.
  TESSERA_DEVICE bool next_work(bool pending) {
    // What others see of the last work and my rows do not; likewise at the next work's first: keys_may_run_ahead.
    for (unseen_values = end - 1 - last; end - 1 > last; --end) skip_keys();
    while (true) {
      shared.q.wait_full(q_at);
      const WorkTile<kCfg>& work = shared.work[work_at.stage()];
      const int count = uniform(work.count), behind = uniform(work.last);
      if (count < 0) return false;
      int first = uniform(work.first);
      if (count > consumer * 64 && first < behind) {
        if constexpr (!kCfg.causal) {
          for (const int mine = uniform(work.first_of[consumer]); first < mine; ++first) {
            skip_keys();
            if (pending) {
              ++unseen_values;
            } else {
              skip_values();
            }
          }
          whole_first = uniform(work.whole_first_of[consumer]);
        }
        block = first, last = uniform(work.last_of[consumer]), end = behind;
        whole_last = uniform(work.whole_last_of[consumer]);
        if (kCfg.uneven && p.cu_seqlens_q && count < (consumer + 1) * 64) clear_rows(count - consumer * 64);
        shared.k.wait_full(k_at);
        return true;
      }
      if (pending) return false;
      for (; first < behind; ++first) skip_keys(), skip_values();
      if (count > consumer * 64) store_nothing(work);
      release_queries();
      shared.works.release(work_at);
      work_at.advance();
    }
  }
  TESSERA_DEVICE void skip_keys() {
    shared.k.wait_full(k_at);
    release_keys();
  }
  TESSERA_DEVICE void skip_values() {
    shared.v.wait_full(v_at);
    release_values();
  }
  TESSERA_DEVICE void release_queries() {
    shared.q.release(q_at);
    q_at.advance(kCfg.consumers);
  }
  TESSERA_DEVICE void release_keys() {
    shared.k.release(k_at);
    k_at.advance();
  }
  TESSERA_DEVICE void release_values() {
    shared.v.release(v_at);
    v_at.advance();
  }

  // ---- scores -> P ----

  // Of the warpgroup's 64 rows, the warp's 16.
  TESSERA_DEVICE static int warp_row() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)) * 16; }
  TESSERA_DEVICE static int warp_lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  // Whether some of the block's keys are before or behind those that each of my rows sees. Under a causal mask the lower edge
  // lies before all.
  TESSERA_DEVICE bool low() const { return !kCfg.causal && block < whole_first; }
  TESSERA_DEVICE bool high() const { return block > whole_last; }

  TESSERA_DEVICE int query(const WorkTile<kCfg>& work, int lane, int half) const {
    return work.row0 + consumer * 64 + warp_row() + half * 8 + lane / 4;
  }
  TESSERA_DEVICE ScoreRow<kCfg.score> score_row(int half) const {
    const WorkTile<kCfg>& work = shared.work[work_at.stage()];
    return {p, work.s, work.batch, work.head, min(query(work, warp_lane(), half), work.s.sq - 1)};
  }

  // Of a block whose keys are all there, seen or not, bias and mask are loaded for two keys at once.
  TESSERA_DEVICE bool by_pairs() const {
    return p.entry_keys > 1 && (block + 1) * kCfg.block_n <= shared.work[work_at.stage()].s.sk;
  }
  TESSERA_DEVICE void load_bias_mask() {
    if constexpr (Entries::kTaken) {
      if (!by_pairs()) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) entries.load(half, p, score_row(half), block * kCfg.block_n);
    }
  }

  // Products -> scores with every option, attention/score/score; -inf for keys that a row does not see.
  TESSERA_DEVICE void make_scores() {
    if constexpr (kCfg.score.any()) {
      const WorkTile<kCfg>& work = shared.work[work_at.stage()];
      const int key0 = block * kCfg.block_n;
      const bool pairs = !Entries::kTaken || by_pairs();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const ScoreRow<kCfg.score> row = score_row(half);
        if (pairs) {
          if constexpr (Entries::kTaken && !kBiasMaskAhead) {
            reload_memory();  // not before the other row's are used
            entries.load(0, p, row, key0);
          }
          entries.apply(rS[0], half, kBiasMaskAhead ? half : 0, p, work.s, row, key0);
        } else {
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = rS[0][n][2 * half + e];
              x = score<kCfg.score>(p, work.s, row, key0 + n * 8 + warp_lane() % 4 * 2 + e, x).value;
            }
        }
      }
    }
    hide();
  }

  // -inf at the edges of the rows' keys.
  TESSERA_DEVICE void hide() {
    const WorkTile<kCfg>& work = shared.work[work_at.stage()];
    const bool low = this->low(), high = this->high();
    if (!low && !high) return;
    const int lane = warp_lane();
    const int key0 = block * kCfg.block_n + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = visible_keys(p, work.s, query(work, lane, half));
      if (low) mask_outside(rS[0], half, keys.low - key0, kCfg.block_n);
      if (high) mask_outside(rS[0], half, 0, keys.high - key0);
    }
  }

  // A work's first scores, with the rows' maxima.
  TESSERA_DEVICE void attend_first() {
    const WorkTile<kCfg>& work = shared.work[work_at.stage()];
    const int sk = uniform(work.s.sk);
    tail = 0;
    if (kCfg.uneven && (p.cu_seqlens_k || p.seqused_k) && sk < (last + 1) * kCfg.block_n) tail = sk % kCfg.block_n;
    make_scores();
    release_keys();
    if (block == last) release_queries();
    softmax.reset();
    const float unit = score_unit<kCfg.score>(p);
    float alpha[1][2];
    softmax.move_reference(rS, unit, alpha, 0.0f);
    if (kStaleMax && low()) softmax.raise_reference(kFewKeysLead_log2);
    softmax.exponentiate(rS, unit);
  }

  // Scores become P against the references of the blocks before, without maxima. Meanwhile O += P V of the block before, which
  // mostly is there when half of the exponentials are: wait_output() is called then, and the other half runs beside the
  // rounding to P, whose registers are free by then. A warp that has no reference, or should have a new one, goes another
  // way, but all of a consumer's ask for the same products.
  template <class WaitOutput>
  TESSERA_DEVICE void attend(WaitOutput&& wait_output) {
    constexpr int kEarly = kSteps / 2 * 2;
    const float unit = score_unit<kCfg.score>(p);
    make_scores();
    if constexpr (!kStaleMax) {
      release_keys();
      float alpha[1][2];
      const bool moves = softmax.move_reference(rS, unit, alpha);
      softmax.exponentiate(rS, unit);
      wait_output();
      if (moves) softmax.rescale(alpha, rO);
      pack();
      return;
    }
    const bool stale_max = softmax.ready;
    SumParts total[1];
    if constexpr (kCfg.uneven) total[0] = {};  // a register less, of which D = 96 had none
    if (stale_max) softmax.template exponentiate_stale_max<0, kEarly>(rS, unit, total);
    wait_output();
    bool fits = false;
    if (stale_max) {
      softmax.template exponentiate_stale_max<kEarly, kN>(rS, unit, total);
      pack();
      fits = softmax.accept(total, kStaleMaxRetryBound);
    }
    if (!fits) [[unlikely]] {
      // Again, from the products on. Here, where the registers of the last P are free and no product is under way.
      if (stale_max) {
        warp_product_abt<kCfg.dtype, Q, K>(rS, shared_address(shared.sQ[q_at.stage()].data), warp_row(),
                                           shared_address(shared.sK[k_at.stage()].data));
        make_scores();
      }
      float alpha[1][2];
      const bool moves = softmax.move_reference(rS, unit, alpha, 0.0f);
      softmax.exponentiate(rS, unit);
      if (moves) softmax.rescale(alpha, rO);
      pack();
    }
    release_keys();
  }

  // P, whose sums are taken: of dropout's zeros the LSE knows nothing.
  TESSERA_DEVICE void pack() {
    if constexpr (kCfg.score.dropout) {
      const WorkTile<kCfg>& work = shared.work[work_at.stage()];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        drop(rS[0], half, p, work.batch * p.heads_q + work.head, query(work, warp_lane(), half), block * kCfg.block_n);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pack_a<kCfg.dtype>(rP[step], rS[0], step);
  }

  // ---- tails ----

  // Queries behind a sequence's last, which are another's: they become 0.
  TESSERA_DEVICE void clear_rows(int count) { clear_from<Q>(shared_address(shared.sQ[q_at.stage()].data), count); }

  // Values behind a sequence's last key, where the tensor does not end: they may be anything and met P = 0, and become 0.
  TESSERA_DEVICE void clear_tail() {
    shared.v.wait_full(v_at);
    clear_from<V>(shared_address(shared.sV[v_at.stage()].data), tail);
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

  // ---- results ----

  // What the rows' sums give: LSE to global memory, and `factor`.
  TESSERA_DEVICE void finish_rows(const WorkTile<kCfg>& work) {
    softmax.finish();
    float scale[2] = {1.0f, 1.0f};
    if (p.sink) {
      const float sink = p.sink[p.sink_head * work.head] * kLog2e;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (softmax.sum[0][half] != 0.0f) scale[half] = join_sink(sink, softmax.ref[0][half], softmax.sum[0][half]);
      }
    }
    const auto& sum = softmax.sum[0];  // 0: the row saw nothing; NaN counts as seen
    if (p.lse.data) {
      // Of a row's four lanes the first stores for one row, the second for the row eight below.
      const int lane = warp_lane(), half = lane % 4, row = consumer * 64 + warp_row() + half * 8 + lane / 4;
      const float l = half ? sum[1] : sum[0], ref = half ? softmax.ref[0][1] : softmax.ref[0][0];
      if (half < 2 && row < work.count) {
        *lse(work, row) = l != 0.0f ? (ref + ptx::lg2_approx_ftz(l)) * kLn2 : -infinity();
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kCfg.score.dropout) scale[half] *= p.dropout_scale;
      factor[half] = sum[half] == 0.0f ? -1.0f : scale[half] * ptx::rcp_approx_ftz(sum[half]);
    }
  }

  TESSERA_DEVICE float* lse(const WorkTile<kCfg>& work, int row) const {
    return p.lse.data + p.lse.batch * work.batch + p.lse.head * work.head +
           p.lse.row * (static_cast<int64>(work.s.q_begin) + work.row0 + row);
  }
  TESSERA_DEVICE char* output(const WorkTile<kCfg>& work, int row) const {
    return static_cast<char*>(p.o.data) + (p.o.batch * work.batch + p.o.head * work.head +
                                           p.o.row * (static_cast<int64>(work.s.q_begin) + work.row0 + row)) *
                                              2;
  }

  // O / l to global memory, by way of shared memory: from there it is bulk copies, or where rows behind a packed sequence's
  // last are another's, stores of whole lines.
  TESSERA_DEVICE void store(const WorkTile<kCfg>& work) {
    using Output = typename FwdSm90SharedMemory<kCfg>::Output;
    if (__any_sync(0xffffffff, factor[0] < 0.0f || factor[1] < 0.0f)) [[unlikely]] {
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) rO[0][d][e] = factor[e / 2] < 0.0f ? 0.0f : rO[0][d][e];
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[half] = factor[half] < 0.0f ? 0.0f : factor[half];  // no -0
    }
    const int row0 = consumer * 64 + warp_row(), lane = warp_lane();
    const bool whole = !kCfg.uneven || !p.cu_seqlens_q || row0 + 16 <= work.count;
    const uint32 base = shared_address(shared.sO[row0 / 16].data);
#pragma unroll
    for (int pass = 0; pass < kCfg.head_dim_v; pass += Output::kCols) {
      const int cols = min(kCfg.head_dim_v - pass, Output::kCols);
      ptx::cp_async_bulk_wait_group_read();
      __syncwarp();  // what was there is read
#pragma unroll
      for (int col = 0; col < cols; col += 16) {
        uint32 words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const auto& o = rO[0][(pass + col) / 8 + t / 2];
          const float l = factor[t % 2];
          words[t] = pack_pair<kCfg.dtype>(o[t % 2 * 2] * l, o[t % 2 * 2 + 1] * l);
        }
        ptx::stmatrix_x4(Output::at(base, lane % 16, col + lane / 16 * 8), words);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (!whole) [[unlikely]] {
        for (int word = lane; word < (work.count - row0) * cols / 8; word += 32) {
          const int row = word / (cols / 8), col = word % (cols / 8) * 8;
          if (pass + col >= p.head_dim_v) continue;
          *reinterpret_cast<uint4*>(output(work, row0 + row) + (pass + col) * 2) =
              ptx::ld_shared_16(Output::at(base, row, col));
        }
      } else if (lane == 0) {
#pragma unroll
        for (int col = 0; col < cols; col += kChunkCols) {
          ptx::cp_async_bulk_tensor_store_4d(&p.o_map, Output::at(base, 0, col), pass + col,
                                             work.s.q_begin + work.row0 + row0, work.head, work.q_batch(p));
        }
        ptx::cp_async_bulk_commit_group();
      }
    }
  }

  // Rows that see no key: 0 and -inf.
  TESSERA_DEVICE void store_nothing(const WorkTile<kCfg>& work) {
    const int row0 = consumer * 64 + warp_row(), words = p.head_dim_v / 8;
    const int count = min(work.count - row0, 16);
    for (int word = lane_id(); word < count * words; word += 32) {
      *reinterpret_cast<uint4*>(output(work, row0 + word / words) + word % words * 16) = make_uint4(0, 0, 0, 0);
    }
    if (p.lse.data && lane_id() < count) *lse(work, row0 + lane_id()) = -infinity();
  }
};

template <FwdSm90Config kCfg>
TESSERA_DEVICE void fwd_sm90(const FwdSm90Params& p) {
  static_assert(kCfg.q_stages >= kCfg.consumers);
  static_assert(keys_may_run_ahead(kCfg.consumers, kCfg.block_n, kCfg.k_stages, kCfg.v_stages));
  static_assert(kCfg.dtype != Dtype::kFloat32, "wgmma's 16-bit types");
  static_assert(kCfg.consumers >= 2 && kCfg.consumers <= 4, "registers are dealt for these");
  static_assert(kCfg.cluster == 1 || !kCfg.causal, "a cluster's blocks see the same keys");
  static_assert(!kCfg.score.block_mask, "of entries, those of single keys");
  static_assert(!kCfg.score.dropout || kCfg.block_n % 32 == 0, "a call of Philox decides 32 keys");
  static_assert(kCfg.uneven || kCfg.page_rows == 0, "a sequence uses as many keys of its pages as seqused_k says");
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdSm90SharedMemory<kCfg>*>(shared_memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    ptx::prefetch_tensormap(&p.o_map);
    shared.works.init(3 + kCfg.consumers * 4);
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
  // 65536 registers: 168 a thread of three warpgroups, 128 of four, 96 of five, dealt anew.
  constexpr int kProducerRegisters = kCfg.consumers == 2 ? 40 : 32, kConsumerRegisters = kCfg.consumers == 2   ? 232
                                                                                         : kCfg.consumers == 3 ? 160
                                                                                                               : 112;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) produce_queries<kCfg>(p, shared);
    if (threadIdx.x == 96) produce_works<kCfg>(p, shared);
    if constexpr (kCfg.page_rows > 0) {
      if (threadIdx.x / 32 == 1) produce_pages<kCfg>(p, shared, shared.k, shared.sK, &p.k_map);
      if (threadIdx.x / 32 == 2) produce_pages<kCfg>(p, shared, shared.v, shared.sV, &p.v_map);
    } else {
      if (threadIdx.x == 32) produce_keys<kCfg>(p, shared, shared.k, shared.sK, &p.k_map);
      if (threadIdx.x == 64) produce_keys<kCfg>(p, shared, shared.v, shared.sV, &p.v_map);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    if (kCfg.uneven && p.cu_seqlens_q) {  // while the first tiles are on their way
      constexpr int kWarps = kCfg.consumers * 4;
      const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32 - 4;
      clear_unowned_outputs<kCfg.dtype>(p, warp, static_cast<int64>(gridDim.x) * kWarps);
    }
    Consumer<kCfg> consumer(p, shared, uniform(static_cast<int>(threadIdx.x) / 128 - 1));
    consumer.attend_tiles();
  }
  if constexpr (kCfg.cluster > 1) {  // the other block may still arrive at this one's barriers
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace tessera
