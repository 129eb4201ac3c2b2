// How a tile in shared memory (tile/shared_tile.cuh) is filled from global memory by cp.async or ordinary loads, and stored to it.
#pragma once

#include "tessera/ptx/cp_async.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// 16 bytes of a row of global memory, of which the first `wanted` are read and the others become zero, so that nothing
// past a sequence's end can reach a product. kAligned: `from` is a multiple of 16 bytes; the copy is asynchronous, and
// the caller commits the group.
template <bool kAligned, class Tile>
TESSERA_DEVICE void load_part(Tile& sTile, int row, int offset_bytes, const char* from, int wanted) {
  char* to = sTile.data + Tile::place(row) * Tile::kPitchBytes + offset_bytes;
  if constexpr (kAligned) {
    ptx::cp_async_cg_16(shared_address(to), from, wanted);
  } else if constexpr (Tile::kElemBytes == 2) {
    uint32 words[4] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n * 2 < wanted) {
        words[n / 2] |= static_cast<uint32>(reinterpret_cast<const unsigned short*>(from)[n]) << (16 * (n % 2));
      }
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      reinterpret_cast<float*>(to)[n] = n * 4 < wanted ? reinterpret_cast<const float*>(from)[n] : 0.0f;
    }
  }
}

// Loads of a thread that are written out one after the other: all, but where one warp loads whole tiles, 32 and more a
// lane, or each is eight. Those took half of the time of compiling a kernel, and a turn of a loop costs a load little.
template <bool kAligned, int kThreads>
inline constexpr int kLoadsUnrolled = !kAligned        ? 2
                                      : kThreads == 32 ? 4
                                                       : 128;

// Rows of global memory for a tile: row r is at gRow(r), a byte pointer, and row_bytes long; rows from `count` on, and
// columns beyond row_bytes, become zero. kAligned: every row starts at a multiple of 16 bytes. By kThreads threads, of which
// the caller is number `thread`.
template <bool kAligned, int kThreads, int kUnroll = kLoadsUnrolled<kAligned, kThreads>, class Tile, class RowPointer>
TESSERA_DEVICE void load_tile(Tile& sTile, int count, int row_bytes, RowPointer&& gRow,
                              int thread = static_cast<int>(threadIdx.x)) {
  constexpr int kLoadsPerRow = Tile::kCols * Tile::kElemBytes / kLoadBytes;
  constexpr int kLoads = Tile::kRows * kLoadsPerRow;
#pragma unroll kUnroll
  for (int i = 0; i < (kLoads + kThreads - 1) / kThreads; ++i) {
    const int load = thread + i * kThreads;
    if (kLoads % kThreads != 0 && load >= kLoads) break;
    const int row = load / kLoadsPerRow, offset = load % kLoadsPerRow * kLoadBytes;
    const int wanted = row < count ? min(max(row_bytes - offset, 0), kLoadBytes) : 0;
    load_part<kAligned>(sTile, row, offset, gRow(wanted > 0 ? row : 0) + (wanted > 0 ? offset : 0), wanted);
  }
}

// The same for rows that lie anywhere, row r gRow(r) bytes after `base`: each place is found once, by a lane of the warp
// that loads the row, and not by every load of it. gRow is called for all rows of the tile, those from `count` on too.
template <bool kAligned, int kThreads, class Tile, class RowOffset>
TESSERA_DEVICE void load_tile_scattered(Tile& sTile, int count, int row_bytes, const char* base, RowOffset&& gRow) {
  constexpr int kRowBytes = Tile::kCols * Tile::kElemBytes, kLoadsPerRow = kRowBytes / kLoadBytes;
  constexpr int kLanes = lanes_of(kLoadsPerRow);
  constexpr int kUnroll = kAligned ? 4 : 2;  // all written out would cost registers that wide heads do not have
  constexpr int kRows = Tile::kRows / (kThreads / 32);  // of the warp
  static_assert(kRows * (kThreads / 32) == Tile::kRows, "every warp has as many rows");
  const int lane = static_cast<int>(threadIdx.x) % 32, row0 = static_cast<int>(threadIdx.x) / 32 * kRows;
#pragma unroll
  for (int first = 0; first < kRows; first += 32) {
    const int64 place = gRow(row0 + min(first + lane, kRows - 1));
#pragma unroll kUnroll
    for (int pass = first; pass < min(first + 32, kRows); pass += 32 / kLanes) {
      const int row = pass + lane / kLanes;
      const char* from = base + __shfl_sync(0xffffffff, place, row % 32);
#pragma unroll
      for (int part = 0; part < kLoadsPerRow; part += kLanes) {
        const int offset = (part + lane % kLanes) * kLoadBytes;
        if (row >= kRows || offset >= kRowBytes) continue;
        const int wanted = row0 + row < count ? min(max(row_bytes - offset, 0), kLoadBytes) : 0;
        load_part<kAligned>(sTile, row0 + row, offset, from + (wanted > 0 ? offset : 0), wanted);
      }
    }
  }
}

// The loads of whole tiles, one after another, by kThreads threads, as many lanes a row as are a power of two: rows lie
// `row_stride` bytes apart from `gRows` on, and a load takes an addition. After a tile's last load comes the first of the
// tile that follows it in global memory.
template <int kThreads, class Tile>
struct StridedLoads {
  static constexpr int kLoadsPerRow = Tile::kCols * Tile::kElemBytes / kLoadBytes;
  static constexpr int kLanes = lanes_of(kLoadsPerRow);
  static constexpr int kRowsAPass = kThreads / kLanes;
  static constexpr bool kPossible = kLoadsPerRow <= kLanes && Tile::kRows % kRowsAPass == 0;
  static constexpr int kCount = Tile::kRows / kRowsAPass;  // of a thread and a tile

  const char* from;

  TESSERA_DEVICE StridedLoads(const char* gRows, int64 row_stride, int thread = static_cast<int>(threadIdx.x))
      : from(gRows + thread / kLanes * row_stride + thread % kLanes * kLoadBytes) {}
  TESSERA_DEVICE void load(Tile& sTile, int i, int64 row_stride, int thread = static_cast<int>(threadIdx.x)) {
    const uint32 to = sTile.at(Tile::place(thread / kLanes), 0) + thread % kLanes * kLoadBytes;
    if (kLoadsPerRow == kLanes || thread % kLanes < kLoadsPerRow) {
      ptx::cp_async_cg_16(to + Tile::place(i * kRowsAPass) * Tile::kPitchBytes, from, kLoadBytes);
    }
    from += kRowsAPass * row_stride;
  }
};

// The same for rows `row_stride` bytes apart from `gRows` on. A whole tile, which all but a sequence's last are, takes an
// addition a load, unless that is not worth its instructions: kOnce, for what a block loads before all else.
template <bool kAligned, int kThreads, bool kOnce = false, class Tile>
TESSERA_DEVICE void load_tile_strided(Tile& sTile, int count, int row_bytes, const char* gRows, int64 row_stride,
                                      int thread = static_cast<int>(threadIdx.x)) {
  using Loads = StridedLoads<kThreads, Tile>;
  constexpr bool kWholePasses = kAligned && Loads::kPossible && !kOnce;
  if constexpr (kWholePasses) {
    if (count >= Tile::kRows && row_bytes == Tile::kCols * Tile::kElemBytes) {
      Loads loads(gRows, row_stride, thread);
#pragma unroll
      for (int i = 0; i < Loads::kCount; ++i) loads.load(sTile, i, row_stride, thread);
      return;
    }
  }
  constexpr int kUnroll = kWholePasses || kOnce ? 2 : kLoadsUnrolled<kAligned, kThreads>;
  load_tile<kAligned, kThreads, kUnroll>(
      sTile, count, row_bytes, [&](int row) { return gRows + row_stride * row; }, thread);
}

// Rows first ... first + kRows - 1 of a tile, those below `count`, to global memory, by one warp. kAligned as above, but
// known at run time: every row starts at a multiple of 16 bytes.
template <int kRows, class Tile, class RowPointer>
TESSERA_DEVICE void store_rows(Tile& sTile, int first, int count, int columns, int aligned, RowPointer&& gRow) {
  constexpr int kElems = kLoadBytes / Tile::kElemBytes;
  constexpr int kStoresPerRow = Tile::kCols / kElems;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int store = lane; store < kRows * kStoresPerRow; store += 32) {
    const int row = first + store / kStoresPerRow, col = store % kStoresPerRow * kElems;
    if (row >= count || col >= columns) continue;
    const char* from = sTile.pointer(Tile::place(row), col);
    char* to = gRow(row) + col * Tile::kElemBytes;
    if (aligned && col + kElems <= columns) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      continue;
    }
    for (int n = 0; n < min(kElems, columns - col); ++n) {
      if constexpr (Tile::kElemBytes == 2) {
        reinterpret_cast<unsigned short*>(to)[n] = reinterpret_cast<const unsigned short*>(from)[n];
      } else {
        reinterpret_cast<float*>(to)[n] = reinterpret_cast<const float*>(from)[n];
      }
    }
  }
}

// The same for rows `row_stride` bytes apart, of which the tile's row 0 goes to gRows. Where all are there and whole, a
// store takes an addition.
template <int kRows, class Tile>
TESSERA_DEVICE void store_rows_strided(Tile& sTile, int first, int count, int columns, int aligned, char* gRows,
                                       int64 row_stride) {
  constexpr int kStoresPerRow = Tile::kCols * Tile::kElemBytes / kLoadBytes;
  constexpr int kRowsAPass = kStoresPerRow < 32 ? 32 / kStoresPerRow : 1;
  if constexpr (kRowsAPass * kStoresPerRow == 32 && kRows % kRowsAPass == 0) {
    if (aligned && first + kRows <= count && columns == Tile::kCols) {
      // Addresses known before a kernel's loops would hold registers through them.
      const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
      const int row = first + lane / kStoresPerRow, offset = lane % kStoresPerRow * kLoadBytes;
      const char* from = sTile.data + Tile::place(row) * Tile::kPitchBytes + offset;
      char* to = gRows + row * row_stride + offset;
#pragma unroll
      for (int i = 0; i < kRows / kRowsAPass; ++i) {
        *reinterpret_cast<uint4*>(to) =
            *reinterpret_cast<const uint4*>(from + Tile::place(i * kRowsAPass) * Tile::kPitchBytes);
        to += kRowsAPass * row_stride;
      }
      return;
    }
  }
  store_rows<kRows>(sTile, first, count, columns, aligned, [&](int row) { return gRows + row_stride * row; });
}

}  // namespace tessera
