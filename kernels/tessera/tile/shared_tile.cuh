// Tiles in shared memory that ldmatrix reads, [rows][columns] with padded rows (ptx/layout.hpp), and copies between
// them and global memory.
#pragma once

#include "tessera/ptx/async_copy.cuh"
#include "tessera/ptx/layout.hpp"
#include "tessera/tile/fragment.cuh"

namespace tessera {

inline constexpr int kLoadBytes = 16;

// kLaneOrder permutes each 32 rows: row r = 8 c + 2 n + e is stored at 8 n + 2 c + e. If the rows become the columns of
// a product, columns 2 c and 2 c + 1 of four tiles of 8, which are lane c's, are then eight neighbours.
template <Dtype kDtype, int kTileRows, int kTileCols, bool kLaneOrder = false>
struct SharedTile {
  static_assert(!kLaneOrder || kTileRows % 32 == 0);
  static_assert(kTileCols % 16 == 0, "the inner dimension of mma.m16n8k16");
  static constexpr Dtype kType = kDtype;
  static constexpr int kRows = kTileRows, kCols = kTileCols;
  static constexpr int kElemBytes = dtype_bytes(kDtype);
  static constexpr int kPitchBytes = pitch_bytes(kDtype, kCols);

  alignas(16) char data[kRows * kPitchBytes];

  // Where a row is stored. If two row indices share no set bit, the place of their sum is the sum of their places.
  TESSERA_HOST_DEVICE static constexpr int place(int row) {
    return kLaneOrder ? row / 32 * 32 + row / 2 % 4 * 8 + row / 8 % 4 * 2 + row % 2 : row;
  }

  TESSERA_DEVICE static uint32 at(uint32 base, int row, int col) { return base + row * kPitchBytes + col * kElemBytes; }
  TESSERA_DEVICE uint32 at(int row, int col) const { return at(shared_address(data), row, col); }
  TESSERA_DEVICE char* pointer(int row, int col) { return data + row * kPitchBytes + col * kElemBytes; }
};

// Lanes for `loads` loads of a row: the least sufficient power of two, at most a warp.
TESSERA_DEVICE constexpr int lanes_of(int loads) {
  int lanes = 1;
  while (lanes < loads && lanes < 32) lanes *= 2;
  return lanes;
}

// ---- copies ---------------------------------------------------------------------------------------------------------
//
// A tile is filled from global memory by cp.async or ordinary loads, and stored to global memory.

// Loads 16 bytes of a row of global memory: the first `wanted` are read and the others become zero, so that nothing
// past a sequence's end reaches a product. kAligned: `from` is a multiple of 16 bytes; the copy is asynchronous, and
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
  } else if constexpr (Tile::kElemBytes == 1) {
#pragma unroll 1
    for (int n = 0; n < kLoadBytes; ++n) to[n] = n < wanted ? from[n] : 0;
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      reinterpret_cast<float*>(to)[n] = n * 4 < wanted ? reinterpret_cast<const float*>(from)[n] : 0.0f;
    }
  }
}

// How many of a thread's loads are unrolled: all of them, except where one warp loads whole tiles (32 loads and more
// per lane) or a load is eight accesses. Unrolling those took half of a kernel's compile time, and a loop iteration
// adds little to a load.
template <bool kAligned, int kThreads>
inline constexpr int kLoadsUnrolled = !kAligned        ? 2
                                      : kThreads == 32 ? 4
                                                       : 128;

// Loads rows of global memory into a tile. Row r is row_bytes long and begins at gRow(r), a byte pointer. Rows from
// `count` on, and columns beyond row_bytes, become zero. kAligned: every row starts at a multiple of 16 bytes. Called
// by kThreads threads; `thread` is the caller's index.
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

// The same for rows at arbitrary places: row r begins gRow(r) bytes after `base`. Each offset is computed once, by one
// lane of the warp that loads the row, not for every load. gRow is called for all rows of the tile, including those
// from `count` on.
template <bool kAligned, int kThreads, class Tile, class RowOffset>
TESSERA_DEVICE void load_tile_scattered(Tile& sTile, int count, int row_bytes, const char* base, RowOffset&& gRow) {
  constexpr int kRowBytes = Tile::kCols * Tile::kElemBytes, kLoadsPerRow = kRowBytes / kLoadBytes;
  constexpr int kLanes = lanes_of(kLoadsPerRow);
  constexpr int kUnroll = kAligned ? 4 : 2;             // unrolling all needs registers that wide heads lack
  constexpr int kRows = Tile::kRows / (kThreads / 32);  // rows per warp
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

// Loads consecutive full tiles by kThreads threads, with a power of two of lanes per row. Rows are `row_stride` bytes
// apart from `gRows` on, so each load needs one addition. The first load of the next tile in global memory follows a
// tile's last.
template <int kThreads, class Tile>
struct StridedLoads {
  static constexpr int kLoadsPerRow = Tile::kCols * Tile::kElemBytes / kLoadBytes;
  static constexpr int kLanes = lanes_of(kLoadsPerRow);
  static constexpr int kRowsAPass = kThreads / kLanes;
  static constexpr bool kPossible = kLoadsPerRow <= kLanes && Tile::kRows % kRowsAPass == 0;
  static constexpr int kCount = Tile::kRows / kRowsAPass;  // loads of a thread per tile

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

// The same for rows `row_stride` bytes apart from `gRows` on. A full tile, which is any but a sequence's last, needs
// one addition per load. kOnce disables this for loads that a block executes once, where it is not worth its
// instructions.
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

// Stores the rows first ... first + kRows - 1 of a tile that are below `count` to global memory, by one warp. `aligned`
// is kAligned known at run time: every row starts at a multiple of 16 bytes.
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

// The same for rows `row_stride` bytes apart; row 0 of the tile goes to gRows. If all rows exist in full, each store
// needs one addition.
template <int kRows, class Tile>
TESSERA_DEVICE void store_rows_strided(Tile& sTile, int first, int count, int columns, int aligned, char* gRows,
                                       int64 row_stride) {
  constexpr int kStoresPerRow = Tile::kCols * Tile::kElemBytes / kLoadBytes;
  constexpr int kRowsAPass = kStoresPerRow < 32 ? 32 / kStoresPerRow : 1;
  if constexpr (kRowsAPass * kStoresPerRow == 32 && kRows % kRowsAPass == 0) {
    if (aligned && first + kRows <= count && columns == Tile::kCols) {
      // Addresses computed before a kernel's loops would occupy registers throughout them.
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
