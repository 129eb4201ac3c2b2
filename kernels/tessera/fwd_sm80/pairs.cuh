// Forward as fwd_sm80/kernel.cuh, for head sizes whose outputs leave a warp room for 16 query rows only: two warps, a
// pair, share 32 rows. Of S = Q K^T each computes half of the tile's keys, of O += P V half of O's columns, so that a
// fragment of K or V from shared memory serves 32 rows. P, rounded to the product's type, goes through shared memory.
//
// A loop of its own because it is software-pipelined, with one barrier a tile: S of the next tile is computed before P
// V of this one, and its exponentials, against the stale max (attention/softmax), stand between the products of P V. No
// options: they need the registers.
//
// Grid: persistent blocks (fwd_sm80/scheduler), one a multiprocessor: alone there, no other block would cover a work
// tile's first loads, so those of the next one are issued under this one's last product. Block: as
// fwd_sm80/kernel.cuh's. Shared memory: FwdPairsSharedMemory. Its page: docs/reference/kernels/fwd_sm80.md.
#pragma once

#include "tessera/fwd_sm80/bulk_copies.cuh"
#include "tessera/fwd_sm80/epilogue.cuh"
#include "tessera/fwd_sm80/loads.cuh"
#include "tessera/fwd_sm80/scheduler.cuh"
#include "tessera/fwd_sm80/score_stage.cuh"
#include "tessera/ptx/barrier.cuh"
#include "tessera/tile/copy_tile.cuh"
#include "tessera/tile/product_shared.cuh"

namespace tessera {

// Where the compiler finds registers for a work tile's end, which every tile of keys reads (with the other bounds, on
// sm_90 4 to 7 % faster than from shared memory), and for the addresses of loads beside a product.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr bool kRegistersLeft = false;
#else
inline constexpr bool kRegistersLeft = true;
#endif

template <FwdConfig kCfg>
struct FwdPairsSharedMemory {
  static_assert(kCfg.block_m <= kCfg.stages * kCfg.block_n, "O fits into V's place");
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ;
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim> sK[kCfg.stages];
  union {
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v> sV[kCfg.stages];
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sO;  // after the last P V, while the next Q and K arrive
  };
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.block_n> sP;
  Barrier k_full[kCfg.stages], v_full[kCfg.stages];  // of bulk copies
  float row_stat[2][kCfg.block_m];                   // a row's maximum, at the end its sum, over either warp's keys
  FwdBlock<kCfg> work[2];                            // this work tile and the next
  static_assert(sizeof(work) == 2 * kFwdBlockBytes);
};

// Keys first ... of K or V, columns col ..., into a tile by a bulk copy if the tile is whole; if not, the caller loads
// it.
template <FwdConfig kCfg, class Tile>
TESSERA_DEVICE bool copy_whole_keys(Tile& sTile, const Barrier& full, const FwdBulkParams& p, const TensorMap& map,
                                    const FwdBlock<kCfg>& b, int first, int col) {
  const bool whole = first + kCfg.block_n <= b.s.sk;
  if (threadIdx.x == 0) {
    if (whole) {
      copy_keys(sTile, full, p, map, b, first, col);
    } else {
      ptx::mbarrier_arrive(full.address());
    }
  }
  return whole;
}

// The loads of an iteration: K of the tile after the next, V of the next. All at once they would delay the first
// fragments of the scores, so where both tiles are full they are issued one at a time between the products of S.
template <FwdConfig kCfg>
struct KeyLoads {
  using KTile = SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim>;
  using VTile = SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v>;
  static constexpr int kThreads = kCfg.warps * 32, kBytes = dtype_bytes(kCfg.dtype);
  static constexpr int kFragments = kCfg.head_dim / 16 * (kCfg.block_n / 32);  // of S
  StridedLoads<kThreads, KTile> k;
  StridedLoads<kThreads, VTile> v;
  static constexpr int kKCount = decltype(k)::kCount, kVCount = decltype(v)::kCount;
  static constexpr int kEvery = kFragments / (kKCount + kVCount);  // fragments a load
  static constexpr bool kPossible = kRegistersLeft && kCfg.aligned && !kCfg.paged && !kCfg.bulk &&
                                    decltype(k)::kPossible && decltype(v)::kPossible && kEvery > 0;
  int end;  // of the tiles at which both are full

  // Of a work tile: from its first iteration's on.
  TESSERA_DEVICE KeyLoads(const FwdParams& p, const FwdBlock<kCfg>& b)
      : k(key_rows(p, p.k, b, (b.first + 2) * kCfg.block_n, 0), p.k.row * kBytes),
        v(key_rows(p, p.v, b, (b.first + 1) * kCfg.block_n, b.dv_begin), p.v.row * kBytes),
        end(kPossible && p.head_dim == kCfg.head_dim && b.dv_count == kCfg.head_dim_v
                ? min(b.last, b.s.sk / kCfg.block_n) - 2
                : 0) {}

  // After the products of the i-th fragment of S.
  TESSERA_DEVICE void beside(int i, FwdPairsSharedMemory<kCfg>& shared, int stage, const FwdParams& p) {
    if constexpr (kPossible) {
      if (i % kEvery != 0) return;
      const int load = i / kEvery;
      if (load < kKCount) {
        k.load(shared.sK[stage], load, p.k.row * kBytes);
      } else if (load < kKCount + kVCount) {
        v.load(shared.sV[stage ^ 1], load - kKCount, p.v.row * kBytes);
      }
    }
  }
};

// A warp of a pair: its rows, its part of their work, and what it holds of them in registers.
template <FwdConfig kCfg>
struct PairWarp {
  static constexpr int kM = 2, kRows = kM * 16;               // rows of the pair
  static constexpr int kN = kCfg.block_n / 16;                // tiles of 8 keys, of the warp
  static constexpr int kD = (kCfg.head_dim_v + 31) / 32 * 2;  // tiles of 8 columns, of the warp
  static constexpr int kSteps = kCfg.block_n / 16;            // of 16 keys, of P V
  static constexpr int kFragments = kSteps * (kD / 2);        // of V
  static constexpr int kScores = kM * kN * 4;                 // of a lane

  const FwdParams& p;
  const FwdBlock<kCfg>& b;  // in shared memory
  FwdPairsSharedMemory<kCfg>& shared;
  const int b_last;         // a copy of what every tile reads
  int part, row, key, col;  // 0 or 1; the pair's first row in the block; the warp's first key and column of a tile
  int last_key;             // that a row of the pair sees
  KeyRange all;             // keys that all of them see
  int my_read, partner_read, together;  // barriers: the warp has read P, for its partner warp; the pair
  float rO[kM][kD][4], rS[kM][kN][4];
  OnlineSoftmax<kM> softmax;
  // Of the last tile: whether its exponentials are against the stale max; whether this warp's sum passed the bound; the
  // sums before it. A pair's first tile counts as one that has failed.
  bool stale_max, failed = true;
  float sum_before[kM][2] = {};

  TESSERA_DEVICE PairWarp(const FwdParams& p, const FwdBlock<kCfg>& b, FwdPairsSharedMemory<kCfg>& shared)
      : p(p), b(b), shared(shared), b_last(b.last) {
    const int warp = static_cast<int>(threadIdx.x) / 32, pair = warp / 2;
    part = warp % 2;
    row = pair * kRows, key = part * (kN * 8), col = part * (kD * 8);
    const TileRange seen = b.seen_by(p, row, kRows);
    all = seen.all;
    last_key = row < b.count && b.first < b.last ? seen.some.high : -1;
    my_read = 1 + warp, partner_read = 1 + (warp ^ 1), together = 1 + kCfg.warps + pair;
    stale_max = sees(b.first);
    clear(rO);
  }

  // The end of the block's tiles.
  TESSERA_DEVICE int last() const { return kRegistersLeft ? b_last : b.last; }
  // Some row of the pair sees some key of the tile, as far as keys after the last are concerned.
  TESSERA_DEVICE bool sees(int tile) const { return tile * kCfg.block_n <= last_key; }

  // -inf for the scores of keys that a row does not see.
  TESSERA_DEVICE void mask(int tile) {
    const int key0 = tile * kCfg.block_n;
    if (!all.holds(key0, kCfg.block_n)) apply_mask<kCfg>(rS, p, b, b.row0 + row, key0 + key);
  }

  // S = Q K^T, with beside(i) after the products of the i-th fragment of K.
  template <class Beside>
  TESSERA_DEVICE void scores(int stage, Beside&& beside) {
    clear(rS);
    product_abt(rS, shared.sQ, row, shared.sK[stage], key, beside);
  }

  // Scores to P with the maximum over both warps' keys. O is that of all tiles before.
  TESSERA_DEVICE void update(int tile) {
    mask(tile);
    float best[kM][1][4], alpha[kM][2];
    for_rows([&](int m, int half, int local) {
      float x = -infinity();
#pragma unroll
      for (int n = 0; n < kN; ++n) x = fmaxf(x, fmaxf(rS[m][n][2 * half], rS[m][n][2 * half + 1]));
      best[m][0][2 * half] = x = row_max(x);
      if (lane_col() == 0) shared.row_stat[part][local] = x;
    });
    ptx::barrier_sync(together, 64);
    for_rows([&](int m, int half, int local) {
      const float other = shared.row_stat[part ^ 1][local];
      best[m][0][2 * half] = best[m][0][2 * half + 1] = fmaxf(best[m][0][2 * half], other);
    });
    if (softmax.update_max(best, score_unit<kCfg.score>(p), alpha, 0.0f)) softmax.rescale(alpha, rO);
    softmax.exponentiate(rS, score_unit<kCfg.score>(p));
    stale_max = failed = false;
  }

  // The same against the stale max, some scores at a time: begin, exponentiate all, end.
  TESSERA_DEVICE void begin_stale_max() {
    stale_max = true;
    for_rows([&](int m, int half, int) { sum_before[m][half] = softmax.sum[m][half], softmax.sum[m][half] = 0.0f; });
  }
  template <int kCount>
  TESSERA_DEVICE void exponentiate(int first) {
#pragma unroll
    for (int i = first; i < min(first + kCount, kScores); ++i) {
      const int m = i / (kN * 4), e = i % 4;
      float& x = rS[m][i / 4 % kN][e];
      x = ptx::ex2_approx_ftz(fmaf(x, p.scale_log2, -softmax.max[m][e / 2]));
      softmax.sum[m][e / 2] += x;
    }
  }
  TESSERA_DEVICE void end_stale_max() {
    bool fits = true;
    for_rows([&](int m, int half, int) {
      fits &= softmax.sum[m][half] < kStaleMaxBound;  // a NaN is not
      softmax.sum[m][half] += sum_before[m][half];
    });
    failed = !fits;
  }

  TESSERA_DEVICE void store_p() { store_accumulator<2>(shared.sP, rS, row, key, 1.0f); }

  // O += P V, with beside(i) after the products of the i-th fragment of V. After fragment kPRead all of P is read.
  static constexpr int kPRead = (kSteps - 2) * (kD / 2) + 1;
  template <class Beside>
  TESSERA_DEVICE void multiply_values(int stage, Beside&& beside) {
    auto& sV = shared.sV[stage];
    uint32 a[2][kM][4];
    load_a<kM>(a[0], shared.sP, row, 0);
    const auto skip = [&](int n) { return beyond<kCfg.head_dim_v, 2, kD>(col, n); };
    for_fragments<kFragments>(
        [&](int i, uint32(&v)[4]) {
          const int k = i / (kD / 2), n = i % (kD / 2) * 2;
          if (!skip(n)) load_b_pair_transposed(v, sV, k * 16, col + n * 8);
        },
        [&](int i, const uint32(&v)[4]) {
          const int k = i / (kD / 2), n = i % (kD / 2) * 2;
          if (n == 0 && k + 1 < kSteps) load_a<kM>(a[(k + 1) % 2], shared.sP, row, (k + 1) * 16);
          if (!skip(n)) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              mma_16bit<kCfg.dtype>(rO[m][n], a[k % 2][m], v[0], v[1]);
              mma_16bit<kCfg.dtype>(rO[m][n + 1], a[k % 2][m], v[2], v[3]);
            }
          }
          beside(i);
        });
  }

  // P V of a tile and, where there is one that the pair sees, P of the next, whose K is in the other stage.
  // `whole`: the loads come beside S.
  TESSERA_DEVICE void step(int tile, int stage, bool next, bool whole, KeyLoads<kCfg>& loads) {
    if (next) {
      scores(stage ^ 1, [&](int i) {
        if (whole) loads.beside(i, shared, stage, p);
      });
      if (whole) ptx::cp_async_commit_group();
    }
    const auto p_read = [&](int i) {
      if (i == kPRead && next) ptx::barrier_arrive(my_read, 64);
    };
    if (next && softmax.ready) {
      constexpr int kEach = (kScores + kFragments - 1) / kFragments;
      mask(tile + 1);
      begin_stale_max();
      multiply_values(stage, [&](int i) {
        p_read(i);
        exponentiate<kEach>(i * kEach);
      });
      end_stale_max();
    } else {
      multiply_values(stage, p_read);
      if (next) update(tile + 1);
    }
    if (!next) return;
    ptx::barrier_sync(partner_read, 64);
    store_p();
  }

  // A warp's stale max was too low for the tile: all warps that used one compute it again. Its K is still there.
  TESSERA_DEVICE void again(int tile, int stage) {
    if (!stale_max) return;
    for_rows([&](int m, int half, int) { softmax.sum[m][half] = sum_before[m][half]; });
    scores(stage, [](int) {});
    update(tile);
    store_p();
  }

  // O / l and LSE, after a barrier at which all warps are done with V.
  TESSERA_DEVICE void finish() {
    softmax.finish();
    for_rows([&](int m, int half, int local) {
      if (lane_col() == 0) shared.row_stat[part][local] = softmax.sum[m][half];
    });
    ptx::barrier_sync(together, 64);
    for_rows([&](int m, int half, int local) {
      const float sum = shared.row_stat[0][local] + shared.row_stat[1][local];
      const FwdRow<kCfg> result(p, b, local, {softmax.max[m][half], sum, softmax.huge(m, half)});
      if (lane_col() == 0 && part == 0) store_row_lse(p, b, local, result);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        if (beyond<kCfg.head_dim_v, 2, kD>(col, d)) break;
        put_output(shared.sO, p, b, result, local, col + d * 8 + lane_col(), rO[m][d][2 * half],
                   rO[m][d][2 * half + 1]);
      }
    });
    if constexpr (!kCfg.split) {
      ptx::barrier_sync(together, 64);  // a warp stores whole rows, half of the pair's
      store_output<kRows / 2>(shared.sO, p, b, row + part * (kRows / 2));
    }
  }

  // body(m, half, row of the block) for each of the rows that a lane has numbers of.
  template <class Body>
  TESSERA_DEVICE void for_rows(Body&& body) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) body(m, half, row + m * 16 + half * 8 + lane_row());
  }
};

template <FwdConfig kCfg, class Params>  // FwdParams or, with bulk copies, FwdBulkParams
TESSERA_DEVICE void fwd_sm80_pairs(const Params& p) {
  static_assert(kCfg.row_map == RowMap::kPairs && dtype_bytes(kCfg.dtype) == 2 && kCfg.block_m == kCfg.warps * 16);
  static_assert(has_fwd_layout<kCfg, FwdPairsSharedMemory<kCfg>>(), "shared memory lies where the host has it");
  static_assert(kCfg.stages == 2 && kCfg.block_n % 32 == 0 && !kCfg.score.any());
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdPairsSharedMemory<kCfg>*>(shared_memory);

  const auto load_k = [&](const FwdBlock<kCfg>& b, int tile, int stage) {
    if (tile >= b.last) return;
    if constexpr (kCfg.bulk) {
      if (copy_whole_keys(shared.sK[stage], shared.k_full[stage], p, p.k_map, b, tile * kCfg.block_n, 0)) return;
    }
    load_keys(shared.sK[stage], p, p.k, b, tile * kCfg.block_n, 0, p.head_dim);
  };
  const auto load_v = [&](const FwdBlock<kCfg>& b, int tile, int stage) {
    if (tile >= b.last) return;
    if constexpr (kCfg.bulk) {
      if (copy_whole_keys(shared.sV[stage], shared.v_full[stage], p, p.v_map, b, tile * kCfg.block_n, b.dv_begin))
        return;
    }
    load_keys(shared.sV[stage], p, p.v, b, tile * kCfg.block_n, b.dv_begin, b.dv_count);
  };
  // What comes before a work tile's first V. Two groups: what the first scores need, and the second tile of keys.
  const auto load_first = [&](const FwdBlock<kCfg>& b) {
    load_queries(shared.sQ, p, b);
    load_k(b, b.first, 0);
    ptx::cp_async_commit_group();
    load_k(b, b.first + 1, 1);
    ptx::cp_async_commit_group();
  };

  // A work tile's bounds to shared memory, and its first loads; of the block's first work tile V, too, whose place is
  // free.
  const auto open = [&](TileCoord coord, int place, bool with_v) {
    const FwdBlock<kCfg> b(p, coord);
    if (threadIdx.x == 0) shared.work[place] = b;
    load_first(b);
    if (with_v) {
      load_v(b, b.first, 0);
      ptx::cp_async_commit_group();
    }
  };

  // 1. Which tiles are mine, and which keys the first sees.
  PersistentScheduler<kCfg> scheduler(p);
  scheduler.clear_unowned(p);
  if (!scheduler.more) return;
  int place = 0;
  bool v_comes = true;  // V of the work tile's first tile of keys is loaded already
  if (kCfg.bulk && threadIdx.x == 0) {
#pragma unroll
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      ptx::mbarrier_init(shared.k_full[stage].address(), 1);
      ptx::mbarrier_init(shared.v_full[stage].address(), 1);
    }
    ptx::fence_mbarrier_init();
  }
  open(scheduler.place, place, v_comes);
  __syncthreads();

  // Until a tile has landed that came by a bulk copy; once each, since a wait ends a phase.
  uint32 parities = 0;  // a bit a stage, K's before V's
  const auto wait_full = [&](const Barrier& barrier, int bit) {
    if constexpr (kCfg.bulk) {
      ptx::mbarrier_wait_parity(barrier.address(), parities >> bit & 1);
      parities ^= 1u << bit;
    }
  };

  while (scheduler.more) {
    // 2. Q: global -> shared, with the first tiles of K: these loads are under way.
    const FwdBlock<kCfg>& b = shared.work[place];
    PairWarp<kCfg> warp(p, b, shared);
    KeyLoads<kCfg> loads(p, b);
    place ^= 1;

    const auto wait_k = [&](int tile, int stage) {
      if (tile < b.last) wait_full(shared.k_full[stage], stage);
    };
    const auto wait_v = [&](int tile, int stage) {
      if (tile < b.last) wait_full(shared.v_full[stage], kCfg.stages + stage);
    };

    // 3. For every tile of keys that a row of mine sees: its P is made one tile ahead, the first's where it fails.
    // Where no row sees any there is one iteration without products.
    int stage = 0;
    for (int tile = b.first;; ++tile, stage ^= 1) {
      if (tile == b.first && v_comes) {
        ptx::cp_async_wait_group<2>();
      } else if (tile == b.first) {
        ptx::cp_async_wait_group<1>();
      } else {
        ptx::cp_async_wait_group<0>();
      }
      if (tile == b.first) {
        wait_k(tile, 0);
      } else {
        wait_v(tile, stage), wait_k(tile + 1, stage ^ 1);
      }
      // After a work tile's last tile of keys, which threads may have written, come the next one's bulk copies.
      if (kCfg.bulk && tile + 1 >= warp.last()) ptx::fence_proxy_async();
      // P, V and the next K are there, of the first tile Q and K; all warps are done with this K, but for what failed,
      // and with the V before; at the first tile, with the O before, which went out through V's place.
      if (__syncthreads_or(warp.failed)) {
        if (tile == b.first && !v_comes) {
          load_v(b, tile, 0);
          ptx::cp_async_commit_group();
        }
        warp.again(tile, stage);
        ptx::cp_async_wait_group<0>();
        if (tile == b.first) wait_v(tile, 0), wait_k(tile + 1, 1);
        __syncthreads();
      }
      const bool ends = tile + 1 >= warp.last();
      const bool whole = KeyLoads<kCfg>::kPossible && tile < loads.end && warp.sees(tile + 1);
      if (!ends) {
        if (!whole) {
          load_k(b, tile + 2, stage);
          load_v(b, tile + 1, stage ^ 1);
          ptx::cp_async_commit_group();
        }
      } else {  // no warp needs Q and K: those of the next work tile arrive under the last product and the store of O
        scheduler.advance(p);
        if (scheduler.more) open(scheduler.place, place, false);
      }
      warp.stale_max = warp.failed = false;
      if (warp.sees(tile)) warp.step(tile, stage, !ends && warp.sees(tile + 1), whole, loads);
      if (ends) break;
    }
    v_comes = false;

    // 4. O / l and LSE: registers -> (shared ->) global. A row that sees nothing: 0 and -inf.
    __syncthreads();  // no warp reads V, whose place O takes
    warp.finish();
    if constexpr (kCfg.bulk) ptx::fence_proxy_async();  // copies follow into V's place
  }
}

}  // namespace tessera
