// The form of bwd_sm90 for heads of at most kBwdWholeHeadRows queries and keys at head size 64: a block has a head and
// passes over its key tiles. dQ of the head stays in shared memory in float32, where each thread adds what it made
// itself, so there is nothing to clear, to add in global memory or to convert, and all sums have a fixed order.
//
// Roles: a producer thread and two score warpgroups of 64 keys, which make dQ as well, 64 queries each. dQ is made one
// step late, under the next step's exponentials, so one place for dS is enough. dS and P are computed as in
// ScoreWarpgroup. V is in registers and comes by way of dO's place, for the next key tile while the results of this one
// are stored, so that the next dO is loaded then, too.
//
// A step of a warpgroup, with what is in flight:
//
//   issue dQ of the step before | P = exp2(S - LSE)
//   wait for dQ, release dS, issue dP | keep dQ
//   wait for dP                       | dS = P o (dP - delta)
//   issue dV                          | dS to shared memory
//   issue dK                          | store dQ if it is complete
//   wait for dV, release dO
//   issue S of the next step          | what the next step reads from shared memory
//   wait for both, release Q
#pragma once

#include "tessera/bwd_sm90/loads.cuh"
#include "tessera/bwd_sm90/scores.cuh"

namespace tessera {

// In the lowest bits of a step's first query: the key tile is the first, or the last, that some of its queries see.
inline constexpr int kFirstKeys = 1, kLastKeys = 2;

// One thread, which loads the tiles of all key tiles in the order in which they are used.
template <BwdSm90Config kCfg>
struct WholeHeadProducer {
  using Shared = BwdSm90Shared<kCfg>;

  const BwdSm90Params& p;
  const Shared& shared;
  struct {
    RingPosition<kCfg.stages> q;
    RingPosition<1> d_o, k;
  } rings = {};

  template <class Tile>
  TESSERA_DEVICE void load(int offset, const TensorMap* map, uint32 full, int row, int head, int batch,
                           int extra_bytes = 0) const {
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes + extra_bytes);
    copy_tile<Tile>(shared.base + offset, map, full, row, head, batch);
  }
  TESSERA_DEVICE void load_query_tile(const KeyBlock& b, int row0) const {
    const int slot = b.head_kv * p.q_slots + b.slot0 + row0 / kCfg.block_m;
    const KeyRange keys = visible_keys<kCfg.score>(p, b.s, row0, min(row0 + kCfg.block_m, b.s.sq) - 1).some;
    const int tile = b.key0 / kCfg.block_n;
    const int flags =
        (keys.low / kCfg.block_n == tile ? kFirstKeys : 0) + (keys.high / kCfg.block_n == tile ? kLastKeys : 0);
    shared.wait_empty(Shared::kQ, rings.q);
    ptx::st_shared_s32x2(shared.step(rings.q), slot, row0 | flags);
    const uint32 full = shared.full(Shared::kQ, rings.q);
    const uint32 stats = shared.tile(Shared::kAt.stats, 2 * Shared::kStatBytes, rings.q);
    const int64 first = static_cast<int64>(slot) * kCfg.block_m;
    const uint32 to = shared.tile(Shared::kAt.q, Shared::Queries::kBytes, rings.q);
    load<typename Shared::Queries>(static_cast<int>(to - shared.base), &p.q_map, full, row0, b.head_kv, b.batch,
                                   2 * Shared::kStatBytes);
    ptx::cp_async_bulk_load(stats, p.row_lse_log2 + first, Shared::kStatBytes, full);
    ptx::cp_async_bulk_load(stats + Shared::kStatBytes, p.row_delta + first, Shared::kStatBytes, full);
  }

  TESSERA_DEVICE void run(const KeyBlock* blocks) {
    ptx::griddepcontrol_wait();  // the previous kernel computes LSE and delta
#pragma unroll 1
    for (int n = 0; n < p.key_tiles; ++n) {
      const KeyBlock& b = blocks[n];
#pragma unroll 1
      for (int step = 0; step < b.steps; ++step) {
        const int row0 = (b.first_tile + step) * kCfg.block_m;
        if (step == 0) {
          // K last: its place is the last that the key tile before leaves.
          shared.wait_empty(Shared::kDO, rings.d_o);
          load<typename Shared::Values>(Shared::kAt.d_o, &p.v_map, shared.full(Shared::kDO, rings.d_o), b.key0,
                                        b.head_kv, b.batch);
          rings.d_o.advance();
          load_query_tile(b, row0);
          ptx::mbarrier_wait_parity(shared.k_empty(), rings.k.parity ^ 1);
          load<typename Shared::Keys>(Shared::kAt.k, &p.k_map, shared.k_full(), b.key0, b.head_kv, b.batch);
          rings.k.advance();
        } else {
          load_query_tile(b, row0);
        }
        rings.q.advance();
        shared.wait_empty(Shared::kDO, rings.d_o);
        load<typename Shared::OutputGradients>(Shared::kAt.d_o, &p.d_o_map, shared.full(Shared::kDO, rings.d_o), row0,
                                               b.head_kv, b.batch);
        rings.d_o.advance();
      }
    }
  }
};

// Stores `factor` times 32 columns, from `first_col` on, of a warp's accumulators of 16 rows, of which `rows` exist.
// With `zero` it stores 0 instead, in the lane's rows lane / 4 and 8 more. A quad exchanges its elements, so that each
// lane stores 16 bytes.
template <Dtype kDtype>
TESSERA_DEVICE void store_registers(unsigned short* to, int64 row_step, int rows, int first_col, int columns,
                                    bool aligned, const float (&acc)[4][4], float factor, const bool (&zero)[2]) {
  const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32)), quarter = lane % 4;
  const bool odd = quarter % 2 != 0, high = quarter >= 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    uint32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = zero[half] ? 0 : pack_pair<kDtype>(acc[i][2 * half] * factor, acc[i][2 * half + 1] * factor);
    }
    // A lane has word `quarter` of the 16 bytes of every a[i], and gets all words of a[quarter].
    const uint32 x = __shfl_xor_sync(0xffffffff, odd ? a[0] : a[1], 1);
    const uint32 y = __shfl_xor_sync(0xffffffff, odd ? a[2] : a[3], 1);
    const uint32 b[4] = {odd ? x : a[0], odd ? a[1] : x, odd ? y : a[2], odd ? a[3] : y};
    const uint32 s = __shfl_xor_sync(0xffffffff, high ? b[0] : b[2], 2);
    const uint32 t = __shfl_xor_sync(0xffffffff, high ? b[1] : b[3], 2);
    const uint32 words[4] = {high ? s : b[0], high ? t : b[1], high ? b[2] : s, high ? b[3] : t};
    const int col = first_col + quarter * 8;
    if (row >= rows || col >= columns) continue;
    unsigned short* const at = to + row * row_step + col;
    if (aligned && col + 8 <= columns) {
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (col + e < columns) at[e] = static_cast<unsigned short>(words[e / 2] >> (e % 2 * 16));
    }
  }
}

// A score warpgroup at one key tile.
template <BwdSm90Config kCfg>
struct WholeHeadWarpgroup : ScoreWarpgroup<kCfg> {
  using Base = ScoreWarpgroup<kCfg>;
  using Base::at, Base::block, Base::p, Base::shared, Base::warpgroup;
  using Base::kM, Base::kSteps, Base::lane, Base::rdK, Base::rdS, Base::rdV, Base::rP, Base::rS, Base::warp_key;
  using typename Base::Gradients;
  using typename Base::KeyGradientProduct;
  using typename Base::Keys;
  using typename Base::OutputGradients;
  using typename Base::Queries;
  using typename Base::ScoreProduct;
  using typename Base::Shared;
  using typename Base::ValueGradientProduct;
  using typename Base::Values;
  using DqProduct = ptx::Wgmma<kCfg.dtype, kCfg.head_dim, true>;

  static_assert(kCfg.head_dim == 64 && kCfg.block_m == 128 && kCfg.stages == 2 && kCfg.ds_stages == 1, "the tile");
  static_assert(!kCfg.varlen && !kCfg.deterministic && !kCfg.alternate && !kCfg.d_bias && !kCfg.block_mask &&
                    !kCfg.split_group && !kCfg.sums && !kCfg.score.any() && !kCfg.score.program,
                "BwdSm90Config");

  using ValueFragments = uint32[kCfg.head_dim / 16][4];  // A fragments of this warpgroup's 64 rows of V

  ValueFragments& rV;  // outlives the key tile
  float rdQ[1][kCfg.head_dim / 8][4];
  // Of the next step and of the step before: the first query and flags.
  int word, word_before = 0;
  const int key_parity;  // of K's barriers
  Shared& own;           // `shared`, whose addresses are read anew in each step, so that none made of them is kept

  // position: of the block's first step at this key tile.
  TESSERA_DEVICE WholeHeadWarpgroup(const BwdSm90Params& p, Shared& shared, const KeyBlock& block, int warpgroup,
                                    const RingPosition<kCfg.stages>& position, int key_parity, ValueFragments& values)
      : Base(p, shared, block, warpgroup), rV(values), key_parity(key_parity), own(shared) {
    at = position;
  }
  TESSERA_DEVICE void forget_addresses() {
    own.base = not_hoisted(own.base), own.descriptor = not_hoisted(own.descriptor);
  }

  // Positions in the rings of one stage. Q has two: the stage of `at` is the parity of the block's steps. dO's place is
  // loaded once a step and once a key tile, with V first.
  TESSERA_DEVICE static RingPosition<1> single(int parity) {
    RingPosition<1> position;
    position.parity = parity;
    return position;
  }
  TESSERA_DEVICE RingPosition<1> d_o_at() const { return single(at.stage() ^ key_parity ^ 1); }
  TESSERA_DEVICE RingPosition<1> d_s_at() const { return single(at.stage()); }
  TESSERA_DEVICE RingPosition<1> d_s_before() const { return single(at.stage() ^ 1); }

  // The key tile has at least one step. first: no key tile before it has one; more: a key tile after it has one.
  TESSERA_DEVICE void run(bool first, bool more) {
    const int steps = uniform(block.steps);
    forget_addresses();
    if (first) load_values(key_parity);
    ptx::mbarrier_wait_parity(shared.k_full(), key_parity);
    issue_next_scores();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
    step<true>(steps == 1);
#pragma unroll 1
    for (int left = steps - 1; left > 0; --left) step<false>(left == 1);
    issue_dq();
    store_key_rows(p.d_v, p.head_dim_v, rdV, kBwdLower);
    finish_dq();
    Shared::arrive_warp(shared.k_empty());
    keep_dq_part();
    if (more) load_values(key_parity ^ 1);
    store_dq_part();
    store_key_rows(p.d_k, p.head_dim, rdK, p.scale * bwd_lower_late(kCfg.dtype));
  }
  // For a key tile that no query sees.
  TESSERA_DEVICE void run_unseen() const {
    store_key_rows(p.d_v, p.head_dim_v, rdV, kBwdLower);
    store_key_rows(p.d_k, p.head_dim, rdK, p.scale * bwd_lower_late(kCfg.dtype));
  }

  template <bool kFirst>
  TESSERA_DEVICE void step(bool last) {
    forget_addresses();
    const bool far = is_far(this->lse(0).x);
    if (far) [[unlikely]]  // before dQ's product, whose accumulators leave no registers for it
      this->far_exponents(score_unit<kCfg.score>(p));
    if constexpr (!kFirst) issue_dq();
    if (!far) {
      if (this->masked()) {
        this->template exponents<true>(score_unit<kCfg.score>(p).log2);
      } else {
        this->template exponents<false>(score_unit<kCfg.score>(p).log2);
      }
    }
    this->weights();
    forget_addresses();
    shared.wait_full(Shared::kDO, d_o_at());
    if constexpr (!kFirst) finish_dq();
    issue_probability_gradients();
    if constexpr (!kFirst) keep_dq_part();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
    const typename Base::Step::NoProgram none;
    // This branch is always taken: without it the compiler would load all rows' delta at once.
    this->template score_gradients<0, kM / 2>(none);
    if (word >= 0) this->template score_gradients<kM / 2, kM / 2>(none);
    if (this->masked()) this->clear_hidden();
    forget_addresses();
    issue_value_gradients();
    shared.wait_empty(Shared::kDS, d_s_at());
    hand_on_gradients<Gradients>(shared.base + Shared::kAt.d_s, warpgroup * 64 + warp_key(), rdS);
    Shared::arrive_warp(shared.full(Shared::kDS, d_s_at()));
    issue_key_gradients();
    forget_addresses();
    if constexpr (!kFirst) store_dq_part();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(flat(rdV));
    Shared::arrive_warp(shared.empty(Shared::kDO, d_o_at()));
    at.advance();
    word_before = word;
    if (last) {
      ptx::wgmma_wait_group<0>();
    } else {
      issue_next_scores();
      ptx::wgmma_wait_group<0>();  // S is not in flight over a branch, which would serialise all products
      ptx::wgmma_pin(flat(rS));
    }
    ptx::wgmma_pin(flat(rdK));
    RingPosition<kCfg.stages> before = at;
    before.offset ^= before.kStep;
    Shared::arrive_warp(shared.empty(Shared::kQ, before));
  }

  // ---- products ----

  // V of the key tile whose K has that parity and whose first step is at `at`.
  TESSERA_DEVICE void load_values(int parity) {
    const RingPosition<1> values_at = single(at.stage() ^ parity);
    shared.wait_full(Shared::kDO, values_at);
#pragma unroll
    for (int k = 0; k < kCfg.head_dim / 16; ++k) {
      ptx::ldmatrix_x4(rV[k], Values::at(shared.base + Shared::kAt.d_o, warpgroup * 64 + warp_key() + lane() % 16,
                                         k * 16 + lane() / 16 * 8));
    }
    Shared::arrive_warp(shared.empty(Shared::kDO, values_at));
  }
  // S of the step at `at`, once its Q is there, and under it what the step reads from shared memory before its
  // exponentials.
  TESSERA_DEVICE void issue_next_scores() {
    shared.wait_full(Shared::kQ, at);
    this->issue_scores();
    word = this->step_word();
  }
  // dP^T = V dO^T.
  TESSERA_DEVICE void issue_probability_gradients() {
    const TileDescriptor d_o = shared.keys(Shared::kAt.d_o);
    const int none = static_cast<int>(not_hoisted(0));  // as in ScoreWarpgroup
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim; d += 16) {
      ScoreProduct::rs(flat(rS), rV[d / 16], inner_major<OutputGradients>(d_o, 0, d), d > 0 ? 1 : none);
    }
    ptx::wgmma_commit_group();
  }
  // dV += P^T dO.
  TESSERA_DEVICE void issue_value_gradients() {
    const TileDescriptor d_o = shared.keys(Shared::kAt.d_o);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ValueGradientProduct::rs(flat(rdV), rP[step], outer_major<OutputGradients>(d_o, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }
  // dK += dS^T Q.
  TESSERA_DEVICE void issue_key_gradients() {
    const TileDescriptor q = shared.tile_descriptor(Shared::kAt.q, Queries::kBytes, at);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      KeyGradientProduct::rs(flat(rdK), rdS[step], outer_major<Queries>(q, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }

  // ---- dQ of the step before ----

  // Where the thread keeps its part of it.
  TESSERA_DEVICE uint32 dq_part() const {
    const uint32 part = (word_before / kCfg.block_m * 2 + warpgroup) * 4 + warp_key() / 16;
    return shared.base + Shared::kAt.dq + part * (16 * kCfg.head_dim * 4) + lane() * 16;
  }
  template <int kN>
  TESSERA_DEVICE static void take_dq_part(float (&acc)[kN][4], uint32 part) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float4 x = ptx::ld_shared_f32x4(part + n * 512);
      acc[n][0] = x.x, acc[n][1] = x.y, acc[n][2] = x.z, acc[n][3] = x.w;
    }
  }
  TESSERA_DEVICE void issue_dq() {
    if (word_before & kFirstKeys) {
      clear(rdQ);
    } else {
      take_dq_part(rdQ[0], dq_part());
    }
    shared.wait_full(Shared::kDS, d_s_before());
    TileDescriptor d_s = shared.keys(Shared::kAt.d_s);
    d_s.address += warpgroup * (64 * kChunkRowBytes / 16);
    const TileDescriptor k = shared.keys(Shared::kAt.k);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < kCfg.block_n; key += 16) {
      DqProduct::ss(flat(rdQ), inner_major<Gradients>(d_s, 0, key), outer_major<Keys>(k, key), 1);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void finish_dq() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rdQ));
    Shared::arrive_warp(shared.empty(Shared::kDS, d_s_before()));
  }
  TESSERA_DEVICE void keep_dq_part() const { stage_dq_part(dq_part(), rdQ, 0); }
  // Stores dQ from what the thread keeps if no later key tile adds to it: under products that leave registers for it.
  TESSERA_DEVICE void store_dq_part() const {
    if (!(word_before & kLastKeys)) return;
    const int first = warpgroup * 64 + warp_key(), row = (word_before & -kCfg.block_m) + first;
    const int slot = block.head_kv * p.q_slots + block.slot0;  // of the head's first query tile
    const float* lse = p.row_lse_log2 + static_cast<int64>(slot) * kCfg.block_m + row + lane() / 4;
    // dQ of a query that sees nothing is 0: its products may be NaN.
    const bool zero[2] = {!row_sees(lse[0]), !row_sees(lse[8])};
    const int64 to = p.d_q.batch * block.batch + p.d_q.row * row + p.d_q.head * block.head_kv;
    const uint32 part = dq_part();
#pragma unroll 1
    for (int col = 0; col < kCfg.head_dim; col += 32) {
      float acc[4][4];
      take_dq_part(acc, part + col / 8 * 512);
      store_registers<kCfg.dtype>(static_cast<unsigned short*>(p.d_q.data) + to, p.d_q.row, block.s.sq - row, col,
                                  p.head_dim, p.d_q_aligned, acc, p.scale * bwd_lower_late(kCfg.dtype), zero);
    }
  }

  // ---- dK and dV ----

  TESSERA_DEVICE void store_key_rows(const RowTensor& to, int columns, const float (&acc)[1][kCfg.head_dim / 8][4],
                                     float factor) const {
    const int key = block.key0 + warpgroup * 64 + warp_key();
    const int64 first = to.batch * block.batch + to.row * key + to.head * block.head_kv;
    constexpr bool kNone[2] = {};
#pragma unroll
    for (int col = 0; col < kCfg.head_dim; col += 32) {
      const float(&part)[4][4] = reinterpret_cast<const float(&)[4][4]>(acc[0][col / 8]);
      store_registers<kCfg.dtype>(static_cast<unsigned short*>(to.data) + first, to.row, block.s.sk - key, col, columns,
                                  true, part, factor, kNone);
    }
  }
};

// The first key tile from n on that some query sees; `key_tiles` if there is none.
TESSERA_DEVICE int next_seen(const KeyBlock* blocks, int n, int key_tiles) {
  while (n < key_tiles && blocks[n].steps == 0) ++n;
  return uniform(n);
}

// A block with all of its roles, after its barriers are initialised.
template <BwdSm90Config kCfg>
TESSERA_DEVICE void run_whole_head(const BwdSm90Params& p, const BwdSm90Shared<kCfg>& shared, KeyBlock* blocks) {
  const int key_tiles = p.key_tiles, thread = static_cast<int>(threadIdx.x) - 32;
  if (thread >= 0 && thread < key_tiles) {
    blocks[thread] = key_block<kCfg>(p, static_cast<int>(blockIdx.x) * key_tiles + thread);
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kBwdWholeHeadRegisters.producer>();
    if (threadIdx.x == 0) WholeHeadProducer<kCfg>{p, shared}.run(blocks);
    return;
  }
  ptx::setmaxnreg_inc<kBwdWholeHeadRegisters.scores>();
  ptx::griddepcontrol_wait();  // the previous kernel computes LSE
  BwdSm90Shared<kCfg> own = shared;
  RingPosition<kCfg.stages> at;
  int key_parity = 0;
  typename WholeHeadWarpgroup<kCfg>::ValueFragments values;
  const int first_seen = next_seen(blocks, 0, key_tiles);
  int seen = first_seen;
#pragma unroll 1
  for (int n = 0; n < key_tiles; ++n) {
    WholeHeadWarpgroup<kCfg> tile(p, own, blocks[n], warpgroup - 1, at, key_parity, values);
    if (n != seen) {
      tile.run_unseen();
      continue;
    }
    seen = next_seen(blocks, n + 1, key_tiles);
    tile.run(n == first_seen, seen < key_tiles);
    at = tile.at, key_parity ^= 1;
  }
}

}  // namespace tessera
