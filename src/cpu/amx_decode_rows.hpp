// The rows of K and V that decoding with AMX reads a block at a time, and their prefetching.
#pragma once

#include <type_traits>

#include "cpu/amx_code_rows.hpp"
#include "cpu/code_block.hpp"

namespace tessera::cpu {
namespace {

static_assert(kAmxDecodeKeys == 2 * kTileSide);

// Rows of K and V of one block of keys, for the first of the item's KV heads; with codes also their scales.
struct ElementBlock {
  const char* keys[kAmxDecodeKeys];
  const char* values[kAmxDecodeKeys];
  int64_t count;

  TESSERA_INLINE void locate(const Params& p, const Sequence& sequence, int64_t batch, int64_t head_begin, int64_t key,
                             int64_t keys_end) {
    count = min_of(kAmxDecodeKeys, keys_end - key);
    key_rows(keys, p, p.k, sequence, batch, head_begin, key, count);
    key_rows(values, p, p.v, sequence, batch, head_begin, key, count);
  }
};
template <bool kCodes>
struct DecodeBlock : std::conditional_t<kCodes, CodeBlock<kAmxDecodeKeys>, ElementBlock> {
  int64_t begin;

  // Rows past the last key repeat the last one.
  TESSERA_INLINE void locate_part(const Params& p, const DecodePart& part, int64_t first, int64_t end) {
    begin = first;
    this->locate(p, part.sequence, part.batch, part.head_begin, first, end);
    const int64_t last = this->count - 1;
    for (int64_t n = last + 1; n < kAmxDecodeKeys; ++n) {
      this->keys[n] = this->keys[last], this->values[n] = this->values[last];
    }
  }
};

// Prefetches the tiles of K and V of a block and then of the next one, in the order in which attend uses them.
template <class Block>
class DecodeAhead {
 public:
  // `copied`: K or V is copied, all 32 rows of a head at once.
  TESSERA_INLINE DecodeAhead(const Params& p, const DecodePart& part, bool copied)
      : stages_(2 * part.heads),
        head_bytes_{p.k.head, p.v.head},
        tiles_{2 * padded_to(p.head_dim * p.kv_elem_bytes, kTileRow_bytes) / kTileRow_bytes,
               2 * padded_to(p.head_dim_v * p.kv_elem_bytes, kTileRow_bytes) / kTileRow_bytes},
        distance_(copied ? 2 * max_of(tiles_[0], tiles_[1]) : kTilesAhead) {}
  // Continues from that many tiles into `now` on.
  TESSERA_INLINE void block(const Block& now, const Block& next) {
    now_ = &now, next_ = &next;
    stage_ = tile_ = 0;
    start_stage();
    for (int64_t i = 0; i < distance_; ++i) next_tile();
  }
  // Prefetches line r of the next tile.
  TESSERA_INLINE void line(int r) const { __builtin_prefetch(rows_[r] + offset_); }
  // Prefetches half of the next tile's lines. Both halves are prefetched beside each tile that is used.
  template <int kHalf>
  TESSERA_INLINE void lines() {
#pragma GCC unroll 8
    for (int r = 0; r < kTileSide / 2; ++r) line(kHalf * kTileSide / 2 + r);
    if constexpr (kHalf == 1) next_tile();
  }
  TESSERA_INLINE void next_tile() {
    // 16 rows, the 16 others, then the next 32 columns.
    if (++tile_ < tiles_[value_]) {
      rows_ += tile_ % 2 == 0 ? -kTileSide : kTileSide;
      if (tile_ % 2 == 0) offset_ += kTileRow_bytes;
      return;
    }
    tile_ = 0;
    if (++stage_ == stages_) stage_ = 0, now_ = next_;
    start_stage();
  }

 private:
  static constexpr int64_t kTilesAhead = 3;  // 48 lines, three times the core's miss buffers

  // K of head 0, K of 1, V of 0, K of 2, V of 1 ... V of the last.
  TESSERA_INLINE void start_stage() {
    value_ = stage_ > 0 && (stage_ % 2 == 0 || stage_ == stages_ - 1);
    const int64_t head = (value_ ? stage_ - 1 : stage_ + 1) / 2;
    rows_ = value_ ? now_->values : now_->keys;
    offset_ = head * head_bytes_[value_];
  }

  const Block *now_ = nullptr, *next_ = nullptr;
  const char* const* rows_ = nullptr;  // rows of the tile that is prefetched next
  int64_t offset_ = 0, tile_ = 0;      // into the rows; of the stage
  int64_t stage_ = 0, stages_;         // K or V of one head, in the order of attend
  int64_t head_bytes_[2], tiles_[2];   // of K, of V
  int64_t distance_;                   // tiles
  bool value_ = false;
};

}  // namespace
}  // namespace tessera::cpu
