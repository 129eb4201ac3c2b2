// Masks that are tensors: with an entry for each score or for each block of scores, or, for drafted tokens, with a bit
// for each of the last keys.
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// ---- a mask with an entry for each score ----------------------------------------------------------------------------
//
// A boolean mask with a byte for each score: s = -inf where mask[b, h, i, j] is 0.

template <ScoreConfig kCfg>
struct Mask : ScoreOptionDefaults<Mask<kCfg>, kMaskFacts> {
  static constexpr bool kGiven = kCfg.mask;
  static constexpr int kEntryBytes = 1;

  struct Row {
    const char* mask;  // of key 0

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& place) {
      mask = static_cast<const char*>(p.mask.data) + p.mask.batch * place.batch + p.mask.head * place.head +
             p.mask.row * place.query;
    }
  };

  template <class ScoreEntry>
  TESSERA_DEVICE static void load_entry(ScoreEntry& entry, const ProblemParams& p, const Row& row, int key) {
    entry.visible &= row.mask[p.mask.col * key] != 0;
  }

  template <int kRows, int kKeys>
  struct Fragment {
    uint32 mask[kRows][kKeys / 2];  // a byte for each key, of two blocks

    TESSERA_DEVICE void load_eights(int row, int k, const Row& from_row, int64 key) {
      const uint2 words = *reinterpret_cast<const uint2*>(from_row.mask + key);
      mask[row][k / 2] = words.x, mask[row][k / 2 + 1] = words.y;
    }
    template <bool kLaneOrder>
    TESSERA_DEVICE void load_pairs(int row, const Row& from_row, int64 key) {
#pragma unroll
      for (int k = 0; k < kKeys; k += 2) {
        const auto both = [&](int of) {
          return *reinterpret_cast<const unsigned short*>(from_row.mask + (key + key_at<kLaneOrder>(of, 0)));
        };
        mask[row][k / 2] = both(k) | static_cast<uint32>(both(k + 1)) << 16;
      }
    }
    template <class ScoreEntry>
    TESSERA_DEVICE void entry(ScoreEntry& entry, int row, int k, bool second) const {
      entry.visible &= (mask[row][k / 2] & (0xffu << (k % 2 * 16 + (second ? 8 : 0)))) != 0;
    }
    TESSERA_DEVICE void transpose() {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int k = 0; k < kKeys / 2; ++k) {
          uint32& bytes = mask[row][k];
          const uint32 first = transposed_bytes(bytes);
          const uint32 second = ptx::movmatrix_trans(__byte_perm(bytes, 0, 0x4342));
          bytes = __byte_perm(first, second, 0x6420);
        }
    }
  };

  // A bit for each score, set where it is hidden: for eight queries m and key `half`, bit 2 m + half is the first
  // query's and bit 2 m + half + 16 the second's.
  template <int kM, int kHeld>
  struct KeyFragment : ScoreOptionDefaults<Mask, kMaskFacts>::template KeyFragment<kM, kHeld> {
    static_assert(kM * 4 <= 32, "a bit for each score");
    uint32 hidden;

    TESSERA_DEVICE static constexpr uint32 bit(int m, int half, int e) { return 1u << (2 * m + half + 16 * e); }
    TESSERA_DEVICE bool hides(int m, int half, int e) const { return (hidden & bit(m, half, e)) != 0; }

    template <class Place>
    TESSERA_DEVICE void load_bits(const Place& at) {
      const ProblemParams& p = at.p;
      const int row0 = at.row0(), head = at.head(), key = at.key();
      hidden = 0;
      if (at.pairs(row0)) {
        const char* from = entry_at(at, head, row0 + at.lane() / 4, key + at.lane() % 4 * 2);
#pragma unroll 4
        for (int m = 0; m < kM; ++m, from += p.mask.row * 8) {
          const uint32 first = *reinterpret_cast<const unsigned short*>(from);
          const uint32 second = *reinterpret_cast<const unsigned short*>(from + 8);
          const uint32 a = transposed_bytes(first), b = transposed_bytes(second);
          const uint32 bits =
              (a & 0xffff ? 0u : 1u) | (a >> 16 ? 0u : 1u << 16) | (b & 0xffff ? 0u : 2u) | (b >> 16 ? 0u : 2u << 16);
          hidden |= bits << (2 * m);
        }
        return;
      }
#pragma unroll 1
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int query = min(row0 + m * 8 + at.lane() % 4 * 2 + i % 2, at.sequence().sq - 1);
          const int of_key = min(key + at.lane() / 4 + i / 2 * 8, at.sequence().sk - 1);
          if (*entry_at(at, head, query, of_key) == 0) hidden |= bit(0, i / 2, i % 2) << (2 * m);
        }
      }
    }

   private:
    template <class Place>
    TESSERA_DEVICE static const char* entry_at(const Place& at, int head, int query, int key) {
      const ScoreTensor& mask = at.p.mask;
      return static_cast<const char*>(mask.data) +
             (mask.batch * at.batch() + mask.head * head + mask.row * query + mask.col * key);
    }
  };
};

// ---- a block mask ---------------------------------------------------------------------------------------------------
//
// A block mask: s = -inf where block_mask[b, h, i / block_q, j / block_k] is 0. Kernels that use lists of blocks
// (block_lists/kernel.cuh) skip the hidden blocks instead.

template <ScoreConfig kCfg>
struct BlockMask : ScoreOptionDefaults<BlockMask<kCfg>, kBlockMaskFacts> {
  static constexpr bool kGiven = kCfg.block_mask;

  struct Row {
    const char* block_mask;  // of key 0

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& place) {
      block_mask = static_cast<const char*>(p.block_mask.data) + p.block_mask.batch * place.batch +
                   p.block_mask.head * place.head + p.block_mask.row * (place.query / p.mask_block_q);
    }
  };

  template <class ScoreEntry>
  TESSERA_DEVICE static void load_entry(ScoreEntry& entry, const ProblemParams& p, const Row& row, int key) {
    entry.visible &= row.block_mask[p.block_mask.col * (key / p.mask_block_k)] != 0;
  }
};

// ---- the tree mask of drafted tokens --------------------------------------------------------------------------------
//
// The tree mask of drafted tokens: for each query a bit for every key from Sk - Sq on, which says whether the query
// sees it. Earlier keys are visible, so that only the last tiles of keys apply it.

// Bits `bit` ... bit + 31 of a query's words; bits outside the words are 1.
TESSERA_DEVICE uint32 tree_bits(const PositionMasks& masks, const uint32* row, int bit) {
  const int at = bit >> 5;
  const auto word = [&](int n) { return n >= 0 && n < masks.tree_words ? row[n * masks.tree_mask_word] : ~uint32{}; };
  return __funnelshift_r(word(at), word(at + 1), bit);
}

template <ScoreConfig kCfg>
struct TreeMask : ScoreOptionDefaults<TreeMask<kCfg>, ScoreFacts{}> {
  static constexpr bool kGiven = kCfg.tree_mask;
  static constexpr bool kHidesByPosition = true;

  // All queries see all keys only before Sk - Sq.
  template <class TileRange>
  TESSERA_DEVICE static void range(TileRange& range, const Sequence& s) {
    range.all.high = min(range.all.high, s.sk - s.sq - 1);
  }

  // A lane's scores of one row, in tiles of 8 keys from key0 on.
  template <bool kLaneOrder, int kN, class Params>
  TESSERA_DEVICE static void hide(float (&s)[kN][4], int half, const Params& p, const Sequence& sequence, int batch,
                                  int query, int key0) {
    const PositionMasks& masks = p.masks;
    const int bit0 = key0 - (sequence.sk - sequence.sq);
    if (bit0 + kN * 8 <= 0) return;
    const uint32* row = masks.tree_mask + masks.tree_mask_batch * batch +
                        masks.tree_mask_row * (static_cast<int64>(sequence.q_begin) + query);
#pragma unroll
    for (int group = 0; group < kN; group += 4) {
      const uint32 bits = tree_bits(masks, row, bit0 + group * 8) >> key_at<kLaneOrder>(0, lane_col());
#pragma unroll
      for (int n = group; n < min(group + 4, kN); ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!(bits >> key_at<kLaneOrder>(n - group, e) & 1)) s[n][2 * half + e] = -infinity();
        }
    }
  }
};

}  // namespace tessera
