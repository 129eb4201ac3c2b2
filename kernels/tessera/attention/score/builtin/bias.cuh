// What is added to a score: a bias with an entry for each score, and ALiBi, a bias that is linear in the distance of
// query and key.
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// ---- bias -----------------------------------------------------------------------------------------------------------
//
// A dense bias: s += bias[b, h, i, j].

template <ScoreConfig kCfg>
struct Bias : ScoreOptionDefaults<Bias<kCfg>, kBiasFacts> {
  static constexpr bool kGiven = kCfg.bias;
  static constexpr int kBytes = dtype_bytes(kCfg.bias_dtype), kEntryBytes = kBytes;
  static constexpr bool kPackedAddend = kBytes == 2;
  using Raw = RawPair<kCfg.bias_dtype>;  // of two keys

  struct Row {
    const char* bias;  // of key 0

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& place) {
      const int64 at = p.bias.batch * place.batch + p.bias.head * place.head + p.bias.row * place.query;
      bias = static_cast<const char*>(p.bias.data) + at * kBytes;
    }
  };

  struct Entry {
    float bias = 0.0f;
  };
  template <class ScoreEntry>
  TESSERA_DEVICE static void load_entry(ScoreEntry& entry, const ProblemParams& p, const Row& row, int key) {
    entry.bias = load_element<kCfg.bias_dtype>(row.bias, p.bias.col * key);
  }

  template <int kRows, int kKeys>
  struct Fragment {
    Raw bias[kRows][kKeys];

    TESSERA_DEVICE void load_eights(int row, int k, const Row& from_row, int64 key) {
      const uint4* from = reinterpret_cast<const uint4*>(from_row.bias + key * kBytes);
      uint4 words[kBytes / 2];
#pragma unroll
      for (int i = 0; i < kBytes / 2; ++i) words[i] = from[i];
      const Raw* pairs = reinterpret_cast<const Raw*>(words);
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[row][k + i] = pairs[i];
    }
    template <bool kLaneOrder>
    TESSERA_DEVICE void load_pairs(int row, const Row& from_row, int64 key) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        bias[row][k] = *reinterpret_cast<const Raw*>(from_row.bias + (key + key_at<kLaneOrder>(k, 0)) * kBytes);
      }
    }
    template <class ScoreEntry>
    TESSERA_DEVICE void entry(ScoreEntry& entry, int row, int k, bool second) const {
      const float2 both = unpack_pair<kCfg.bias_dtype>(bias[row][k]);
      entry.bias = second ? both.y : both.x;
    }
    TESSERA_DEVICE void transpose() {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int k = 0; k < kKeys; ++k) bias[row][k] = transposed_pair(bias[row][k]);
    }
  };

  // Biases of kHeld of the kM sets of eight queries. Loaded by pairs of keys, a lane has those of one query in eight,
  // and the lanes of a warp transpose blocks of 8 x 8.
  template <int kM, int kHeld>
  struct KeyFragment {
    Raw bias[kHeld][2];  // of two queries

    template <class Place>
    TESSERA_DEVICE void load_bits(const Place&) {}
    template <int kFirst, class Place>
    TESSERA_DEVICE void load(const Place& at) {
      const ProblemParams& p = at.p;
      const int row0 = at.row0(), head = at.head(), key = at.key(), query = row0 + kFirst * 8;
      if (at.pairs(row0)) {
        const char* from = entry_at(at, head, query + at.lane() / 4, key + at.lane() % 4 * 2);
#pragma unroll
        for (int m = 0; m < kHeld; ++m, from += p.bias.row * (8 * kBytes)) {
          bias[m][0] = *reinterpret_cast<const Raw*>(from);
          bias[m][1] = *reinterpret_cast<const Raw*>(from + 8 * kBytes);
        }
        return;
      }
#pragma unroll
      for (int m = 0; m < kHeld; ++m) {
        reload_memory();  // one after another, to save registers
        const int last = at.sequence().sq - 1;
        const int first = min(query + m * 8 + at.lane() % 4 * 2, last), next = min(first + 1, last);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* from = entry_at(at, head, first, min(key + at.lane() / 4 + half * 8, at.sequence().sk - 1));
          bias[m][half] = joined(from, from + (next - first) * p.bias.row * kBytes);
        }
      }
    }
    template <class Place>
    TESSERA_DEVICE void transpose(const Place& at) {
      if (!at.pairs(at.row0())) return;
#pragma unroll
      for (int m = 0; m < kHeld; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) bias[m][half] = transposed_pair(bias[m][half]);
    }
    template <class ScoreEntry>
    TESSERA_DEVICE void entry(ScoreEntry& entry, int m, int half, int second) const {
      const float2 both = unpack_pair<kCfg.bias_dtype>(bias[m][half]);
      entry.bias = second ? both.y : both.x;
    }
    TESSERA_DEVICE bool hides(int, int, int) const { return false; }

   private:
    template <class Place>
    TESSERA_DEVICE static const char* entry_at(const Place& at, int head, int query, int key) {
      const ScoreTensor& bias = at.p.bias;
      return static_cast<const char*>(bias.data) +
             (bias.batch * at.batch() + bias.head * head + bias.row * query + bias.col * key) * kBytes;
    }
    TESSERA_DEVICE static Raw joined(const char* low, const char* high) {
      if constexpr (kBytes == 2) {
        return static_cast<uint32>(*reinterpret_cast<const unsigned short*>(low)) |
               static_cast<uint32>(*reinterpret_cast<const unsigned short*>(high)) << 16;
      } else {
        return make_float2(*reinterpret_cast<const float*>(low), *reinterpret_cast<const float*>(high));
      }
    }
  };

  template <bool kScaled, bool kFused, class ScoreRow, class ScoreEntry>
  TESSERA_DEVICE static void apply(Score& r, float unit, const Sequence&, const ScoreRow&, int, int,
                                   const ScoreEntry& entry) {
    r.value = add_term<kScaled, kFused>(r.value, unit, entry.bias);
  }

  // ---- gradient: dBias is the sum of dScore over the scores that have one entry in common ----

  template <class Params>
  struct Collector {
    float* d_bias;  // of (b, h, 0, 0), float32

    TESSERA_DEVICE Collector(const Params& p, int batch, int head) {
      d_bias = static_cast<float*>(p.d_bias.data) + p.d_bias.batch * batch + p.d_bias.head * head;
    }
    template <bool kAlone>
    TESSERA_DEVICE void add(const Params& p, float& sum, bool visible, int query, int key, float d) const {
      if (p.d_bias.row == 0) {
        sum += d;
      } else if (visible) {
        add_to<kAlone>(d_bias + p.d_bias.row * query + p.d_bias.col * key, d);
      }
    }
    template <bool kAlone>
    TESSERA_DEVICE void add_sum(const Params& p, int key, float sum) const {
      add_to<kAlone>(d_bias + p.d_bias.col * key, sum);
    }

   private:
    template <bool kAlone>
    TESSERA_DEVICE static void add_to(float* to, float d) {
      if constexpr (kAlone) {
        *to += d;
      } else {
        ptx::red_add_f32(to, d);
      }
    }
  };

  // Adds dScore of one key and two queries, each with its own entries, times `unit`. Hidden entries, whose weight is 0,
  // keep the 0 that the preprocess wrote, because their dScore may be NaN.
  template <class Place>
  TESSERA_DEVICE static void collect_pair(const Place& at, int query, int key, float2 weights, const float (&ds)[2],
                                          float unit) {
    const auto& p = at.p;
    if (key >= at.sequence().sk) return;
    float* to = static_cast<float*>(p.d_bias.data) + p.d_bias.batch * at.batch() + p.d_bias.head * at.head() +
                p.d_bias.row * query + p.d_bias.col * key;
    const bool shared_entries = (p.d_bias.batch == 0 && p.batch > 1) || (p.d_bias.head == 0 && p.heads_q > 1);
#pragma unroll
    for (int e = 0; e < 2; ++e, to += p.d_bias.row) {
      if (query + e >= at.sequence().sq || (e ? weights.y : weights.x) == 0.0f) continue;
      if (shared_entries) {
        ptx::red_add_f32(to, ds[e] * unit);
      } else {
        *to = ds[e] * unit;
      }
    }
  }
};

// ---- ALiBi ----------------------------------------------------------------------------------------------------------
//
// ALiBi: s -= slope_h |i + Sk - Sq - j|, with places in the whole.

template <ScoreConfig kCfg>
struct Alibi : ScoreOptionDefaults<Alibi<kCfg>, kAlibiFacts> {
  static constexpr bool kGiven = kCfg.alibi;

  struct Row {
    float slope;
    int bottom_right;  // with places

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& place) {
      if constexpr (kCfg.sequence_places) {
        bottom_right = SequencePlace(p, place.batch).bottom_right();
      } else if constexpr (kCfg.places) {
        bottom_right = p.bottom_right != kNoPlace ? p.bottom_right : place.len_k - place.len_q;
      }
      slope = p.alibi_slopes[p.alibi_batch * place.batch + p.alibi_head * place.head];
    }
  };

  // The key at distance 0.
  template <class ScoreRow>
  TESSERA_DEVICE static int position(const Sequence& s, const ScoreRow& row) {
    return row.query + (kCfg.places ? row.bottom_right : s.sk - s.sq);
  }
  // Several scores share `key` and its conversion to float32; the compiler knows their offsets from it. The distance is
  // exact, and the slope, of either sign, multiplies it once, as on the CPU.
  template <bool kScaled, bool kFused, class ScoreRow, class ScoreEntry>
  TESSERA_DEVICE static void apply(Score& r, float unit, const Sequence& s, const ScoreRow& row, int key, int offset,
                                   const ScoreEntry&) {
    r.value = add_term<kScaled>(r.value, unit, term(static_cast<float>(position(s, row) - key), row.slope, offset));
  }
  // The term of a key `offset` after the one at distance `from_key`.
  TESSERA_DEVICE static float term(float from_key, float slope, int offset) {
    return -slope * fabsf(from_key - static_cast<float>(offset));
  }

  // Products to scores, if nothing else changes them, of a lane's two rows, of which the second is eight queries after
  // the first: its term for a key is that of the first for the key eight before.
  static constexpr bool kAlone = kCfg.alibi && !kCfg.softcap && !kCfg.bias && !kCfg.program;
  template <int kN, class ScoreRow>
  TESSERA_DEVICE static void apply_rows(float (&s)[kN][4], float unit, const Sequence& sequence, const ScoreRow& first,
                                        int key) {
    const float from_key = static_cast<float>(position(sequence, first) - key);
    float second[2] = {term(from_key, first.slope, -8), term(from_key, first.slope, -7)};
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_first = term(from_key, first.slope, n * 8 + e);
        s[n][e] = add_term<false>(s[n][e], unit, of_first);
        s[n][2 + e] = add_term<false>(s[n][2 + e], unit, second[e]);
        second[e] = of_first;
      }
  }
};

}  // namespace tessera
