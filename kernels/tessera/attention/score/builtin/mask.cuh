// A boolean mask with a byte for each score: s = -inf where mask[b, h, i, j] is 0.
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/attention/score/transposed.cuh"

namespace tessera {

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

}  // namespace tessera
