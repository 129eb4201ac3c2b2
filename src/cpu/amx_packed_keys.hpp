// Keys and values of the forward pass that are packed once, ahead of all items that read them: packing a super-block,
// its address, and prefetching the next one while an item processes the present one.
#pragma once

#include "cpu/amx_pack.hpp"
#include "cpu/forward_place.hpp"

namespace tessera::cpu {
namespace {

TESSERA_INLINE bool packed_ahead(const Sequence& sequence) {
  return (&sequence)[1].packed_begin > sequence.packed_begin;
}

// The super-block that begins with key `key`.
TESSERA_INLINE AmxPackedKeys packed_keys(const Params& p, const Sequence& sequence, int64_t head_kv, int64_t key) {
  const int64_t index = sequence.packed_begin + key / p.block_n - sequence.packed_first;
  const int64_t block = head_kv * p.sequences[p.batch].packed_begin + index;
  const int64_t bytes = carve_amx_packed_keys(nullptr, p.block_n, p.head_dim, p.head_dim_v).bytes;
  return carve_amx_packed_keys(p.packed_keys + block * bytes, p.block_n, p.head_dim, p.head_dim_v);
}

// Packs one super-block of one KV head. Items may see different keys, so values are checked wherever a key may be
// hidden from any query.
inline void amx_pack_keys_item(const Params& p, int64_t item) {
  const int64_t head_kv = item % p.heads_kv, index = item / p.heads_kv;
  const int64_t batch = find_sequence(p, &Sequence::packed_begin, index);
  const Sequence& sequence = p.sequences[batch];
  const int64_t key = (sequence.packed_first + index - sequence.packed_begin) * p.block_n;
  const int64_t count = min_of<int64_t>(p.block_n, sequence.sk - key);
  const AmxPackedKeys out = packed_keys(p, sequence, head_kv, key);
  *out.nonfinite = {};
  pack_key_rows(out.k_tiles, p, p.k, sequence, batch, head_kv, {key, 0, count}, p.head_dim);
  pack_key_columns(out.v_tiles, may_hide_keys(p) ? out.nonfinite : nullptr, p, p.v, sequence, batch, head_kv,
                   {key, 0, count}, p.head_dim_v);
}

// Keys that are needed soon, prefetched a few at a time: their rows or, if packed ahead, their lines.
class KeysAhead {
 public:
  TESSERA_INLINE KeysAhead(const Params& p, const Sequence& sequence, int64_t batch, int64_t head_kv)
      : p_(p), sequence_(sequence), batch_(batch), head_kv_(head_kv) {}

  // Begins with keys `key` ... + count - 1 of one super-block, prefetched in `steps` steps. `key` is a multiple of 32.
  TESSERA_INLINE void begin(int64_t key, int64_t count, int64_t steps) {
    key_ = key, count_ = max_of<int64_t>(0, count), done_ = 0;
    if (count_ > 0 && packed_ahead(sequence_)) {
      constexpr int64_t kStage_keys = 2 * kTileSide, kTwoTiles_lines = 2 * kTile_bytes / kCacheLine_bytes;
      const int64_t first = key % p_.block_n / kStage_keys, stages = padded_to(count, kStage_keys) / kStage_keys;
      const int64_t k_lines = padded_to(p_.head_dim, kTileSteps_elems) / kTileSteps_elems * kTwoTiles_lines;
      const int64_t groups = padded_to(p_.head_dim_v, 2 * kTileSide) / (2 * kTileSide);
      const AmxPackedKeys keys = packed_keys(p_, sequence_, head_kv_, key / p_.block_n * p_.block_n);
      line_ = keys.k_tiles + first * k_lines * kCacheLine_bytes;
      run_end_ = line_ + stages * k_lines * kCacheLine_bytes;
      next_run_ = keys.v_tiles + first * kTwoTiles_lines * kCacheLine_bytes;
      run_bytes_ = stages * kTwoTiles_lines * kCacheLine_bytes;
      group_bytes_ = p_.block_n / kStage_keys * kTwoTiles_lines * kCacheLine_bytes;
      count_ = stages * (k_lines + groups * kTwoTiles_lines);
    }
    a_step_ = count_ / max_of<int64_t>(1, steps) + 1;
  }

  TESSERA_INLINE void step() {
    const int64_t end = min_of(count_, done_ + a_step_);
    if (packed_ahead(sequence_)) {
      for (; done_ < end; ++done_, line_ += kCacheLine_bytes) {
        if (line_ == run_end_) line_ = next_run_, run_end_ = line_ + run_bytes_, next_run_ += group_bytes_;
        __builtin_prefetch(line_, 0, 2);
      }
      return;
    }
    for (; done_ < end; ++done_) {
      prefetch_row(key_row(p_, p_.k, sequence_, batch_, head_kv_, key_ + done_), p_.head_dim * 2);
      prefetch_row(key_row(p_, p_.v, sequence_, batch_, head_kv_, key_ + done_), p_.head_dim_v * 2);
    }
  }

 private:
  const Params& p_;
  const Sequence& sequence_;
  const int64_t batch_, head_kv_;
  // rows or lines: their number, and how many have been prefetched
  int64_t key_ = 0, count_ = 0, done_ = 0, a_step_ = 0;
  // Runs of adjacent lines: K's, then V's for one group of columns after another.
  const char *line_ = nullptr, *run_end_ = nullptr, *next_run_ = nullptr;
  int64_t run_bytes_ = 0, group_bytes_ = 0;
};

}  // namespace
}  // namespace tessera::cpu
