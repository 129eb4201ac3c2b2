// Rows of any dtype in memory <-> transposed float32 tiles [column][kBlockM rows], by kLanes x kLanes blocks in
// registers (`transpose` of simd/).
#pragma once

#include "cpu/product.hpp"
#include "cpu/scratch.hpp"
#include "tessera/tessera.h"

namespace tessera::cpu {
namespace {

// ---- elements: how n (at most kLanes) of them are read into, or written from, a vector of float32 ----
//
// kWord: the number of elements in a word of 32 bits; word(v): lane i holds elements v(0)[i] ... v(kWord - 1)[i].

struct Float32Elem {
  static constexpr int kBytes = 4, kWord = 1;
  static TESSERA_INLINE VecF read(const char* p) { return load_as<VecF>(p); }
  static TESSERA_INLINE VecF read(const char* p, int64_t n) {
    return load_first<VecF>(reinterpret_cast<const float*>(p), n);
  }
  static TESSERA_INLINE void write(char* p, VecF v) { store(p, v); }
  static TESSERA_INLINE void write(char* p, VecF v, int64_t n) { store_first(reinterpret_cast<float*>(p), v, n); }
  template <class Column>
  static TESSERA_INLINE VecF word(Column&& v) {
    return v(0);
  }
};
struct Float16Elem {
  static constexpr int kBytes = 2, kWord = 2;
  static TESSERA_INLINE VecF read(const char* p) { return float_from_f16(load_as<VecH>(p)); }
  static TESSERA_INLINE VecF read(const char* p, int64_t n) {
    return float_from_f16(load_first<VecH>(reinterpret_cast<const uint16_t*>(p), n));
  }
  static TESSERA_INLINE void write(char* p, VecF v) { store(p, f16_from_float(v)); }
  static TESSERA_INLINE void write(char* p, VecF v, int64_t n) {
    store_first(reinterpret_cast<uint16_t*>(p), f16_from_float(v), n);
  }
  template <class Column>
  static TESSERA_INLINE VecF word(Column&& v) {
    const VecU low = __builtin_convertvector(f16_from_float(v(0)), VecU);
    return (VecF)(low | __builtin_convertvector(f16_from_float(v(1)), VecU) << 16);
  }
};
struct Bfloat16Elem {
  static constexpr int kBytes = 2, kWord = 2;
  static TESSERA_INLINE VecF read(const char* p) { return float_from_bf16(load_as<VecH>(p)); }
  static TESSERA_INLINE VecF read(const char* p, int64_t n) {
    return float_from_bf16(load_first<VecH>(reinterpret_cast<const uint16_t*>(p), n));
  }
  static TESSERA_INLINE void write(char* p, VecF v) { store(p, bf16_from_float(v)); }
  static TESSERA_INLINE void write(char* p, VecF v, int64_t n) {
    store_first(reinterpret_cast<uint16_t*>(p), bf16_from_float(v), n);
  }
  template <class Column>
  static TESSERA_INLINE VecF word(Column&& v) {
    return (VecF)pair_bf16(v(0), v(1));
  }
};
// Codes, to be multiplied by their scale. kFrom, kTo: between a vector of codes and their numbers; kFromTwo: of two
// vectors, which is faster.
template <VecF (*kFrom)(VecB), void (*kFromTwo)(const char*, VecF (&)[2]), VecB (*kTo)(VecF)>
struct ByteElem {
  static constexpr int kBytes = 1;
  static TESSERA_INLINE void read_two(const char* p, VecF (&v)[2]) { kFromTwo(p, v); }
  static TESSERA_INLINE VecF read(const char* p) { return kFrom(load_as<VecB>(p)); }
  static TESSERA_INLINE VecF read(const char* p, int64_t n) {
    return kFrom(load_first<VecB>(reinterpret_cast<const uint8_t*>(p), n));
  }
  static TESSERA_INLINE void write(char* p, VecF v) { store(p, kTo(v)); }
  static TESSERA_INLINE void write(char* p, VecF v, int64_t n) {
    store_first(reinterpret_cast<uint8_t*>(p), kTo(v), n);
  }
};
using E4m3Elem = ByteElem<float_from_e4m3, floats_from_e4m3, e4m3_from_float>;
using E5m2Elem = ByteElem<float_from_e5m2, floats_from_e5m2, e5m2_from_float>;
using Int8Elem = ByteElem<float_from_i8, floats_from_i8, i8_from_float>;
struct BoolElem {  // 0.0 or the byte's value
  static constexpr int kBytes = 1;
  static TESSERA_INLINE VecF read(const char* p) { return __builtin_convertvector(load_as<VecB>(p), VecF); }
  static TESSERA_INLINE VecF read(const char* p, int64_t n) {
    return __builtin_convertvector(load_first<VecB>(reinterpret_cast<const uint8_t*>(p), n), VecF);
  }
};

// Calls body with the element type of a dtype.
template <class Body>
TESSERA_INLINE void with_elem(int32_t dtype, Body&& body) {
  switch (dtype) {
    case TESSERA_FLOAT16:
      return body(Float16Elem{});
    case TESSERA_BFLOAT16:
      return body(Bfloat16Elem{});
    case TESSERA_BOOL:
      return body(BoolElem{});
    default:
      return body(Float32Elem{});
  }
}
template <class Body>
TESSERA_INLINE void with_float_elem(int32_t dtype, Body&& body) {
  switch (dtype) {
    case TESSERA_FLOAT16:
      return body(Float16Elem{});
    case TESSERA_BFLOAT16:
      return body(Bfloat16Elem{});
    default:
      return body(Float32Elem{});
  }
}

// The same for 8 bits.
template <class Body>
TESSERA_INLINE void with_code_elem(int32_t dtype, Body&& body) {
  switch (dtype) {
    case TESSERA_FLOAT8_E4M3:
      return body(E4m3Elem{});
    case TESSERA_FLOAT8_E5M2:
      return body(E5m2Elem{});
    default:
      return body(Int8Elem{});
  }
}

// tile[c][kBlockM] = rows[r][c] for c < cols; rows from `count` up to the next multiple of kLanes become 0.
template <class Elem>
void pack_transposed(float* tile, const char* const* rows, int64_t count, int64_t cols) {
  for (int64_t r0 = 0; r0 < count; r0 += kLanes) {
    const int64_t rows_here = min_of<int64_t>(kLanes, count - r0);
    for (int64_t c0 = 0; c0 < cols; c0 += kLanes) {
      const int64_t cols_here = min_of<int64_t>(kLanes, cols - c0);
      VecF block[kLanes];
      if (rows_here == kLanes && cols_here == kLanes) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) block[r] = Elem::read(rows[r0 + r] + c0 * Elem::kBytes);
      } else {
#pragma GCC unroll 1
        for (int r = 0; r < kLanes; ++r) {
          block[r] = r < rows_here ? Elem::read(rows[r0 + r] + c0 * Elem::kBytes, cols_here) : VecF{};
        }
      }
      transpose(block);
      float* out = tile + c0 * kBlockM + r0;
      if (cols_here == kLanes) {
#pragma GCC unroll 16
        for (int c = 0; c < kLanes; ++c) store(out + c * kBlockM, block[c]);
      } else {
        for (int64_t c = 0; c < cols_here; ++c) store(out + c * kBlockM, block[c]);
      }
    }
  }
}

// rows[r][c] = tile[c][r] * factor[r], written as Elem. Elements of 16 bits are rounded first and then transposed as
// words of two columns. A row is stored in whole vectors: with 16 lanes, whole cache lines, each stored once.
// next_rows: rows of a later tile that will be written, to prefetch (NULL: none).
template <class Elem>
void unpack_transposed(char* const* rows, const float* tile, const float* factor, int64_t count, int64_t cols,
                       char* const* next_rows = nullptr, int64_t next_count = 0) {
  constexpr int64_t kColumns = kLanes * Elem::kWord;
  for (int64_t r0 = 0; r0 < count; r0 += kLanes) {
    const int64_t rows_here = min_of<int64_t>(kLanes, count - r0);
    const VecF scale = load(factor + r0);
    for (int64_t c0 = 0; c0 < cols; c0 += kColumns) {
      const int64_t cols_here = min_of(kColumns, cols - c0);
      if (c0 * Elem::kBytes % kCacheLine_bytes == 0) {
        for (int64_t r = r0; r < min_of(next_count, r0 + kLanes); ++r) prefetch_write(next_rows[r] + c0 * Elem::kBytes);
      }
      VecF block[kLanes];
      const float* in = tile + c0 * kBlockM + r0;
      if (cols_here == kColumns) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          block[i] = Elem::word(
              [&](int n) TESSERA_LAMBDA_INLINE { return load(in + (i * Elem::kWord + n) * kBlockM) * scale; });
        }
      } else {
#pragma GCC unroll 1
        for (int i = 0; i < kLanes; ++i) {
          block[i] = Elem::word([&](int n) TESSERA_LAMBDA_INLINE {
            const int64_t c = i * Elem::kWord + n;
            return c < cols_here ? load(in + c * kBlockM) * scale : VecF{};
          });
        }
      }
      transpose(block);
      if (rows_here == kLanes && cols_here == kColumns) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) store(rows[r0 + r] + c0 * Elem::kBytes, block[r]);
      } else {
        for (int64_t r = 0; r < rows_here; ++r) {
          store_first(rows[r0 + r] + c0 * Elem::kBytes, block[r], cols_here * Elem::kBytes);
        }
      }
    }
  }
}

// ---- whole rows ----

// out[0 .. n) = float32 of row[0 .. n); up to the next multiple of kLanes: 0.
template <class Elem>
TESSERA_INLINE void read_row(float* out, const char* row, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store(out + c, Elem::read(row + c * Elem::kBytes));
  if (c < n) store(out + c, Elem::read(row + c * Elem::kBytes, n - c));
}
// The same times `scale`: a row of 8 bits. Everything reads such rows by this function, once, and then computes with
// float32: kernels of their own for each of the three types would be a tenth of the library.
TESSERA_OWN_FUNCTION inline void read_codes(int32_t dtype, float* out, const char* row, int64_t n, float scale) {
  with_code_elem(dtype, [&](auto elem) {
    using Elem = decltype(elem);
    int64_t c = 0;
    for (; c + 2 * kLanes <= n; c += 2 * kLanes) {
      VecF v[2];
      Elem::read_two(row + c, v);
      store(out + c, v[0] * scale), store(out + c + kLanes, v[1] * scale);
    }
    if (c + kLanes <= n) store(out + c, Elem::read(row + c) * scale), c += kLanes;
    if (c < n) {
      store(out + c, select(iota<VecI>() < static_cast<int32_t>(n - c), Elem::read(row + c, n - c) * scale, VecF{}));
    }
  });
}
template <class Elem>
TESSERA_INLINE void write_row(char* row, const float* in, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) Elem::write(row + c * Elem::kBytes, load(in + c));
  if (c < n) Elem::write(row + c * Elem::kBytes, load_first<VecF>(in + c, n - c), n - c);
}

#if defined(TESSERA_HAS_DOT)
// out[c] = (low[c], high[c]) in pairs for c < n, zeros up to the next multiple of kLanes; high NULL: zeros.
TESSERA_INLINE void pair_rows(uint32_t* out, const char* low, const char* high, int64_t n) {
  const auto half = [](const char* row, int64_t c, int64_t left) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(row) + c;
    return __builtin_convertvector(left >= kLanes ? load_as<VecH>(p) : load_first<VecH>(p, left), VecU);
  };
  for (int64_t c = 0; c < n; c += kLanes) {
    VecU pair = half(low, c, n - c);
    if (high) pair |= half(high, c, n - c) << 16;
    store(out + c, pair);
  }
}

// The same tile as pack_transposed's, of pairs along the columns: tile[c / 2][kBlockM] = (rows[r][c], rows[r][c + 1]).
inline void pack_transposed_pairs(float* tile, const char* const* rows, int64_t count, int64_t cols) {
  pack_transposed<Float32Elem>(tile, rows, count, cols / 2);
  if (cols % 2 == 0) return;
  float* last = tile + cols / 2 * kBlockM;
  for (int64_t r0 = 0; r0 < count; r0 += kLanes) {
    VecU v{};
    for (int64_t r = r0; r < min_of<int64_t>(r0 + kLanes, count); ++r) {
      uint16_t h;
      __builtin_memcpy(&h, rows[r] + (cols - 1) * 2, 2);
      v[r - r0] = h;
    }
    store(last + r0, v);
  }
}
#endif

}  // namespace
}  // namespace tessera::cpu
