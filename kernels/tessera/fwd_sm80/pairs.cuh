// The forward pass of fwd_sm80/kernel.cuh for head sizes whose outputs leave a warp registers for only 16 query rows.
// Two warps, a pair, have the same 32 rows: each computes S = Q K^T for half of the tile's keys, and O += P V for half
// of O's columns, so a fragment of K or V from shared memory serves 32 rows. P, rounded to the operand type, goes
// through shared memory.
//
// It has a loop of its own because it is software-pipelined, with one barrier for each tile: S of the next tile is
// computed before P V of this one, and its exponentials, against the stale max (attention/softmax), are interleaved
// with the products of P V. It supports no options, because they need the registers.
//
// Grid: persistent blocks (fwd_sm80/scheduler), one on a multiprocessor. No other block there would hide a work tile's
// first loads, so those of the next work tile are issued during this one's last product. Block: as in
// fwd_sm80/kernel.cuh. Shared memory: FwdPairsSharedMemory. Details: docs/reference/kernels/fwd_sm80.md.
#pragma once

#include "tessera/fwd_sm80/epilogue.cuh"
#include "tessera/fwd_sm80/loads.cuh"
#include "tessera/fwd_sm80/scheduler.cuh"
#include "tessera/fwd_sm80/scores.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/tile/product.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// Whether the compiler finds registers for a work tile's end, which every tile of keys reads (in registers with the
// other bounds, the kernel is 4 to 7 % faster on sm_90 than with them in shared memory), and for the addresses of loads
// that are interleaved with a product.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr bool kRegistersLeft = false;
#else
inline constexpr bool kRegistersLeft = true;
#endif

template <FwdSm80Config kCfg>
struct FwdPairsSharedMemory {
  static_assert(kCfg.block_m <= kCfg.stages * kCfg.block_n, "O fits into V's place");
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ;
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim> sK[kCfg.stages];
  union {
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v> sV[kCfg.stages];
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sO;  // after the last P V, while the next Q and K are loaded
  };
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.block_n> sP;
  Barrier k_full[kCfg.stages], v_full[kCfg.stages];  // of bulk copies
  float row_stat[2][kCfg.block_m];  // a row's maximum, at the end its sum, over the keys of each warp of the pair
  FwdBlock<kCfg> work[2];           // this work tile and the next
  static_assert(sizeof(work) == 2 * kFwdBlockBytes);
};

// Copies keys of K or V, from key `first` and column `col` on, into a tile by a bulk copy if the tile is full; if not,
// the caller loads it.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE bool copy_whole_keys(Tile& sTile, const Barrier& full, const FwdSm80BulkParams& p, const TensorMap& map,
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

// The loads of an iteration: K two tiles ahead, and V one tile ahead. Issued all at once they would delay the first
// fragments of the scores, so if both tiles are full they are issued one at a time between the products of S.
template <FwdSm80Config kCfg>
struct KeyLoads {
  using KTile = SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim>;
  using VTile = SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v>;
  static constexpr int kThreads = kCfg.warps * 32, kBytes = dtype_bytes(kCfg.dtype);
  static constexpr int kFragments = kCfg.head_dim / 16 * (kCfg.block_n / 32);  // of S
  StridedLoads<kThreads, KTile> k;
  StridedLoads<kThreads, VTile> v;
  static constexpr int kKCount = decltype(k)::kCount, kVCount = decltype(v)::kCount;
  static constexpr int kEvery = kFragments / (kKCount + kVCount);  // fragments between two loads
  static constexpr bool kPossible = kRegistersLeft && kCfg.aligned && !kCfg.paged && !kCfg.bulk &&
                                    decltype(k)::kPossible && decltype(v)::kPossible && kEvery > 0;
  int end;  // end of the iterations in which both tiles are full

  // For a work tile, from its first iteration on.
  TESSERA_DEVICE KeyLoads(const FwdSm80Params& p, const FwdBlock<kCfg>& b)
      : k(key_rows<kBytes>(p, p.k, b, (b.first + 2) * kCfg.block_n, 0), p.k.row * kBytes),
        v(key_rows<kBytes>(p, p.v, b, (b.first + 1) * kCfg.block_n, b.dv_begin), p.v.row * kBytes),
        end(kPossible && p.head_dim == kCfg.head_dim && b.dv_count == kCfg.head_dim_v
                ? min(b.last, b.s.sk / kCfg.block_n) - 2
                : 0) {}

  // Issues a load, if one is due after the products of the i-th fragment of S.
  TESSERA_DEVICE void beside(int i, FwdPairsSharedMemory<kCfg>& shared, int stage, const FwdSm80Params& p) {
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

// One warp of a pair: its rows, its part of their computation, and its registers.
template <FwdSm80Config kCfg>
struct PairWarp {
  static constexpr int kM = 2, kRows = kM * 16;               // rows of the pair
  static constexpr int kN = kCfg.block_n / 16;                // tiles of 8 keys of the warp
  static constexpr int kD = (kCfg.head_dim_v + 31) / 32 * 2;  // tiles of 8 columns of the warp
  static constexpr int kSteps = kCfg.block_n / 16;            // steps of 16 keys of P V
  static constexpr int kFragments = kSteps * (kD / 2);        // of V
  static constexpr int kScores = kM * kN * 4;                 // scores of a lane

  const FwdSm80Params& p;
  const FwdBlock<kCfg>& b;  // in shared memory
  FwdPairsSharedMemory<kCfg>& shared;
  const int b_last;         // a copy of b.last, which every tile reads
  int part, row, key, col;  // 0 or 1; the pair's first row in the block; the warp's first key and column of a tile
  int last_key;             // the last key that a row of the pair sees
  KeyRange all;             // keys that all rows of the pair see
  // Named barriers: this warp has read P; the partner warp has read P; both warps meet.
  int my_read, partner_read, together;
  float rO[kM][kD][4], rS[kM][kN][4];
  OnlineSoftmax<kM> softmax;
  // State of the last tile: whether its exponentials are against the stale max, whether this warp's sum exceeded the
  // bound, and the sums before the tile. A pair's first tile counts as failed.
  bool stale_max, failed = true;
  float sum_before[kM][2] = {};

  TESSERA_DEVICE PairWarp(const FwdSm80Params& p, const FwdBlock<kCfg>& b, FwdPairsSharedMemory<kCfg>& shared)
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
  // Whether the tile begins at or before the last key that a row of the pair sees.
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

  // Turns scores into P with the maximum over both warps' keys. O is that of all tiles before.
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

  // The same against the stale max, in parts: begin, exponentiate all scores, end.
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

  // O += P V, with beside(i) after the products of the i-th fragment of V. After fragment kPRead all of P has been
  // read.
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

  // Computes P V of a tile and, if the pair sees the next tile, P of it; the next tile's K is in the other stage.
  // `whole`: the loads are interleaved with S.
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

  // Recomputes a tile after some warp's stale max was too low: all warps that used a stale max do so. The tile's K is
  // still in shared memory.
  TESSERA_DEVICE void again(int tile, int stage) {
    if (!stale_max) return;
    for_rows([&](int m, int half, int) { softmax.sum[m][half] = sum_before[m][half]; });
    scores(stage, [](int) {});
    update(tile);
    store_p();
  }

  // O / l and LSE, after a barrier at which all warps have finished reading V.
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
      ptx::barrier_sync(together, 64);  // each warp stores complete rows, half of the pair's
      store_output<kRows / 2>(shared.sO, p, b, row + part * (kRows / 2));
    }
  }

  // Calls body(m, half, row of the block) for each row of which the lane has elements.
  template <class Body>
  TESSERA_DEVICE void for_rows(Body&& body) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) body(m, half, row + m * 16 + half * 8 + lane_row());
  }
};

template <FwdSm80Config kCfg, class Params>  // FwdSm80Params or, with bulk copies, FwdSm80BulkParams
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
  // The loads before a work tile's first V, in two groups: what the first scores need, and the second tile of keys.
  const auto load_first = [&](const FwdBlock<kCfg>& b) {
    load_queries(shared.sQ, p, b);
    load_k(b, b.first, 0);
    ptx::cp_async_commit_group();
    load_k(b, b.first + 1, 1);
    ptx::cp_async_commit_group();
  };

  // Writes a work tile's bounds to shared memory and issues its first loads; for the block's first work tile also those
  // of V, whose stages are free then.
  const auto open = [&](TileCoord coord, int place, bool with_v) {
    const FwdBlock<kCfg> b(p, coord);
    if (threadIdx.x == 0) shared.work[place] = b;
    load_first(b);
    if (with_v) {
      load_v(b, b.first, 0);
      ptx::cp_async_commit_group();
    }
  };

  // 1. This block's work tiles, and the keys that the first one sees.
  PersistentScheduler<kCfg> scheduler(p);
  scheduler.clear_unowned(p);
  if (!scheduler.more) return;
  int place = 0;
  bool v_comes = true;  // V of the work tile's first tile of keys is already being loaded
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

  // Waits until a tile that is loaded by a bulk copy has arrived. To be called once for each tile, because a wait ends
  // a phase.
  uint32 parities = 0;  // one bit for each stage, K's before V's
  const auto wait_full = [&](const Barrier& barrier, int bit) {
    if constexpr (kCfg.bulk) {
      ptx::mbarrier_wait_parity(barrier.address(), parities >> bit & 1);
      parities ^= 1u << bit;
    }
  };

  while (scheduler.more) {
    // 2. Q: global -> shared, with the first tiles of K: these loads have been issued.
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

    // 3. For every tile of keys that a row of the block sees: its P is computed one iteration earlier; the first tile's
    // P is computed in its own iteration, because that tile counts as failed. If no row sees any tile, there is one
    // iteration without products.
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
      // A work tile's last tile of keys may have been written by threads; the next work tile's bulk copies follow it.
      if (kCfg.bulk && tile + 1 >= warp.last()) ptx::fence_proxy_async();
      // After this barrier P, V and the next K are visible (for the first tile: Q and K). All warps have finished
      // reading this K, unless the tile failed, and the previous V; at the first tile, also the previous O, which was
      // stored from V's stages.
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
      } else {  // no warp reads Q and K any more: the next work tile's are loaded during the last product and O's store
        scheduler.advance(p);
        if (scheduler.more) open(scheduler.place, place, false);
      }
      warp.stale_max = warp.failed = false;
      if (warp.sees(tile)) warp.step(tile, stage, !ends && warp.sees(tile + 1), whole, loads);
      if (ends) break;
    }
    v_comes = false;

    // 4. O / l and LSE: registers -> (shared ->) global. A row that sees nothing: 0 and -inf.
    __syncthreads();  // no warp reads V any more, which O overlays
    warp.finish();
    if constexpr (kCfg.bulk) ptx::fence_proxy_async();  // bulk copies into V's stages follow
  }
}

}  // namespace tessera
