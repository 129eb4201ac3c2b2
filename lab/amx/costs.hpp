// What fixed_costs, backward_costs and decode_costs share: tensors of many heads, a call's parameters, and cycles of the core.
#pragma once

#include "cpu/tile.hpp"
#include "gate.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kHeads = 8;
inline Gate gate;

template <class T>
T* memory(int64_t count) {
  char* p = static_cast<char*>(aligned_alloc(4096, (count * sizeof(T) + 8191) / 4096 * 4096));
  memset(p, 0, count * sizeof(T));
  return reinterpret_cast<T*>(p);
}

// The best and the median at the core's full rate, in cycles, over `units`.
template <class F>
void report(const char* name, int64_t d, const char* where, F f, double units = 1) {
  // A kernel gives the tiles back, which the gate's products want.
  const Gate::Result r = gate.measure(units, [&] { f(), gate.configure(); });
  printf("D %ld %-34s %-9s %9.0f best %9.0f median cycles, %d of %d\n", static_cast<long>(d), name, where, r.best,
         r.median, r.good, r.all);
  fflush(stdout);
}

// `batch` sequences of `rows` queries and keys, heads of `d` columns side by side, bfloat16, normal numbers.
struct Call {
  Params p{};
  std::vector<Sequence> sequences;
  int64_t elems;

  Call(int64_t batch, int64_t rows, int64_t d, int32_t causal, int64_t heads = kHeads)
      : sequences(batch + 1), elems(batch * rows * heads * d) {
    constexpr int64_t kTileRows = 32;
    for (int64_t b = 0; b <= batch; ++b) {
      const int64_t tile = b * rows / kTileRows;
      sequences[b] = {0, rows, 0, rows, rows, b * rows, tile, b, 0, causal, 0};
    }
    p.batch = batch, p.heads_q = p.heads_kv = heads, p.head_dim = p.head_dim_v = d;
    p.dtype = TESSERA_BFLOAT16, p.elem_bytes = 2, p.sequences = sequences.data();
    for (RowTensor* tensor : {&p.q, &p.k, &p.v, &p.o}) *tensor = numbers(rows, d, heads);
    p.lse = reinterpret_cast<char*>(memory<float>(batch * heads * rows));
    p.lse_batch = heads * rows * 4, p.lse_head = rows * 4, p.lse_row = 4;
    p.scale = 1 / __builtin_sqrtf(static_cast<float>(d)), p.scale_log2 = p.scale * kLog2e;
    p.causal = causal, p.window_left = p.window_right = -1, p.dropout_scale = 1;
    p.num_splits = 1, p.rows_total = batch * rows;
  }
  RowTensor numbers(int64_t rows, int64_t d, int64_t heads = kHeads) {
    uint16_t* tensor = memory<uint16_t>(elems);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < elems; ++i) {
      const float x = i < 1 << 20 ? normal(generator) : 0;
      uint32_t u;
      memcpy(&u, &x, 4);
      tensor[i] = i < 1 << 20 ? (u + 0x8000) >> 16 : tensor[i - (1 << 20)];
    }
    return {reinterpret_cast<char*>(tensor), rows * heads * d * 2, heads * d * 2, d * 2};
  }

 private:
  std::mt19937 generator{3};
};

}  // namespace
}  // namespace tessera::cpu
