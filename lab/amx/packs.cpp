// packs: what packing and unpacking costs a cache line of the rows, by how it is done, in cycles of the core, on the same data (hot) and
// on data of many heads in turn (docs/lab/2026-11-26-amx-lines.md). In the environment PACKS=D:heads, 64:8 where it is not set. The first
// variant of a tensor finds it in memory, the later ones in the last cache.
#include <functional>
#include <string>

#include "costs.hpp"
#include "cpu/amx_forward.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kRows = 512, kBatch = 10, kTiles = kRows / kBlockM;

TESSERA_INLINE void ask0(const char* p) { asm volatile("prefetcht0 %0" ::"m"(*p)); }
TESSERA_INLINE void ask1(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }
TESSERA_INLINE void askw(char* p) { asm volatile("prefetchw %0" ::"m"(*p)); }

// transpose_rows with other work beside each of its 16 loads of two halves of rows (i = 0 ... 15).
template <class Row, class Beside>
TESSERA_INLINE void transposed(VecU (&out)[kLanes], Row&& row, Beside&& beside) {
  int halves = 0;
  transpose_rows(out, [&](int r) TESSERA_LAMBDA_INLINE {
    if (++halves % 2 == 0) beside(halves / 2 - 1);
    return row(r);
  });
}

// kLines lines of a row; rows `stride` apart -> out, one after the other.
template <int kLines>
TESSERA_INLINE void copy_rows(char* out, const char* in, int64_t stride, int rows) {
  for (int r = 0; r < rows; ++r, in += stride, out += kLines * 64)
#pragma GCC unroll 4
    for (int l = 0; l < kLines; ++l) store(out + l * 64, load_as<VecU>(in + l * 64));
}

// A panel of 16 rows, `row_bytes` apart from `panel` -> out[c / 2][32]; `beside(i)` 16 times a block.
template <int kLines, class Beside>
TESSERA_INLINE void pack_panel(uint32_t* out, const char* panel, int64_t row_bytes, Beside&& beside) {
#pragma GCC unroll 4
  for (int l = 0; l < kLines; ++l) {
    VecU pairs[kTileSide];
    transposed(
        pairs, [&](int r) TESSERA_LAMBDA_INLINE { return panel + r * row_bytes + l * 64; },
        [&](int i) TESSERA_LAMBDA_INLINE { beside(l * 16 + i); });
#pragma GCC unroll 16
    for (int i = 0; i < kTileSide; ++i) store(out + (l * 16 + i) * kBlockM, pairs[i]);
  }
}

struct Rows {
  const char* base;
  int64_t stride;
};

// ---- Q, 16 tiles ----
template <int kLines>
TESSERA_OWN_FUNCTION void q_direct(uint32_t* out, Rows q) {  // stride known, no pointers
  for (int p = 0; p < kTiles * 2; ++p)
    pack_panel<kLines>(out + p / 2 * kLines * 16 * kBlockM + p % 2 * 16, q.base + p * 16 * q.stride, q.stride,
                       [](int) {});
}
// Asked for `ahead` rows' lines of the same panel order, one beside each load.
template <int kLines, bool kFirst>
TESSERA_OWN_FUNCTION void q_asked(uint32_t* out, Rows q, int ahead_panels) {
  for (int p = 0; p < kTiles * 2; ++p) {
    const char* next = q.base + (p + ahead_panels) * 16 * q.stride;
    pack_panel<kLines>(out + p / 2 * kLines * 16 * kBlockM + p % 2 * 16, q.base + p * 16 * q.stride, q.stride,
                       [&](int i) TESSERA_LAMBDA_INLINE {  // row after row
                         const char* at = next + i / kLines * q.stride + i % kLines * 64;
                         kFirst ? ask0(at) : ask1(at);
                       });
  }
}
// The order of packing: block by block, `ahead` blocks of 16 lines ahead, one beside each load or (kBurst) all before them.
template <int kLines, bool kFirst, bool kBurst = false>
TESSERA_OWN_FUNCTION void q_asked_blocks(uint32_t* out, Rows q, int ahead) {
  for (int p = 0; p < kTiles * 2; ++p) {
    const char* panel = q.base + p * 16 * q.stride;
#pragma GCC unroll 4
    for (int l = 0; l < kLines; ++l) {
      const char* next = panel + (l + ahead) / kLines * 16 * q.stride + (l + ahead) % kLines * 64;
      const auto ask = [&](int i)
                           TESSERA_LAMBDA_INLINE { kFirst ? ask0(next + i * q.stride) : ask1(next + i * q.stride); };
      for (int i = 0; kBurst && i < 16; ++i) ask(i);
      VecU pairs[kTileSide];
      transposed(
          pairs, [&](int r) TESSERA_LAMBDA_INLINE { return panel + r * q.stride + l * 64; },
          [&](int i) TESSERA_LAMBDA_INLINE {
            if (!kBurst) ask(i);
          });
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i)
        store(out + (p / 2 * kLines * 16 + l * 16 + i) * kBlockM + p % 2 * 16, pairs[i]);
    }
  }
}
// Copied by a plain loop, kPanels panels at a time, then packed.
template <int kLines>
TESSERA_OWN_FUNCTION void q_copied(uint32_t* out, Rows q, char* buffer, int panels) {
  for (int p = 0; p < kTiles * 2; p += panels) {
    copy_rows<kLines>(buffer, q.base + p * 16 * q.stride, q.stride, 16 * panels);
    for (int i = 0; i < panels; ++i)
      pack_panel<kLines>(out + (p + i) / 2 * kLines * 16 * kBlockM + (p + i) % 2 * 16, buffer + i * kLines * 1024,
                         kLines * 64, [](int) {});
  }
}
// The copy of the next panels before the packing of these.
template <int kLines>
TESSERA_OWN_FUNCTION void q_copied_ahead(uint32_t* out, Rows q, char* buffer, int panels) {
  const int64_t half = panels * kLines * 1024;
  copy_rows<kLines>(buffer, q.base, q.stride, 16 * panels);
  for (int p = 0, turn = 0; p < kTiles * 2; p += panels, turn ^= 1) {
    if (p + panels < kTiles * 2)
      copy_rows<kLines>(buffer + (turn ^ 1) * half, q.base + (p + panels) * 16 * q.stride, q.stride, 16 * panels);
    for (int i = 0; i < panels; ++i)
      pack_panel<kLines>(out + (p + i) / 2 * kLines * 16 * kBlockM + (p + i) % 2 * 16,
                         buffer + turn * half + i * kLines * 1024, kLines * 64, [](int) {});
  }
}
// The copy of the panel after next, a line beside each load.
template <int kLines>
TESSERA_OWN_FUNCTION void q_copied_beside(uint32_t* out, Rows q, char* buffer, int ahead) {
  copy_rows<kLines>(buffer, q.base, q.stride, 16 * ahead);
  for (int p = 0; p < kTiles * 2; ++p) {
    const int next = p + ahead < kTiles * 2 ? p + ahead : 0;
    const char* in = q.base + next * 16 * q.stride;
    char* to = buffer + (p + ahead) % 4 * kLines * 1024;
    pack_panel<kLines>(out + p / 2 * kLines * 16 * kBlockM + p % 2 * 16, buffer + p % 4 * kLines * 1024, kLines * 64,
                       [&](int i) TESSERA_LAMBDA_INLINE {
                         store(to + i * 64, load_as<VecU>(in + i / kLines * q.stride + i % kLines * 64));
                       });
  }
}
// From a buffer in the first cache alone.
template <int kLines>
TESSERA_OWN_FUNCTION void q_from_buffer(uint32_t* out, const char* buffer, bool fixed) {
  for (int p = 0; p < kTiles * 2; ++p)
    pack_panel<kLines>(out + (fixed ? 0 : p / 2 * kLines * 16 * kBlockM) + p % 2 * 16, buffer + p % 2 * kLines * 1024,
                       kLines * 64, [](int) {});
}

// ---- K and V ----
template <int kLines>
TESSERA_OWN_FUNCTION void k_rows(char* out, Rows k) {  // row after row
  for (int p = 0; p < kRows / 16; ++p)
    for (int r = 0; r < 16; ++r)
#pragma GCC unroll 4
      for (int l = 0; l < kLines; ++l)
        store(out + (p * kLines + l) * 1024 + r * 64, load_as<VecU>(k.base + (p * 16 + r) * k.stride + l * 64));
}
// Asked for `ahead` rows before, into the first cache; kTo: the tiles' lines, too, as such to be written.
template <int kLines, bool kAsk, bool kTo>
TESSERA_OWN_FUNCTION void k_asked(char* out, Rows k, int ahead) {
  for (int p = 0; p < kRows / 16; ++p)
    for (int r = 0; r < 16; ++r)
#pragma GCC unroll 4
      for (int l = 0; l < kLines; ++l) {
        if (kAsk) ask0(k.base + (p * 16 + r + ahead) * k.stride + l * 64);
        if (kTo) askw(out + (p * kLines + l) * 1024 + (r + ahead) * 64);
        store(out + (p * kLines + l) * 1024 + r * 64, load_as<VecU>(k.base + (p * 16 + r) * k.stride + l * 64));
      }
}
template <int kLines, class Beside>
TESSERA_INLINE void v_stage(char* out, int64_t group_bytes, const char* rows, int64_t stride, Beside&& beside) {
#pragma GCC unroll 4
  for (int l = 0; l < kLines; ++l) {
    VecU low[kTileSide], high[kTileSide];
    transposed(
        low, [&](int r) TESSERA_LAMBDA_INLINE { return rows + r * stride + l * 64; },
        [&](int i) TESSERA_LAMBDA_INLINE { beside(l * 32 + i); });
    transposed(
        high, [&](int r) TESSERA_LAMBDA_INLINE { return rows + (16 + r) * stride + l * 64; },
        [&](int i) TESSERA_LAMBDA_INLINE { beside(l * 32 + 16 + i); });
    char* to = out + l * group_bytes;
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g)
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        store(to + g * 1024 + 2 * i * 64, join_low(low[8 * g + i], high[8 * g + i]));
        store(to + g * 1024 + (2 * i + 1) * 64, join_high(low[8 * g + i], high[8 * g + i]));
      }
  }
}
template <int kLines>
TESSERA_OWN_FUNCTION void v_copied_ahead(char* out, int64_t group_bytes, Rows v, char* buffer) {
  copy_rows<kLines>(buffer, v.base, v.stride, 32);
  for (int n = 0; n < kRows / 32; ++n) {
    if (n + 1 < kRows / 32)
      copy_rows<kLines>(buffer + (n + 1) % 2 * kLines * 2048, v.base + (n + 1) * 32 * v.stride, v.stride, 32);
    v_stage<kLines>(out + n * 2048, group_bytes, buffer + n % 2 * kLines * 2048, kLines * 64, [](int) {});
  }
}
template <int kLines>
TESSERA_OWN_FUNCTION void v_copied(char* out, int64_t group_bytes, Rows v, char* buffer) {
  for (int n = 0; n < kRows / 32; ++n) {
    copy_rows<kLines>(buffer, v.base + n * 32 * v.stride, v.stride, 32);
    v_stage<kLines>(out + n * 2048, group_bytes, buffer, kLines * 64, [](int) {});
  }
}
template <int kLines>
TESSERA_OWN_FUNCTION void v_copied_beside(char* out, int64_t group_bytes, Rows v, char* buffer) {
  copy_rows<kLines>(buffer, v.base, v.stride, 32);
  for (int n = 0; n < kRows / 32; ++n) {
    const char* in = v.base + (n + 1 < kRows / 32 ? n + 1 : 0) * 32 * v.stride;
    char* to = buffer + (n + 1) % 2 * kLines * 2048;
    v_stage<kLines>(out + n * 2048, group_bytes, buffer + n % 2 * kLines * 2048, kLines * 64,
                    [&](int i) TESSERA_LAMBDA_INLINE {
                      store(to + i * 64, load_as<VecU>(in + i / kLines * v.stride + i % kLines * 64));
                    });
  }
}
template <int kLines>
TESSERA_OWN_FUNCTION void v_direct(char* out, int64_t group_bytes, Rows v) {
  for (int n = 0; n < kRows / 32; ++n)
    v_stage<kLines>(out + n * 2048, group_bytes, v.base + n * 32 * v.stride, v.stride, [](int) {});
}
template <int kLines>
TESSERA_OWN_FUNCTION void v_asked(char* out, int64_t group_bytes, Rows v) {
  for (int n = 0; n < kRows / 32; ++n) {
    const char* next = v.base + (n + 1) * 32 * v.stride;
    v_stage<kLines>(out + n * 2048, group_bytes, v.base + n * 32 * v.stride, v.stride,
                    [&](int i) TESSERA_LAMBDA_INLINE { ask0(next + i / kLines * v.stride + i % kLines * 64); });
  }
}
// Block by block of 16 rows, `ahead` blocks ahead.
template <int kLines>
TESSERA_OWN_FUNCTION void v_asked_blocks(char* out, int64_t group_bytes, Rows v, int ahead) {
  for (int n = 0; n < kRows / 32; ++n) {
    const char* rows = v.base + n * 32 * v.stride;
    v_stage<kLines>(out + n * 2048, group_bytes, rows, v.stride, [&](int i) TESSERA_LAMBDA_INLINE {
      const int block = i / 16 + ahead;  // of this stage: [line][half]
      ask0(rows + (block / 2 / kLines * 32 + block % 2 * 16 + i % 16) * v.stride + block / 2 % kLines * 64);
    });
  }
}
template <int kLines>
TESSERA_OWN_FUNCTION void v_from_buffer(char* out, int64_t group_bytes, const char* buffer, bool fixed) {
  for (int n = 0; n < kRows / 32; ++n)
    v_stage<kLines>(out + (fixed ? 0 : n * 2048), group_bytes, buffer, kLines * 64, [](int) {});
}

// ---- O ----
enum class Out { kStore, kStream, kAskw, kAsk0, kAsk1 };
// One line of 16 rows: sO [32 columns][32] at `in`, lanes r0.
template <class To, class Beside>
TESSERA_INLINE void o_block(const float* in, VecF scale, char* copy, To&& to, Beside&& beside) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    store(copy + i * 64, pair_bf16(load(in + 2 * i * kBlockM) * scale, load(in + (2 * i + 1) * kBlockM) * scale));
  const char* at = opaque(copy);
  VecU columns[16];
  transposed(
      columns, [&](int r) TESSERA_LAMBDA_INLINE { return at + r * 64; }, beside);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) to(r, columns[r]);
}
// kInner: both halves of the rows before the next columns, so that both lines of a row of sO are read together.
template <int kLines, Out kOut, bool kInner>
TESSERA_OWN_FUNCTION void o_tiles(const float* sO, int64_t o_floats, char* out, int64_t stride, int64_t tile_stride,
                                  int ahead_panels) {
  alignas(64) char copy[1024];
  const VecF scale = splat(0.7f);
  for (int t = 0; t < kTiles; ++t, out += tile_stride) {
    const float* tile = sO + t * o_floats;
    for (int n = 0; n < kLines * 2; ++n) {
      const int l = kInner ? n / 2 : n % kLines, half = kInner ? n % 2 : n / kLines;
      char* rows = out + half * 16 * stride + l * 64;
      char* next = rows + ahead_panels * 16 * stride;
      o_block(
          tile + l * 32 * kBlockM + half * 16, scale, copy,
          [&](int r, VecU v) TESSERA_LAMBDA_INLINE {
            if (kOut == Out::kStream)
              _mm512_stream_si512((__m512i*)(rows + r * stride), (__m512i)v);
            else
              store(rows + r * stride, v);
          },
          [&](int i) TESSERA_LAMBDA_INLINE {
            if (kOut == Out::kAskw) askw(next + i * stride);
            if (kOut == Out::kAsk0) ask0(next + i * stride);
            if (kOut == Out::kAsk1) ask1(next + i * stride);
          });
    }
  }
  if (kOut == Out::kStream) _mm_sfence();
}
// Into a buffer, which is then copied out row after row; the rows asked for before.
template <int kLines, bool kAsk, bool kStream>
TESSERA_OWN_FUNCTION void o_copied(const float* sO, int64_t o_floats, char* out, int64_t stride, char* buffer) {
  alignas(64) char copy[1024];
  const VecF scale = splat(0.7f);
  for (int t = 0; t < kTiles; ++t) {
    const float* tile = sO + t * o_floats;
    char* rows = out + t * 32 * stride;
    for (int half = 0; half < 2; ++half) {
      char* here = rows + half * 16 * stride;
      for (int l = 0; l < kLines; ++l)
        o_block(
            tile + l * 32 * kBlockM + half * 16, scale, copy,
            [&](int r, VecU v) TESSERA_LAMBDA_INLINE { store(buffer + (r * kLines + l) * 64, v); },
            [&](int i) TESSERA_LAMBDA_INLINE {
              if (kAsk) askw(here + (l * 16 + i) / kLines * stride + (l * 16 + i) % kLines * 64 + 16 * stride);
            });
      const char* from = opaque(buffer);
      for (int r = 0; r < 16; ++r)
#pragma GCC unroll 4
        for (int l = 0; l < kLines; ++l) {
          const VecU v = load_as<VecU>(from + (r * kLines + l) * 64);
          if (kStream)
            _mm512_stream_si512((__m512i*)(here + r * stride + l * 64), (__m512i)v);
          else
            store(here + r * stride + l * 64, v);
        }
    }
  }
  if (kStream) _mm_sfence();
}
template <int kLines, bool kStream, bool kAsk>
TESSERA_OWN_FUNCTION void o_plain_copy(char* out, int64_t stride, const char* buffer) {  // stores alone
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int l = 0; l < kLines; ++l) {
      const VecU v = load_as<VecU>(buffer + (r % 16 * kLines + l) * 64);
      if (kAsk) askw(out + (r + 32) * stride + l * 64);
      if (kStream)
        _mm512_stream_si512((__m512i*)(out + r * stride + l * 64), (__m512i)v);
      else
        store(out + r * stride + l * 64, v);
    }
  if (kStream) _mm_sfence();
}

template <int kLines>
void measure(int64_t heads) {
  constexpr int64_t d = kLines * 32;
  Call call(kBatch, kRows, d, 0, heads);
  Params& p = call.p;
  p.block_n = 512, p.tiles_per_item = 16;
  const AmxForwardShape shape{p.block_n, p.tiles_per_item, d, d, false, sizeof(Tile)};
  char* base = memory<char>(carve_amx_forward(nullptr, shape).bytes);
  const AmxForwardScratch scratch = carve_amx_forward(base, shape);
  Tile* tiles = reinterpret_cast<Tile*>(scratch.tiles);
  char* buffer = memory<char>(1 << 16);
  const int64_t group_bytes = p.block_n / 32 * 2048;
  int64_t item = 0;
  ForwardPlace at;
  bool turn = false;
  const auto say = [&](const char* name, std::function<void()> f, double units = double{kRows * kLines}) {
    double got[2];
    for (const bool t : {false, true}) {
      turn = t;
      got[t] = gate.measure(
                       units, [&] { place_item(p, turn ? ++item % (kBatch * heads) : 0, at), f(), gate.configure(); },
                       15, 0.25)
                   .median;
    }
    printf("D %3ld heads %2ld  %-52s hot %8.2f  in turn %8.2f\n", static_cast<long>(d), static_cast<long>(heads), name,
           got[0], got[1]);
    fflush(stdout);
  };
  const auto rows = [&](const RowTensor& t) { return Rows{t.data + t.batch * at.batch + t.head * at.head, t.row}; };
  const auto init = [&] { return init_tiles(p, at, tiles, kStageKeys); };
  say(
      "nothing, cycles", [] {}, 1);
  say(
      "init_tiles, cycles", [&] { init(); }, 1);
  say(
      "init_tiles eight times, cycles each",
      [&] {
        for (int i = 0; i < 8; ++i) init();
      },
      8);
  say(
      "one tile's record 16 times, cycles",
      [&] {
        for (int i = 0; i < 16; ++i) init_tile(tiles[0], p, at.batch, at.head, i * 32, 32);
      },
      1);
  // Q
  init();
  say("Q row pointers alone", [&] {
    const char* r[kBlockM];
    for (int t = 0; t < 16; ++t) {
      rows_of(r, p.q, tiles[t]);
      asm volatile("" ::"r"(r) : "memory");
    }
  });
  const auto pack_q = [&] {
    const char* r[2][kBlockM];
    for (Tile* t = tiles; t < tiles + 16; ++t) t->batch = at.batch, t->head[0] = static_cast<int32_t>(at.head);
    rows_of(r[0], p.q, tiles[0]);
    for (int64_t t = 0; t < 16; ++t) {
      const int64_t next = t + 1 < 16 ? 32 : 0;
      if (next) rows_of(r[(t + 1) % 2], p.q, tiles[t + 1]);
      pack_column_pairs(scratch.sQ + t * d / 2 * kBlockM, kBlockM, r[t % 2], kBlockM, kBlockM, d,
                        {r[(t + 1) % 2], next, 0});
    }
  };
  say("Q as in the library", pack_q);
  for (int n : {1, 2})
    say(("Q t0 bursts, blocks ahead " + std::to_string(n)).c_str(),
        [&] { q_asked_blocks<kLines, true, true>(scratch.sQ, rows(p.q), n); });
  say("Q direct, constant stride", [&] { q_direct<kLines>(scratch.sQ, rows(p.q)); });
  for (int n : {1, 2, 4}) {
    const std::string s = std::to_string(n);
    say(("Q t0 row after row, panels ahead " + s).c_str(), [&] { q_asked<kLines, true>(scratch.sQ, rows(p.q), n); });
    say(("Q t1 row after row, panels ahead " + s).c_str(), [&] { q_asked<kLines, false>(scratch.sQ, rows(p.q), n); });
  }
  for (int n : {1, 2, 3, 4})
    say(("Q t0 block by block, blocks of 16 lines ahead " + std::to_string(n)).c_str(),
        [&] { q_asked_blocks<kLines, true>(scratch.sQ, rows(p.q), n); });
  for (int n : {1, 2})
    say(("Q copied, then packed, panels " + std::to_string(n)).c_str(),
        [&] { q_copied<kLines>(scratch.sQ, rows(p.q), buffer, n); });
  for (int n : {1, 2})
    say(("Q next panels copied before packing, panels " + std::to_string(n)).c_str(),
        [&] { q_copied_ahead<kLines>(scratch.sQ, rows(p.q), buffer, n); });
  for (int n : {1, 2})
    say(("Q copied beside the packing, panels ahead " + std::to_string(n)).c_str(),
        [&] { q_copied_beside<kLines>(scratch.sQ, rows(p.q), buffer, n); });
  say("Q from a buffer in L1 to sQ", [&] { q_from_buffer<kLines>(scratch.sQ, buffer, false); });
  say("Q from a buffer in L1 to a place in L1", [&] { q_from_buffer<kLines>(scratch.sQ, buffer, true); });
  say("Q copied to L1 alone", [&] {
    for (int t = 0; t < 16; ++t)
      copy_rows<kLines>(buffer, rows(p.q).base + t * 32 * p.q.row, p.q.row, 32), opaque(buffer);
  });
  // K, V
  const Sequence* sequences = call.sequences.data();
  const auto pack_k = [&] {
    pack_key_rows(scratch.k_tiles, p, p.k, sequences[at.batch], at.batch, at.head_kv, {0, 0, 512}, d);
  };
  NonfiniteKeys nonfinite{};
  const auto pack_v = [&](bool look) {
    pack_key_columns(scratch.v_tiles, look ? &nonfinite : nullptr, p, p.v, sequences[at.batch], at.batch, at.head_kv,
                     {0, 0, 512}, d);
  };
  say("K as in the library", pack_k);
  say("K row after row", [&] { k_rows<kLines>(scratch.k_tiles, rows(p.k)); });
  for (int n : {4, 8, 16, 32})
    say(("K t0 rows ahead " + std::to_string(n)).c_str(),
        [&] { k_asked<kLines, true, false>(scratch.k_tiles, rows(p.k), n); });
  for (int n : {4, 8})
    say(("K tiles' lines asked for, rows ahead " + std::to_string(n)).c_str(),
        [&] { k_asked<kLines, false, true>(scratch.k_tiles, rows(p.k), n); });
  for (int n : {4, 8})
    say(("K both, rows ahead " + std::to_string(n)).c_str(),
        [&] { k_asked<kLines, true, true>(scratch.k_tiles, rows(p.k), n); });
  say("V as in the library", [&] { pack_v(false); });
  say("V as in the library, looked over", [&] { pack_v(true); });
  for (int n : {1, 2, 3})
    say(("V t0 block by block, blocks of 16 lines ahead " + std::to_string(n)).c_str(),
        [&] { v_asked_blocks<kLines>(scratch.v_tiles, group_bytes, rows(p.v), n); });
  say("V copied, then packed", [&] { v_copied<kLines>(scratch.v_tiles, group_bytes, rows(p.v), buffer); });
  say("V direct, constant stride", [&] { v_direct<kLines>(scratch.v_tiles, group_bytes, rows(p.v)); });
  say("V direct, groups of odd distance",
      [&] { v_direct<kLines>(scratch.v_tiles, group_bytes - 12 * 1024 - 64, rows(p.v)); });
  say("V t0 row after row, a stage ahead", [&] { v_asked<kLines>(scratch.v_tiles, group_bytes, rows(p.v)); });
  say("V next stage copied before packing",
      [&] { v_copied_ahead<kLines>(scratch.v_tiles, group_bytes, rows(p.v), buffer); });
  say("V copied beside the packing", [&] { v_copied_beside<kLines>(scratch.v_tiles, group_bytes, rows(p.v), buffer); });
  say("V from a buffer in L1 to tiles", [&] { v_from_buffer<kLines>(scratch.v_tiles, group_bytes, buffer, false); });
  say("V from a buffer in L1 to a place in L1", [&] { v_from_buffer<kLines>(scratch.v_tiles, 2048, buffer, true); });
  // The beginning of an item
  say("Q, K, V as in the library (cycles of all three)", [&] { pack_q(), pack_k(), pack_v(false); });
  say("Q, K, V, looked over (cycles of all three)", [&] { pack_q(), pack_k(), pack_v(true); });
  // O
  for (Tile* t = tiles; t < tiles + 16; ++t) {
    t->started = true;
    for (int i = 0; i < kBlockM; ++i) t->sum[i] = 3, t->stale_max[i] = 1;
  }
  const auto place = [&] {
    for (Tile* t = tiles; t < tiles + 16; ++t) t->batch = at.batch, t->head[0] = static_cast<int32_t>(at.head);
  };
  float* sO = scratch.sO;
  const int64_t o_floats = d * kBlockM;
  const auto out = [&] { return const_cast<char*>(rows(p.o).base); };
  const int64_t stride = p.o.row, tile_stride = 32 * stride;
  say("O as in the library", [&] { place(), finish_tiles(p, tiles, 16, sO, o_floats, 0, 1.0f); });
  say("O as in the library, no LSE", [&] {
    char* lse = p.lse;
    p.lse = nullptr, place(), finish_tiles(p, tiles, 16, sO, o_floats, 0, 1.0f), p.lse = lse;
  });
  say("O direct", [&] { o_tiles<kLines, Out::kStore, false>(sO, o_floats, out(), stride, tile_stride, 0); });
  say("O direct, halves inner",
      [&] { o_tiles<kLines, Out::kStore, true>(sO, o_floats, out(), stride, tile_stride, 0); });
  say("O of one tile of sO in L1", [&] { o_tiles<kLines, Out::kStore, false>(sO, 0, out(), stride, tile_stride, 0); });
  say("O to rows in L1", [&] { o_tiles<kLines, Out::kStore, false>(sO, o_floats, buffer, d * 2, 0, 0); });
  say("O of one tile in L1 to rows in L1", [&] { o_tiles<kLines, Out::kStore, false>(sO, 0, buffer, d * 2, 0, 0); });
  say("O streamed", [&] { o_tiles<kLines, Out::kStream, false>(sO, o_floats, out(), stride, tile_stride, 0); });
  for (int n : {1, 2, 3})
    say(("O prefetchw, panels ahead " + std::to_string(n)).c_str(),
        [&] { o_tiles<kLines, Out::kAskw, false>(sO, o_floats, out(), stride, tile_stride, n); });
  for (int n : {1, 2})
    say(("O prefetcht1, panels ahead " + std::to_string(n)).c_str(),
        [&] { o_tiles<kLines, Out::kAsk1, false>(sO, o_floats, out(), stride, tile_stride, n); });
  say("O prefetchw, a tile ahead, halves inner",
      [&] { o_tiles<kLines, Out::kAskw, true>(sO, o_floats, out(), stride, tile_stride, 2); });
  say("O by a buffer, copied out", [&] { o_copied<kLines, false, false>(sO, o_floats, out(), stride, buffer); });
  say("O by a buffer, copied out, asked for",
      [&] { o_copied<kLines, true, false>(sO, o_floats, out(), stride, buffer); });
  say("O by a buffer, streamed out", [&] { o_copied<kLines, false, true>(sO, o_floats, out(), stride, buffer); });
  say("stores alone, row after row", [&] { o_plain_copy<kLines, false, false>(out(), stride, buffer); });
  say("stores alone, asked for 32 rows ahead", [&] { o_plain_copy<kLines, false, true>(out(), stride, buffer); });
  say("stores alone, streamed", [&] { o_plain_copy<kLines, true, false>(out(), stride, buffer); });
}

}  // namespace
}  // namespace tessera::cpu

int main() {
  if (!ask_for_amx() && !getenv("NO_AMX")) return puts("no AMX"), 3;
  const char* d = getenv("PACKS");  // "64:8"
  const int64_t dim = d ? atoi(d) : 64, heads = d && strchr(d, ':') ? atoi(strchr(d, ':') + 1) : 8;
  dim == 64 ? tessera::cpu::measure<2>(heads) : tessera::cpu::measure<4>(heads);
  tessera::cpu::gate.report();
}
