// Products in AMX tile registers. Their results are stored only when the next group of products needs the registers.
#pragma once

#include "cpu/amx_scores.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kRow_bytes = kBlockM * 4;                  // of S, of O, of a row of pairs of Q and of P
constexpr int64_t kTwoTiles_bytes = kTileSide * kRow_bytes;  // 16 such rows

// How often other work runs beside a step of 2 x 2 products: after every product, or after every two.
enum class Pieces { kFour, kTwo };

// The four accumulators, 2 x 2, in tile registers 0 ... 3, and the addresses where they are still to be stored:
// registers 0, 1 at `upper`, 2, 3 at `lower`; NULL: nothing is pending. Registers 4, 5 hold A, 6, 7 hold B.
class Accumulators {
 public:
  // Stores what is pending.
  TESSERA_INLINE void flush() {
    if (upper_) store_upper();
    if (lower_) store_lower();
    upper_ = lower_ = nullptr;
  }

  // C (=|+=) A B over `steps` steps of k (kSteps if that is not 0); `add`: adds to the content of C. A has two tiles
  // for each step, B [16 pairs][kBlockM], and C is [2 x 16 rows][kBlockM]; the lower halves of A and C are used only if
  // kLower. kStream: A is in the L2 cache and is read once by this tile of queries; if it were kept in L1, it would
  // evict S and O, and a tile store that misses there takes as long as two products. `beside` runs after every product,
  // or every two: a long piece of other work between two products fills the scheduler, so that the next products start
  // too late to overlap with it, and a short piece has an overhead of its own. kQuiet: not in the first step.
  template <bool kLower, bool kStream, Pieces kPieces, int kSteps = 0, bool kQuiet = false, class Beside>
  TESSERA_INLINE void multiply(char* c, bool add, const char* a, int64_t a_lower_bytes, int64_t a_step_bytes,
                               const char* b, int64_t steps, Beside&& beside) {
    char* c_lower = c + kTwoTiles_bytes;
    tile_load<6>(b, kRow_bytes);
    load_a<4, kStream>(a);
    if (upper_) tile_store<0>(upper_, kRow_bytes);
    begin<0>(c, add);
    tile_product<0, 4, 6>();
    if (kPieces == Pieces::kFour && !kQuiet) beside();
    tile_load<7>(b + kTileRow_bytes, kRow_bytes);
    if (upper_) tile_store<1>(upper_ + kTileRow_bytes, kRow_bytes);
    begin<1>(c + kTileRow_bytes, add);
    tile_product<1, 4, 7>();
    if (!kQuiet) beside();
    if (kLower) load_a<5, kStream>(a + a_lower_bytes);
    if (lower_) tile_store<2>(lower_, kRow_bytes);
    if (kLower) {
      begin<2>(c_lower, add);
      tile_product<2, 5, 6>();
      if (kPieces == Pieces::kFour && !kQuiet) beside();
    }
    if (lower_) tile_store<3>(lower_ + kTileRow_bytes, kRow_bytes);
    if (kLower) {
      begin<3>(c_lower + kTileRow_bytes, add);
      tile_product<3, 5, 7>();
      if (!kQuiet) beside();
    }
    upper_ = c, lower_ = kLower ? c_lower : nullptr;
    const auto next_step = [&]() TESSERA_LAMBDA_INLINE {
      a += a_step_bytes, b += kTwoTiles_bytes;
      tile_load<6>(b, kRow_bytes);
      load_a<4, kStream>(a);
      tile_product<0, 4, 6>();
      if (kPieces == Pieces::kFour) beside();
      tile_load<7>(b + kTileRow_bytes, kRow_bytes);
      tile_product<1, 4, 7>();
      beside();
      if (!kLower) return;
      load_a<5, kStream>(a + a_lower_bytes);
      tile_product<2, 5, 6>();
      if (kPieces == Pieces::kFour) beside();
      tile_product<3, 5, 7>();
      beside();
    };
    if constexpr (kSteps > 0) {
#pragma GCC unroll 8
      for (int step = 1; step < kSteps; ++step) next_step();
    } else {
      for (int64_t step = 1; step < steps; ++step) next_step();
    }
  }

  // One more step of the same 2 x 2; the tiles of A are adjacent.
  TESSERA_INLINE void add_step(const char* a, const char* b) {
    tile_load<6>(b, kRow_bytes);
    tile_load<4>(a, kTileRow_bytes);
    tile_product<0, 4, 6>();
    tile_load<7>(b + kTileRow_bytes, kRow_bytes);
    tile_product<1, 4, 7>();
    tile_load<5>(a + kTile_bytes, kTileRow_bytes);
    tile_product<2, 5, 6>();
    tile_product<3, 5, 7>();
  }

 private:
  template <int kTile, bool kStream>
  TESSERA_INLINE void load_a(const char* a) {
    if (kStream) {
      tile_load_streamed<kTile>(a, kTileRow_bytes);
    } else {
      tile_load<kTile>(a, kTileRow_bytes);
    }
  }
  template <int kTile>
  TESSERA_INLINE void begin(const char* c, bool add) {
    if (add) {
      tile_load<kTile>(c, kRow_bytes);
    } else {
      tile_zero<kTile>();
    }
  }
  TESSERA_INLINE void store_upper() {
    tile_store<0>(upper_, kRow_bytes);
    tile_store<1>(upper_ + kTileRow_bytes, kRow_bytes);
  }
  TESSERA_INLINE void store_lower() {
    tile_store<2>(lower_, kRow_bytes);
    tile_store<3>(lower_ + kTileRow_bytes, kRow_bytes);
  }

  char *upper_ = nullptr, *lower_ = nullptr;
};

}  // namespace
}  // namespace tessera::cpu
