// The table: lengths around tile edges, head sizes, every option alone, every pair of option values together, decoding
// shapes, and numbers that are difficult for a softmax.
#include <array>
#include <iterator>
#include <random>
#include <set>
#include <string>

#include "case.hpp"
#include "core/score/definitions.hpp"
#include "tessera/tessera.h"

namespace tessera::testing {
namespace {

constexpr int64_t kDtypes[] = {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16};
constexpr int64_t kHeadDims[] = {1, 8, 17, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512};
constexpr int64_t kLengths[] = {0,  1,  2,  15, 16,  17,  23,  24,  25,  47,  48,  49,  63, 64,
                                65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257};

class Table {
 public:
  void add(Case c) {
    c = legalised(c);
    c.seed = static_cast<int64_t>(cases_.size()) + 1;
    cases_.push_back(c);
  }
  // A line of to_text, once for each dtype.
  void add(const char* line) {
    for (const int64_t dtype : kDtypes) {
      Case c = *parse_case(line, nullptr);
      c.dtype = dtype;
      add(c);
    }
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

// Every length as Sq and as Sk, against a length some steps away in the list: full and causal alternately.
void add_lengths(Table& table) {
  constexpr size_t kCount = std::size(kLengths);
  for (const int64_t dtype : kDtypes) {
    for (size_t n = 0; n < kCount; ++n) {
      Case c{.dtype = dtype, .b = 2, .sq = kLengths[n], .sk = kLengths[n], .hq = 2, .hkv = 1, .d = 64, .dv = 64};
      c.backward = 1;
      c.causal = 1;
      table.add(c);
      c.sk = kLengths[(n * 7 + 5) % kCount];
      c.causal = n % 3 == 0;
      c.top_left = n % 6 == 0;
      c.d = c.dv = 24;
      table.add(c);
    }
  }
}

void add_head_dims(Table& table) {
  constexpr size_t kCount = std::size(kHeadDims);
  for (const int64_t dtype : kDtypes) {
    for (size_t n = 0; n < kCount; ++n) {
      Case c{.dtype = dtype, .b = 1, .sq = 65, .sk = 97, .hq = 2, .hkv = 2, .d = kHeadDims[n], .dv = kHeadDims[n]};
      c.backward = 1;
      table.add(c);
      c.dv = kHeadDims[(n + 4) % kCount];
      c.causal = 1;
      c.hkv = 1;
      table.add(c);
    }
    table.add({.dtype = dtype,
               .b = 1,
               .sq = 50,
               .sk = 70,
               .hq = 2,
               .hkv = 1,
               .d = 576,
               .dv = 512,
               .backward = 1,
               .causal = 1});
  }
}

// One option at a time, over more than one tile in both directions.
constexpr const char* kOptions[] = {
    "wl=10 wr=0",
    "wl=0 wr=0",
    "wl=30 wr=20",
    "wr=5",
    "wl=17",
    "wl=200 wr=0",
    "causal=1 wl=16",
    "causal=1 top_left=1",
    "wl=8 wr=8 top_left=1",
    "causal_seqs=1",
    "causal_seqs=1 top_left=1 wl=30",
    "causal_seqs=1 q=packed k=packed used=1",
    "mask=k",
    "mask=qk",
    "mask=hk",
    "mask=hqk",
    "mask=bk",
    "mask=bqk",
    "mask=bhk",
    "mask=bhqk",
    "block_mask=k",
    "block_mask=hk block_q=32 block_k=64",
    "block_mask=bk block_q=7 block_k=13",
    "block_mask=bhk",
    "block_mask=hqk block_q=7 block_k=32",
    "used=1",
    "used=1 causal=1",
    "bias=k d_bias=1",
    "bias=qk d_bias=1",
    "bias=hk d_bias=1",
    "bias=hqk d_bias=1",
    "bias=bk d_bias=1",
    "bias=bqk d_bias=1",
    "bias=bhk d_bias=1",
    "bias=bhqk d_bias=1",
    "bias=hqk bias_f32=1 d_bias=1",
    "bias=k bias_f32=1",
    "bias=bhqk bias_f32=1 gap=3",
    "alibi=h",
    "alibi=bh",
    "alibi=h causal=1",
    "softcap=2",
    "softcap=30",
    "sink=1 d_sink=1",
    "sink=1 causal=1 top_left=1",
    "dropout=0.1",
    "dropout=0.5 causal=1",
    "dropout=0.99",
    "d_lse=1",
    "sink=1 d_sink=1 d_lse=1",
    "scale=-0.3",
    "scale=0",
    "scale=1",
    "order=bhsd",
    "order=sbhd",
    "gap=1",
    "gap=5 order=bhsd",
    "reversed=1",
    "reversed=1 gap=3 order=sbhd",
    "shared_kv=1",
    "low=1",
    "low=1 causal=1 top_left=1 q=packed k=packed lead=3 tail=70",
    "low=1 bias=bhqk d_bias=1 sink=1 d_sink=1 d_lse=1 gap=1 order=bhsd",
    "sink=2 d_sink=1",
    "sink=2 d_sink=1 low=1 d_lse=1 causal=1",
    "dropout=0.3 state=1 low=1",
    "state=1",
    "q=packed k=packed",
    "q=packed k=packed causal=1",
    "q=packed k=packed used=1 gap=1",
    "q=packed",
    "k=packed causal=1",
    "q=packed k=packed order=bhsd d_lse=1",
    "q=packed k=packed bias=bhqk d_bias=1",
    "q=packed k=packed mask=bqk",
    "q=packed k=packed wl=9 wr=4 block_mask=bk",
    "q=packed k=packed lead=5 tail=0",
    "q=packed k=packed lead=200 tail=300 causal=1 gap=3",
    "q=packed k=packed lead=64 tail=128 used=1",
    "q=packed lead=1 tail=129",
    "k=packed lead=130 tail=70",
    "q=packed k=packed lead=33 tail=33 sink=1 d_sink=1 bias=bhqk d_bias=1 deterministic=1",
    "cores=1",
    "cores=16",
    "cores=5 causal=1",
    "causal=1 first_q=70 after_q=3 first_k=40 after_k=20",
    "causal=1 first_q=70 after_q=3 first_k=130 after_k=60",
    "causal=1 top_left=1 first_q=50 first_k=77 after_k=9",
    "wl=20 wr=10 first_q=33 after_q=1 first_k=1 after_k=41",
    "wl=60 top_left=1 first_q=90 first_k=64 after_k=1 gap=3",
    "alibi=bh first_q=100 after_q=5 first_k=64 after_k=200",
    "alibi=h causal=1 top_left=1 first_q=100 first_k=64 after_k=200 first_kv=1",
    "dropout=0.3 first_q=45 first_k=96 after_k=3 first_kv=2 first_b=3",
    "dropout=0.3 state=1 causal=1 first_q=64 first_k=32 alibi=h",
    "dropout=0.3 first_kv=1 q=packed k=packed",
    "dropout=0.3 alibi=bh first_kv=1 first_b=2",
    "causal=1 first_q=20 after_q=10 first_k=20 after_k=10 q=packed k=packed",
    "causal=1 first_q=20 after_q=10 first_k=20 after_k=10 used=1 sink=1 d_sink=1 d_lse=1 low=1",
    "causal=1 alibi=bh dropout=0.2 places=1 first_k=32 after_q=2 after_k=11 q=packed k=packed gap=3",
    "wl=30 wr=9 places=1 first_q=40 first_k=7 bias=bhqk d_bias=1 mask=hqk block_mask=bk deterministic=1",
};

constexpr const char* kForwardOptions[] = {
    "k=paged",
    "k=paged page=1",
    "k=paged page=7 causal=1",
    "k=paged page=64 gap=3",
    "k=paged page=256 q=packed",
    "k=paged page=16 causal=1 alibi=h first_q=30 first_k=24 after_k=6",
    "sq=1 causal=1 first_q=90 first_k=64 after_k=26",
    "sq=2 hq=4 hkv=2 sk=500 wl=300 alibi=bh places=1 first_q=1400 first_k=1000 after_k=500",
    "k=paged page=16 q=packed lead=3 tail=150",
    "k=paged page=16 csr=1",
    "tree=1",
    "tree=2 causal=1",
    "tree=1 q=packed k=packed used=1 lead=3",
    "tree=3 k=paged page=7 q=packed causal_seqs=1 gap=3",
    "tree=2 wl=20 wr=3 sink=1 softcap=9",
    "tree=2 bias=bhqk mask=bqk alibi=bh order=bhsd",
    "tree=1 dropout=0.3 causal=1 gap=2",
    "tree=2 block_mask=bk invariant=1",
    "k=paged page=1 csr=1 q=packed causal=1",
    "k=paged page=7 csr=1 gap=3 order=bhsd bias=bhqk",
    "k=paged page=48 csr=1 q=packed lead=3 causal=1",
    "k=paged page=32 order=sbhd gap=8",
    "invariant=1 q=packed k=packed lead=70 tail=260",
    "k=paged page=128 bias=bhqk",
    "k=paged wl=20 wr=3 sink=1",
    "lse=0",
    "lse=0 causal=1",
    "invariant=1",
    "invariant=1 q=packed k=packed causal=1",
};

constexpr const char* kMoreQueriesThanKeys[] = {
    "causal=1",
    "causal=1 top_left=1",
    "wr=5",
    "wl=5",
    "wl=0 wr=0",
    "wl=20 wr=7 top_left=1",
    "wr=5 used=1 q=packed",
    "causal=1 sink=1 d_sink=1 q=packed k=packed",
    "alibi=bh",
    "mask=bhqk bias=hqk d_bias=1 q=packed",
};

// Biases and masks of tiles that every row sees fully, where kernels read several keys' entries at once.
constexpr const char* kEntries[] = {
    "bias=bhqk",
    "mask=hqk",
    "mask=bhqk bias=hqk bias_f32=1",
    "bias=hqk d_bias=1 causal=1",
    "mask=qk bias=k dropout=0.2",
    "bias=hqk alibi=h softcap=9",
    "dtype=f16 bias=qk wl=100 wr=30",
    "dtype=f32 bias=hqk mask=k",
};

// Rows of 8, of 2 and of single keys.
void add_entries(Table& table) {
  for (const char* entries : kEntries)
    for (const char* keys : {"sk=136", "sk=138", "sk=137"})
      for (const char* dims : {"d=64 dv=64", "d=128 dv=128", "d=256 dv=256"})
        table.add(
            (std::string("dtype=bf16 backward=1 b=2 sq=130 hq=2 hkv=1 ") + keys + " " + dims + " " + entries).c_str());
}

void add_options(Table& table) {
  for (const char* option : kOptions)
    table.add((std::string(option) + " backward=1 b=3 sq=70 sk=140 hq=4 hkv=2 d=32 dv=40").c_str());
  // More queries than keys: with a diagonal that starts left of the keys, some queries see nothing.
  for (const char* option : kMoreQueriesThanKeys)
    table.add((std::string(option) + " backward=1 b=2 sq=130 sk=37 hq=4 hkv=2 d=32 dv=40").c_str());
  for (const char* option : kForwardOptions)
    table.add((std::string(option) + " b=3 sq=70 sk=140 hq=4 hkv=2 d=32 dv=40").c_str());
}

constexpr const char* kDecode[] = {
    "b=1 sq=1 sk=1000 hq=8 hkv=2 d=128 dv=128",
    "b=2 sq=1 sk=4001 hq=4 hkv=4 d=64 dv=64 cores=8",
    "b=3 sq=1 sk=700 hq=8 hkv=1 d=64 dv=64 k=paged page=16",
    "b=3 sq=4 sk=700 hq=8 hkv=2 d=64 dv=64 k=paged page=16 tree=1",
    "b=4 sq=8 sk=900 hq=8 hkv=8 d=128 dv=128 tree=1 causal=1 used=1 cores=7",
    "b=4 few=7 sq=40 sk=600 hq=4 hkv=2 d=64 dv=64 q=packed k=paged page=16 tree=2 causal=1 alibi=h cores=7",
    "data=nan_value b=3 sq=6 sk=300 hq=4 hkv=2 d=64 dv=64 tree=1 causal=1",
    "data=nan_key b=3 sq=60 sk=300 hq=4 hkv=2 d=64 dv=64 tree=2",
    "b=4 sq=1 sk=700 hq=8 hkv=2 d=64 dv=64 k=paged page=16 csr=1",
    "b=5 sq=2 sk=500 hq=8 hkv=1 d=128 dv=128 k=paged page=1 csr=1 causal=1 q=packed cores=7",
    "b=3 sq=2 sk=515 hq=6 hkv=2 d=80 dv=48 causal=1 used=1",
    "b=4 sq=4 sk=333 hq=4 hkv=1 d=40 dv=40 causal=1 k=paged page=32 q=packed cores=7",
    "b=3 sq=2 sk=2000 hq=4 hkv=2 d=64 dv=64 causal=1 k=packed q=packed lead=9 tail=40 cores=8",
    "b=1 sq=1 sk=4000 hq=4 hkv=4 d=64 dv=64 q=packed lead=2 tail=7 cores=16",
    "b=2 sq=1 sk=900 hq=8 hkv=2 d=64 dv=64 wl=100 wr=0",
    "b=2 sq=1 sk=900 hq=8 hkv=2 d=64 dv=64 bias=bhk mask=bhk sink=1 softcap=5 alibi=bh cores=4",
    "b=2 sq=3 sk=900 hq=8 hkv=2 d=64 dv=64 dropout=0.3 block_mask=hk",
    "b=2 sq=1 sk=2000 hq=4 hkv=1 d=256 dv=256 invariant=1 cores=16",
    "b=2 sq=1 sk=600 hq=2 hkv=2 d=17 dv=33 reversed=1 gap=3",
    "b=2 sq=1 sk=600 hq=16 hkv=1 d=576 dv=512 k=paged page=64 cores=4",
    "b=3 sq=50 sk=400 hq=4 hkv=1 d=576 dv=512 q=packed k=paged page=16 causal=1 cores=4",
    "b=2 sq=1 sk=800 hq=4 hkv=1 d=64 dv=64 data=growing cores=4",
    // Several work tiles of decode_sm90 for a head's rows, side by side; sequences with fewer.
    "b=5 sq=8 sk=900 hq=16 hkv=4 d=128 dv=128 k=paged page=16 causal=1",
    "b=7 few=8 sq=16 sk=700 hq=16 hkv=4 d=128 dv=128 q=packed k=paged page=16 causal=1 cores=9",
    "b=2 sq=16 sk=800 hq=20 hkv=5 d=64 dv=64 causal=1 used=1",
    "b=3 sq=6 sk=900 hq=10 hkv=2 d=256 dv=256 k=paged page=64 cores=11",
    // So many parts of a work tile that they are merged in two levels: groups that begin within a range, and a last
    // one with a part left over.
    "b=2 sq=1 sk=4200 hq=8 hkv=1 d=128 dv=128 k=paged page=16 cores=100",
    "b=1 sq=4 sk=3137 hq=8 hkv=2 d=64 dv=64 k=paged page=16 causal=1 sink=2 low=1 cores=98",
    // Parts of keys that the blocks of a cluster merge: several clusters, one; rows of several consumers, of a last
    // tile, of no part; packed, in pages; clusters of two and four.
    "b=1 sq=8 sk=3137 hq=8 hkv=1 d=128 dv=128 causal=1 sink=1 low=1 cores=132",
    "b=1 sq=16 sk=700 hq=16 hkv=1 d=256 dv=256 k=paged page=16 causal=1 cores=132",
    "b=3 sq=6 sk=1100 hq=4 hkv=1 d=64 dv=64 q=packed k=paged page=16 causal=1 cores=132",
    "b=2 sq=5 sk=900 hq=4 hkv=2 d=80 dv=48 causal=1 used=1 cores=132",
    "b=1 sq=100 sk=3000 hq=2 hkv=2 d=64 dv=64 wl=300 wr=0 softcap=5 cores=32",
    "b=1 sq=4 sk=900 hq=8 hkv=1 d=128 dv=128 data=nan_key cores=7",
    // Trees and causal flags by decode_sm90: tiles with and without TMA, one with and without options, parts of one
    // size, all head sizes.
    "b=4 sq=6 sk=900 hq=4 hkv=2 d=128 dv=128 tree=1 causal=1 cores=7",
    "b=3 sq=40 sk=60 hq=2 hkv=2 d=64 dv=64 tree=2 causal=1 used=1 cores=3",
    "b=4 sq=16 sk=700 hq=8 hkv=2 d=128 dv=128 k=paged page=16 csr=1 tree=1 causal=1 cores=7",
    "b=3 sq=5 sk=500 hq=4 hkv=2 d=64 dv=64 k=paged page=32 tree=1 causal=1 softcap=8 alibi=h sink=1 cores=5",
    "b=4 sq=8 sk=1100 hq=4 hkv=2 d=256 dv=256 k=paged page=64 tree=1 causal=1 invariant=1 cores=6",
    "b=3 sq=60 sk=500 hq=2 hkv=2 d=64 dv=64 k=paged page=1 tree=3 causal_seqs=1 cores=5",
    "b=6 sq=16 sk=300 hq=4 hkv=4 d=64 dv=64 causal_seqs=1 top_left=1 used=1 cores=6",
    "b=5 sq=3 sk=2000 hq=8 hkv=2 d=128 dv=128 q=packed k=paged page=64 causal_seqs=1 cores=8",
    "b=5 sq=4 sk=900 hq=4 hkv=1 d=256 dv=256 causal_seqs=1 wl=200 cores=5",
    "b=5 sq=4 sk=900 hq=4 hkv=1 d=80 dv=80 causal_seqs=1 invariant=1 softcap=9 cores=5",
    "b=2 sq=1 sk=800 hq=4 hkv=1 d=64 dv=64 data=nan_key cores=4",
    // Sinks above and below the scores, in every merge of parts; more than three of them.
    "b=2 sq=1 sk=4200 hq=8 hkv=2 d=64 dv=64 sink=2 low=1 cores=16",
    "b=1 sq=60 sk=3000 hq=4 hkv=2 d=64 dv=64 sink=2 low=1 cores=16",
    "b=2 few=2 sq=40 sk=5200 hq=4 hkv=2 d=64 dv=64 q=packed k=paged page=16 causal=1 sink=2 low=1 cores=16",
    "b=2 sq=2 sk=4200 hq=4 hkv=2 d=64 dv=64 data=shared low=1 cores=16",
    "b=1 sq=60 sk=3000 hq=4 hkv=2 d=64 dv=64 data=shared low=1 cores=16",
    "b=2 sq=2 sk=4200 hq=4 hkv=2 d=64 dv=64 softcap=1e5 scale=3e3 alibi=h low=1 cores=16",
};

// Scores of any finite size, and rows whose scores share a large number.
constexpr const char* kLargeScores[] = {
    "data=huge_bias bias=qk low=1 d_bias=1",
    "data=huge_bias bias=bhqk low=1 d_bias=1 bias_f32=1",
    "data=huge_bias bias=hqk bias_f32=1 d_lse=1",
    "data=huge_bias bias=bhqk causal=1 low=1",
    "data=huge_bias bias=bhqk mask=bqk low=1 sink=2 d_sink=1",
    "data=huge_bias bias=bqk alibi=h softcap=8 low=1 dropout=0.2",
    "data=huge_bias bias=k low=1 q=packed k=packed",
    "data=huge_bias bias=bhqk bias_f32=1 wl=40 wr=5 block_mask=bk low=1",
    "data=shared low=1",
    "data=shared low=1 causal=1",
    "data=shared low=1 mask=bqk sink=1 d_sink=1",
    "data=shared low=1 bias=bhqk d_bias=1 dropout=0.1 state=1",
    "data=shared low=1 wl=30 wr=3 q=packed k=packed d_lse=1",
    "data=shared low=1 scale=-1",
    "data=shared",
};

void add_large_scores(Table& table) {
  for (const char* large : kLargeScores) {
    table.add((std::string(large) + " backward=1 b=2 sq=70 sk=140 hq=4 hkv=2 d=32 dv=40").c_str());
    // AMX's tiles and a whole tile of them that sees everything.
    table.add((std::string(large) + " backward=1 b=1 sq=160 sk=200 hq=2 hkv=1 d=64 dv=64 cores=1").c_str());
  }
}

// A step of an engine: chunks of prompts beside sequences with one query or a few, or none.
constexpr const char* kMixed[] = {
    "b=6 few=1 sq=70 sk=300 hq=4 hkv=4 d=64 dv=64 q=packed k=paged page=16 causal=1 cores=4",
    "b=5 few=3 sq=130 sk=2100 hq=8 hkv=2 d=64 dv=64 q=packed k=paged page=16 causal=1 sink=1 cores=8",
    "b=5 few=3 sq=130 sk=1100 hq=8 hkv=2 d=64 dv=64 q=packed k=paged page=16 csr=1 causal=1 cores=8",
    "b=7 few=20 sq=90 sk=200 hq=8 hkv=1 d=40 dv=72 q=packed k=paged page=7 causal=1 alibi=bh lead=5 tail=70",
    "b=6 few=2 sq=200 sk=1500 hq=6 hkv=2 d=80 dv=80 q=packed k=packed wl=300 wr=0 softcap=9 gap=3",
    "b=4 few=4 sq=60 sk=1200 hq=4 hkv=2 d=128 dv=128 q=packed used=1 order=bhsd cores=6",
    "b=5 few=1 sq=33 sk=700 hq=2 hkv=1 d=33 dv=7 q=packed k=packed reversed=1 data=nan_once causal=1",
    "b=6 few=2 sq=50 sk=1100 hq=4 hkv=1 d=64 dv=64 q=packed k=paged page=32 causal=1 invariant=1 cores=5",
    "b=4 few=1 sq=40 sk=3000 hq=20 hkv=1 d=16 dv=16 q=packed k=paged page=64 causal=1",
    "b=6 few=3 sq=70 sk=1500 hq=4 hkv=2 d=64 dv=64 q=packed k=paged page=16 causal_seqs=1 cores=6",
    "b=6 few=4 sq=300 sk=1500 hq=8 hkv=2 d=128 dv=128 q=packed k=paged page=16 tree=1 causal=1 cores=6",
    "b=4 sq=4 sk=900 hq=8 hkv=2 d=128 dv=128 causal_seqs=1 wl=200 cores=6",
    "b=4 sq=200 sk=300 hq=2 hkv=1 d=96 dv=96 causal_seqs=1 softcap=9 bias=bhqk",
    "b=5 few=2 sq=70 sk=500 hq=4 hkv=2 d=64 dv=64 q=packed bias=bhk mask=bk causal=1",
};

// Groups of sequences that share a prefix: of whole pages and not, in chunks that begin within it, of sequences with
// nothing else.
constexpr const char* kPrefixes[] = {
    "b=6 sq=1 sk=1300 prefix=1100 hq=8 hkv=2 d=64 dv=64 k=paged page=16 causal=1 cores=7",
    "b=8 sq=1 sk=900 prefix=900 hq=4 hkv=4 d=128 dv=128 k=paged page=1 cores=4",
    "b=7 sq=1 sk=900 prefix=512 hq=8 hkv=1 d=64 dv=64 k=paged page=64 csr=1 causal=1 q=packed cores=3",
    "b=6 few=3 sq=70 sk=700 prefix=500 hq=4 hkv=2 d=64 dv=64 q=packed k=paged page=16 causal=1 cores=6",
    "b=6 few=3 sq=70 sk=700 prefix=640 hq=4 hkv=2 d=64 dv=64 q=packed k=paged page=7 csr=1 causal_seqs=1 lead=5 "
    "tail=70",
    "b=5 few=20 sq=90 sk=300 prefix=250 hq=8 hkv=2 d=40 dv=72 q=packed k=paged page=48 causal=1 sink=1 softcap=9",
    "b=6 sq=4 sk=500 prefix=400 hq=4 hkv=2 d=64 dv=64 tree=1 k=paged page=16 q=packed sink=1",
    "b=5 sq=4 sk=500 prefix=480 hq=4 hkv=1 d=80 dv=48 tree=1 causal=1 used=1",
    "b=4 sq=1 sk=2000 prefix=1500 hq=4 hkv=1 d=128 dv=128 used=1 cores=8",
    "b=4 sq=3 sk=700 prefix=600 hq=6 hkv=2 d=33 dv=7 used=1 causal=1 gap=3",
    "b=4 few=9 sq=150 sk=400 prefix=300 hq=4 hkv=2 d=64 dv=64 q=packed used=1 causal=1 order=bhsd cores=5",
    "b=5 few=4 sq=60 sk=600 prefix=300 hq=4 hkv=2 d=64 dv=64 q=packed k=packed causal=1 order=bhsd gap=3",
    "b=4 sq=200 sk=300 prefix=260 hq=2 hkv=1 d=96 dv=96 softcap=7 scale=-0.2",
    "b=3 sq=260 sk=400 prefix=390 hq=2 hkv=1 d=128 dv=128 k=paged page=16 causal=1 lse=0",
    "b=1 sq=5 sk=100 prefix=90 hq=2 hkv=2 d=16 dv=16 causal=1",
    "b=0 sq=5 sk=100 prefix=90 hq=2 hkv=2 d=16 dv=16 causal=1",
    "b=5 sq=2 sk=300 prefix=200 hq=4 hkv=1 d=64 dv=64 k=paged page=16 data=nan_key causal=1",
    "b=5 few=9 sq=60 sk=300 prefix=290 hq=4 hkv=1 d=64 dv=64 q=packed k=paged page=16 data=growing causal=1",
    "b=4 sq=2 sk=300 prefix=200 hq=2 hkv=1 d=64 dv=64 used=1 data=huge",
    "b=4 few=9 sq=60 sk=300 prefix=200 hq=2 hkv=1 d=64 dv=64 q=packed k=paged page=32 data=nan_value",
    // By a GPU with many multiprocessors their keys are read in chunks, of which the shorter prefixes leave some empty.
    "b=9 sq=1 sk=1700 prefix=1500 hq=16 hkv=2 d=128 dv=128 k=paged page=16 causal=1",
    "b=8 few=3 sq=40 sk=1300 prefix=1200 hq=4 hkv=1 d=64 dv=64 q=packed k=paged page=64 csr=1 causal=1 lead=5 tail=70",
    "b=6 sq=9 sk=1100 prefix=1000 hq=6 hkv=2 d=128 dv=64 used=1 causal=1 sink=1",
    "b=5 few=4 sq=60 sk=1400 prefix=1300 hq=4 hkv=2 d=256 dv=256 q=packed k=packed causal=1 gap=8",
    "b=7 sq=5 sk=1300 prefix=1299 hq=3 hkv=3 d=96 dv=96 softcap=9 order=bhsd",
    "b=6 sq=5 sk=1500 prefix=1400 hq=8 hkv=1 d=64 dv=64 k=paged page=16 data=nan_key causal=1",
    "b=6 few=5 sq=50 sk=1500 prefix=1400 hq=8 hkv=2 d=128 dv=128 q=packed k=paged page=32 data=growing causal=1",
    "b=6 sq=5 sk=1500 prefix=1400 hq=8 hkv=1 d=64 dv=64 k=paged page=16 data=shared low=1 sink=2 causal=1",
};

// The limits of valid problems: src/core/validate.cpp.
constexpr const char* kFactorEnds[] = {
    "scale=1e18",
    "scale=-1e18 causal=1",
    "scale=1e18 bias=hqk",
    "scale=1e-18 backward=1",
    "softcap=1e18 backward=1",
    "softcap=1e-18 backward=1",
    "softcap=1e-18 scale=1e18 backward=1 causal=1",
    "softcap=1e18 scale=-1e-18 backward=1 alibi=h",
    "softcap=1e18 scale=1e18",
    "softcap=1e18 scale=1e-18 sq=1",
    "softcap=1e-18 scale=1e18 sq=1",
    "scale=1e18 sq=1",
};

// Where a NaN or an infinity in k, v, q or dO must and must not arrive: by position, masks, a bias of -inf, key
// lengths, other sequences and heads; and rows that see nothing.
constexpr const char* kHides[] = {
    "causal=1 sq=100 sk=130",
    "causal=1 sq=130 sk=70",
    "wl=20 wr=10 sq=100 sk=300 hkv=2",
    "mask=hqk sq=70 sk=130",
    "block_mask=bhk sq=70 sk=130",
    "block_mask=hqk block_q=40 block_k=32 sq=100 sk=300",
    "used=1 causal=1 b=3 sq=70 sk=130",
    "q=packed k=packed b=3 causal=1 lead=3 sq=100 sk=130",
    "causal=1 alibi=h softcap=5 sink=1 d_sink=1 sq=100 sk=130",
    "bias=hqk d_bias=1 causal=1 sq=70 sk=130",
    "causal=1 sq=1000 sk=1000 hq=1",
    "wl=100 wr=0 sq=600 sk=1000 hq=1 deterministic=1",
};
constexpr const char* kNonfinite[] = {"nan_key", "nan_once", "nan_value", "inf_value", "nan_query", "nan_d_o"};
constexpr const char* kHidesFromFew[] = {
    "sq=3 causal=1",
    "sq=1 wl=50 wr=0",
    "sq=2 wl=70 wr=0 k=paged page=16",
    "sq=3 causal=1 cores=16",
    "sq=100 causal=1 k=paged page=16",
};

// The types alternate.
void add_nonfinite(Table& table) {
  size_t count = 0;
  const auto add = [&](const std::string& line) {
    Case c = *parse_case(line, nullptr);
    c.dtype = kDtypes[count++ % std::size(kDtypes)];
    table.add(c);
  };
  for (const char* data : kNonfinite) {
    for (const char* hides : kHides) {
      add(std::string("b=1 hq=2 hkv=1 d=32 dv=40 backward=1 ") + hides + " data=" + data);
    }
    for (const char* hides : kHidesFromFew) {
      add(std::string("b=2 sk=900 hq=4 hkv=2 d=64 dv=64 ") + hides + " data=" + data);
    }
  }
}

constexpr const char* kNumerics[] = {
    "data=outlier backward=1 sq=129 sk=257 hq=2 hkv=1 d=64 dv=64",
    "data=outlier backward=1 sq=129 sk=257 hq=2 hkv=1 d=128 dv=128 causal=1",
    "data=growing backward=1 sq=100 sk=300 hq=2 hkv=1 d=64 dv=64",
    "data=growing backward=1 sq=200 sk=200 hq=2 hkv=1 d=64 dv=64 causal=1",
    "data=growing backward=1 sq=100 sk=300 hq=2 hkv=1 d=64 dv=64 scale=-0.125",
    "data=growing sq=100 sk=300 hq=2 hkv=1 d=64 dv=64 softcap=20 alibi=h",
    "data=huge sq=70 sk=200 hq=2 hkv=1 d=32 dv=32",
    "data=huge sq=70 sk=200 hq=2 hkv=1 d=32 dv=32 causal=1 softcap=10",
    "data=nan_query sq=100 sk=130 hq=2 hkv=1 d=32 dv=32",
    "data=nan_query sq=100 sk=130 hq=2 hkv=1 d=32 dv=32 causal=1 q=packed k=packed b=3",
    "data=nan_key sq=100 sk=130 hq=2 hkv=1 d=32 dv=32",
    "data=nan_key sq=100 sk=130 hq=2 hkv=1 d=32 dv=32 causal=1",
    "data=inf_key sq=100 sk=130 hq=2 hkv=1 d=32 dv=32",
    "data=inf_key sq=100 sk=130 hq=2 hkv=1 d=32 dv=32 softcap=5 causal=1",
    "data=inf_value sq=100 sk=130 hq=2 hkv=1 d=32 dv=32",
    "data=inf_bias sq=100 sk=130 hq=2 hkv=1 d=32 dv=32 bias=hqk",
    "data=inf_bias sq=100 sk=130 hq=2 hkv=1 d=32 dv=32 bias=k bias_f32=1 causal=1 sink=1",
    "backward=1 sq=1000 sk=1000 hq=1 hkv=1 d=64 dv=64",
    "backward=1 sq=1000 sk=1000 hq=2 hkv=1 d=32 dv=32 causal=1",
    "backward=1 sq=300 sk=1000 hq=1 hkv=1 d=128 dv=128 wl=100 wr=0",
};

// Gradients with the same bits every time: the order of additions to dQ, dBias and heads that share keys.
constexpr const char* kDeterministic[] = {
    "b=2 sq=200 sk=300 hq=2 hkv=2 d=64 dv=64",
    "b=2 sq=300 sk=300 hq=4 hkv=1 d=128 dv=128 causal=1",
    "b=1 sq=1 sk=500 hq=2 hkv=1 d=64 dv=64",
    "b=3 sq=200 sk=200 hq=4 hkv=2 d=40 dv=72 q=packed k=packed causal=1 gap=3",
    "b=2 sq=150 sk=260 hq=2 hkv=1 d=64 dv=64 wl=40 wr=10 order=sbhd",
    "b=3 sq=130 sk=200 hq=4 hkv=2 d=32 dv=32 bias=hk d_bias=1 sink=1 d_sink=1",
    "b=2 sq=130 sk=200 hq=4 hkv=2 d=64 dv=64 bias=k bias_f32=1 d_bias=1 block_mask=bhk",
    "b=2 sq=130 sk=200 hq=2 hkv=2 d=64 dv=64 dropout=0.25 softcap=3 alibi=bh mask=hqk d_lse=1",
    "b=1 sq=150 sk=150 hq=2 hkv=1 d=256 dv=256 causal=1",
    "b=0 sq=5 sk=7",
};

// ---- pairs: every value of a factor together with every value of every other one ------------------------------------

struct Factor {
  std::vector<std::string> values;  // text to add to a case
};

const Factor kFactors[] = {
    {{"dtype=f32", "dtype=f16", "dtype=bf16"}},
    {{"sq=1", "sq=17", "sq=49", "sq=130"}},
    {{"sk=3", "sk=64", "sk=97", "sk=200"}},
    {{"hq=1 hkv=1", "hq=6 hkv=2", "hq=4 hkv=1", "hq=2 hkv=2"}},
    {{"d=16 dv=16", "d=64 dv=64", "d=40 dv=72", "d=128 dv=128", "d=33 dv=7"}},
    {{"backward=0", "backward=1"}},
    {{"q=dense", "q=packed"}},
    {{"k=dense", "k=packed", "k=paged page=24"}},
    {{"used=0", "used=1"}},
    {{"order=bshd", "order=bhsd", "order=sbhd"}},
    {{"gap=0", "gap=3"}},
    {{"reversed=0", "reversed=1"}},
    {{"causal=0", "causal=1", "causal=1 top_left=1"}},
    {{"wl=-1", "wl=20 wr=10", "wl=5", "wr=40"}},
    {{"mask=none", "mask=k", "mask=hqk", "mask=bqk"}},
    {{"block_mask=none", "block_mask=k block_q=10 block_k=30", "block_mask=bhk"}},
    {{"bias=none", "bias=hqk d_bias=1", "bias=bk bias_f32=1 d_bias=1", "bias=qk"}},
    {{"alibi=none", "alibi=h", "alibi=bh"}},
    {{"softcap=0", "softcap=3"}},
    {{"sink=0", "sink=1 d_sink=1"}},
    {{"dropout=0", "dropout=0.25"}},
    {{"d_lse=0", "d_lse=1"}},
    {{"cores=2", "cores=6"}},
};

// Cases that cover all pairs, found greedily: among some random rows, each time the one that covers the most new pairs.
std::vector<std::string> pairwise_lines() {
  constexpr size_t kCount = std::size(kFactors);
  using Pair = std::array<size_t, 4>;  // factor, value, factor, value
  std::set<Pair> missing;
  for (size_t a = 0; a < kCount; ++a)
    for (size_t b = a + 1; b < kCount; ++b)
      for (size_t x = 0; x < kFactors[a].values.size(); ++x)
        for (size_t y = 0; y < kFactors[b].values.size(); ++y) missing.insert({a, x, b, y});

  std::mt19937_64 random(1);
  std::vector<std::string> lines;
  while (!missing.empty()) {
    std::vector<size_t> best;
    std::vector<Pair> best_pairs;
    constexpr int kTries = 30;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      std::vector<size_t> row(kCount);
      for (size_t a = 0; a < kCount; ++a) row[a] = random() % kFactors[a].values.size();
      const Pair& wanted = *missing.begin();
      row[wanted[0]] = wanted[1];
      row[wanted[2]] = wanted[3];
      std::vector<Pair> pairs;
      for (size_t a = 0; a < kCount; ++a)
        for (size_t b = a + 1; b < kCount; ++b)
          if (missing.contains({a, row[a], b, row[b]})) pairs.push_back({a, row[a], b, row[b]});
      if (pairs.size() > best_pairs.size()) best = row, best_pairs = pairs;
    }
    for (const Pair& pair : best_pairs) missing.erase(pair);
    std::string line = "b=3";
    for (size_t a = 0; a < kCount; ++a) line += " " + kFactors[a].values[best[a]];
    lines.push_back(line);
  }
  return lines;
}

// 8-bit tensors: each line for each of the dtypes below.
constexpr const char* k8BitDtypes[] = {"dtype=bf16 kv=e4m3", "dtype=f16 kv=e5m2", "dtype=bf16 kv=i8",
                                       "dtype=f16 kv=e4m3",  "dtype=e4m3",        "dtype=e5m2"};
constexpr const char* k8Bit[] = {
    "b=2 sq=1 sk=300 hq=8 hkv=2 d=64 dv=64 scales=fine",
    "b=2 sq=3 sk=200 hq=4 hkv=2 d=80 dv=48 scales=bh causal=1 used=1",
    "b=3 sq=1 sk=130 hq=4 hkv=4 d=17 dv=33 k=paged page=16 scales=fine",
    "b=2 sq=4 sk=2100 hq=2 hkv=1 d=64 dv=64 k=paged page=64 scales=fine data=outlier",
    "b=2 sq=2 sk=150 hq=4 hkv=2 d=72 dv=40 data=nan_value causal=1",
    "b=2 sq=1 sk=150 hq=6 hkv=2 d=50 dv=70 k=paged page=9 scales=h low=1 data=shared",
    "b=3 sq=9 sk=200 hq=4 hkv=1 d=40 dv=24 q=packed k=paged page=7 csr=1 few=2 scales=fine wl=20 wr=0",
    "b=3 sq=40 sk=200 hq=4 hkv=1 d=40 dv=24 q=packed k=packed lead=3 scales=fine causal=1 sink=1",
    "b=2 sq=70 sk=300 hq=4 hkv=2 d=64 dv=64 scales=fine causal=1",
    "b=2 sq=200 sk=150 hq=2 hkv=2 d=64 dv=128 scales=bh top_left=1 causal=1 low=1",
    "b=2 sq=65 sk=129 hq=2 hkv=1 d=96 dv=96 scales=h order=bhsd gap=3 softcap=20",
    "b=2 sq=33 sk=97 hq=2 hkv=2 d=32 dv=32 scales=fine gap=1 bias=hqk mask=k reversed=1",
    "b=2 sq=48 sk=256 hq=6 hkv=2 d=128 dv=128 dropout=0.25 alibi=h shared_kv=1 scales=one",
    "b=1 sq=50 sk=70 hq=2 hkv=1 d=576 dv=512 scales=bh",
    "b=1 sq=17 sk=60 hq=1 hkv=1 d=1 dv=1",
    "b=2 sq=9 sk=90 hq=2 hkv=1 d=32 dv=32 data=nan_value causal=1 scales=fine",
    "b=2 sq=40 sk=90 hq=2 hkv=1 d=32 dv=32 data=inf_value causal=1",
    "b=1 sq=5 sk=70 hq=2 hkv=1 d=32 dv=32 data=nan_key wl=16 wr=0 scales=bh",
    "b=1 sq=45 sk=70 hq=2 hkv=1 d=32 dv=32 data=nan_query block_mask=hqk",
    "b=2 sq=2 sk=500 hq=2 hkv=1 d=64 dv=64 data=shared low=1 scales=fine",
    "b=2 sq=40 sk=500 hq=2 hkv=1 d=64 dv=64 data=shared low=1 scales=fine",
    "b=2 sq=20 sk=400 hq=2 hkv=1 d=32 dv=32 data=growing scales=fine tree=1",
};
// For fwd_sm90_fp8: each of its tiles, rings that go round, scales of each shape, options, scores that outgrow what
// they were scaled by, rows whose maxima are negative, and products whose scale is negative.
constexpr const char* kFp8Hopper[] = {
    "dtype=e4m3 b=2 sq=257 sk=300 hq=4 hkv=2 d=128 dv=128 causal=1 scales=bh cores=3",
    "dtype=e4m3 b=2 sq=200 sk=390 hq=4 hkv=2 d=64 dv=64 scales=h sink=1 low=1 cores=3",
    "dtype=e4m3 b=1 sq=150 sk=300 hq=2 hkv=1 d=256 dv=256 causal=1 scales=one",
    "dtype=e4m3 b=1 sq=150 sk=300 hq=2 hkv=1 d=192 dv=128 wl=60 wr=30",
    "dtype=e4m3 b=2 sq=200 sk=200 hq=2 hkv=2 d=192 dv=192 scales=fine top_left=1 causal=1",
    "dtype=e4m3 b=2 sq=150 sk=400 hq=2 hkv=1 d=128 dv=128 scales=fine causal=1",
    "dtype=e4m3 b=3 sq=200 sk=300 hq=4 hkv=1 d=64 dv=64 q=packed k=packed scales=fine causal=1 cores=3",
    "dtype=e4m3 b=2 sq=130 sk=400 hq=2 hkv=1 d=128 dv=64 q=packed k=packed scales=fine wl=70 wr=0 lead=3 sink=2",
    "dtype=e4m3 b=3 sq=200 sk=300 hq=2 hkv=1 d=80 dv=48 used=1 softcap=20",
    "dtype=e4m3 b=2 sq=100 sk=300 hq=2 hkv=2 d=96 dv=160 data=outlier order=bhsd",
    "dtype=e4m3 b=1 sq=70 sk=500 hq=2 hkv=1 d=64 dv=64 data=growing",
    "dtype=e4m3 b=1 sq=70 sk=500 hq=2 hkv=1 d=64 dv=64 data=falling causal_seqs=1",
    "dtype=e4m3 b=1 sq=140 sk=270 hq=2 hkv=1 d=64 dv=64 data=nan_key wl=16 wr=0 scales=bh",
    "dtype=e4m3 b=1 sq=300 sk=150 hq=2 hkv=1 d=64 dv=64 causal=1 tree=1",
    "dtype=e4m3 b=1 sq=300 sk=300 hq=2 hkv=1 d=64 dv=64 wl=1 wr=0",
    "dtype=e4m3 b=1 sq=100 sk=200 hq=2 hkv=1 d=64 dv=64 alibi=h scale=-0.2",
};

// The lengths, heads and options that FlashAttention-3 tests in FP8: one query or key, more queries than keys under a
// causal mask, lengths around tiles, one KV head, a head size of values of its own, windows and softcap.
constexpr const char* kFp8Lengths[] = {
    "dtype=e4m3 b=2 sq=1 sk=1 hq=6 hkv=6 d=64 dv=64 scales=bh",
    "dtype=e4m3 b=2 sq=239 sk=1 hq=6 hkv=1 d=128 dv=128 scales=bh causal=1",
    "dtype=e4m3 b=2 sq=799 sk=3 hq=6 hkv=2 d=128 dv=128 scales=bh",
    "dtype=e4m3 b=2 sq=113 sk=203 hq=6 hkv=6 d=192 dv=128 scales=bh wl=40 wr=9",
    "dtype=e4m3 b=2 sq=640 sk=128 hq=2 hkv=1 d=256 dv=256 scales=bh causal=1",
    "dtype=e4m3 b=1 sq=1023 sk=1024 hq=2 hkv=1 d=128 dv=128 scales=bh causal=1 softcap=15",
    "dtype=e4m3 b=3 sq=108 sk=256 hq=6 hkv=2 d=96 dv=96 q=packed k=packed used=1 scales=bh causal=1",
};

// For decode_sm90's 8-bit caches, each for each of the dtypes below: TMA and cp.async, tiles of 16 and of 32 keys, one
// and several stages, scales of each shape, several work tiles of rows, parts, options, and rows that see nothing.
constexpr const char* kCacheDtypes[] = {"dtype=bf16 kv=e4m3", "dtype=f16 kv=e4m3", "dtype=bf16 kv=e5m2"};
constexpr const char* kDecodeCodes[] = {
    "b=2 sq=1 sk=1500 hq=4 hkv=2 d=128 dv=128 scales=bh cores=5",
    "b=2 sq=1 sk=4500 hq=8 hkv=2 d=128 dv=128 k=paged page=16 scales=fine cores=5",
    "b=5 sq=2 sk=700 hq=4 hkv=2 d=128 dv=128 k=paged page=16 csr=1 causal=1 q=packed lead=2 tail=3 scales=fine cores=5",
    "b=3 sq=1 sk=700 hq=8 hkv=1 d=64 dv=64 k=paged page=32 scales=h low=1",
    "b=2 sq=1 sk=900 hq=2 hkv=2 d=64 dv=64 k=paged page=3 scales=fine cores=2",
    "b=2 sq=2 sk=4300 hq=4 hkv=2 d=64 dv=64 k=paged page=48 scales=fine sink=1 cores=3",
    "b=2 sq=8 sk=600 hq=16 hkv=1 d=256 dv=256 k=paged page=64 causal=1 scales=fine cores=9",
    "b=2 sq=2 sk=300 hq=4 hkv=2 d=256 dv=256 k=paged page=16 causal=1 scales=fine cores=3",
    "b=2 sq=1 sk=200 hq=2 hkv=1 d=256 dv=256 k=paged page=3 scales=fine",
    "b=3 sq=8 sk=500 hq=8 hkv=1 d=128 dv=128 q=packed k=packed few=2 causal=1 scales=fine lead=9 tail=40 cores=7",
    "b=3 sq=2 sk=515 hq=6 hkv=2 d=80 dv=48 causal=1 used=1 scales=one data=outlier",
    "b=2 sq=3 sk=400 hq=4 hkv=2 d=96 dv=160 wl=100 wr=0 scales=fine order=bhsd",
    "b=3 sq=2 sk=1100 hq=4 hkv=2 d=256 dv=256 k=paged page=64 causal=1 invariant=1 scales=fine cores=4",
    "b=2 sq=1 sk=2000 hq=8 hkv=2 d=128 dv=128 invariant=1 scales=h cores=7",
    "b=3 sq=5 sk=500 hq=4 hkv=2 d=64 dv=64 k=paged page=32 tree=1 causal=1 softcap=8 alibi=h scales=fine cores=5",
    "b=2 sq=2 sk=300 hq=2 hkv=1 d=64 dv=64 data=growing scales=fine scale=-0.2",
    "b=2 sq=3 sk=300 hq=2 hkv=1 d=64 dv=64 data=nan_key causal=1 scales=fine",
    "b=2 sq=6 sk=300 hq=4 hkv=2 d=64 dv=64 data=nan_value causal=1 scales=bh",
    "b=4 sq=9 sk=5 hq=2 hkv=1 d=32 dv=32 causal=1 used=1 scales=fine",
    "b=2 sq=3 sk=0 hq=2 hkv=1 d=64 dv=64",
    "b=3 sq=7 sk=5600 hq=4 hkv=1 d=128 dv=128 k=paged page=16 causal=1 scales=fine cores=9",
    "b=2 sq=9 sk=4200 hq=4 hkv=1 d=64 dv=64 k=paged page=64 causal=1 used=1 scales=fine sink=1 cores=5",
    "b=5 few=3 sq=19 sk=600 hq=4 hkv=2 d=128 dv=96 q=packed k=paged page=7 csr=1 causal=1 scales=fine lead=2 cores=7",
    "b=2 sq=6 sk=300 hq=4 hkv=1 d=64 dv=64 data=nan_value causal=1 scales=fine",
    "b=4 sq=3 sk=2100 hq=4 hkv=2 d=64 dv=64 data=nan_key causal=1 scales=fine cores=9",
    "b=2 sq=5 sk=400 hq=8 hkv=2 d=128 dv=128 data=growing scales=fine tree=1 softcap=8 alibi=h scale=-0.2",
    "b=1 sq=8 sk=2000 hq=4 hkv=1 d=64 dv=64 data=outlier scales=bh wl=300 wr=0 low=1 cores=3",
};
// For fwd_sm80's, likewise: its tiles, tiles in lane order, scales of each shape, split keys, packed heads, rows at no
// multiples of 16 bytes, mixed batches, and scales that differ within a tile.
constexpr const char* kPrefillCodes[] = {
    "b=2 sq=150 sk=300 hq=2 hkv=1 d=128 dv=128 causal=1 scales=bh",
    "b=1 sq=140 sk=200 hq=2 hkv=1 d=192 dv=128 wl=60 wr=30 scales=fine",
    "b=1 sq=130 sk=150 hq=1 hkv=1 d=256 dv=256 causal=1 scales=fine",
    "b=2 sq=150 sk=330 hq=2 hkv=2 d=64 dv=64 bias=hqk mask=bk scales=fine",
    "b=3 sq=150 sk=300 hq=4 hkv=2 d=128 dv=128 q=packed k=paged page=16 few=2 causal=1 scales=fine sink=1 lead=3",
    "b=2 sq=140 sk=500 hq=2 hkv=1 d=64 dv=64 q=packed k=paged page=3 csr=1 scales=fine wl=70 wr=0 low=1",
    "b=2 sq=3 sk=1500 hq=4 hkv=2 d=128 dv=128 k=paged page=16 causal=1 scales=fine gap=1 cores=3",
    "b=1 sq=16 sk=1100 hq=2 hkv=2 d=256 dv=256 scales=h causal=1 mask=k cores=40",
    "b=1 sq=140 sk=200 hq=2 hkv=1 d=64 dv=64 data=outlier scales=fine scale=-0.2 softcap=8",
    "b=1 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64 data=nan_key wl=16 wr=0 scales=fine",
    "b=2 sq=150 sk=200 hq=2 hkv=1 d=64 dv=64 q=packed k=packed places=1 first_q=40 first_k=32 alibi=h "
    "dropout=0.2 scales=fine",
};

// Every score program of the table of definitions, in each of these frames: with gradients of its tensors, and without
// for kernels that do not compute these; in float32; with few queries.
constexpr const char* kProgramFrames[] = {
    "dtype=bf16 backward=1 d_captured=1 b=2 sq=40 sk=56 hq=4 hkv=2 d=64 dv=64",
    "dtype=bf16 backward=1 b=2 sq=40 sk=56 hq=4 hkv=2 d=64 dv=64",
    "dtype=f32 backward=1 d_captured=1 deterministic=1 b=2 sq=40 sk=56 hq=4 hkv=2 d=32 dv=32",
    "dtype=bf16 b=2 sq=3 sk=56 hq=4 hkv=2 d=64 dv=64",
};
// Masks, whose lists of visible blocks a GPU makes, over several tiles of queries and of keys.
constexpr const char* kProgramMaskFrame = "dtype=bf16 backward=1 b=2 sq=150 sk=330 hq=4 hkv=2 d=64 dv=64";
// By turns: packed sequences, and lists without room.
constexpr const char* kProgramMaskLists[] = {" q=packed k=packed tail=70", " q=packed k=packed lead=3 lists=3",
                                             " lists=3", " q=packed used=1"};
// By turns: layouts and other options beside a program.
constexpr const char* kProgramLayouts[] = {
    "backward=1 d_captured=1 q=packed k=packed lead=3 tail=70 gap=3 causal=1 low=1",
    "k=paged page=7 csr=1 q=packed used=1 tree=1 reversed=1 captured=bf16",
    "backward=1 d_captured=1 shared_kv=1 dropout=0.2 softcap=5 bias=hqk d_bias=1 alibi=h captured=f16 order=bhsd",
    "backward=1 d_captured=1 sink=1 d_sink=1 d_lse=1 wl=30 wr=9 block_mask=bk gap=1 captured=f16 deterministic=1",
    "backward=1 d_captured=1 mask=hqk bias=bk used=1 order=sbhd data=outlier",
    "invariant=1 k=paged page=16 causal=1 sink=1 captured=f16",
    "bias=hqk data=inf_bias sink=1",
};
// Masks beside scores as they are, which kernels treat as built-in masks, and the same masks beside scores that change:
// scales whose products and scores differ in sign and size, scores that options have made, hidden keys with NaN.
constexpr const char* kHidingPrograms[] = {
    "mask_mod='j < prefix || j <= q_pos' scale=-0.2",
    "mask_mod='j < prefix || j <= q_pos' scale=1e8",
    "mask_mod='j < prefix || j <= q_pos' data=huge_bias bias=bhqk low=1",
    "mask_mod='j < prefix || j <= q_pos' data=nan_key causal=1",
    "mask_mod='s > -0.5 && j <= q_pos + 3' softcap=5 sink=1 d_sink=1",
    "mask_mod='s < 0.5 && doc[b, i] == doc[b, j]' alibi=h d_lse=1 scale=-0.2",
    "mask_mod='(q_pos - j) % 3 != 0' bias=hqk data=inf_bias scale=-0.2",
    "score_mod='s' mask_mod='(q_pos - j) % 3 != 0'",
    "score_mod='-s' mask_mod='j < prefix || j <= q_pos' scale=-0.2",
};
// Over 8-bit caches; on a GPU decode_sm90 serves the first.
constexpr const char* kProgramCaches[] = {
    "dtype=bf16 kv=e4m3 b=2 sq=3 sk=200 hq=4 hkv=2 d=80 dv=48 scales=bh causal=1 used=1",
    "dtype=f16 kv=i8 b=2 sq=40 sk=70 hq=4 hkv=2 d=32 dv=32 scales=fine k=paged page=16",
};
// Parts of a whole.
constexpr const char* kProgramParts[] = {
    "score_mod='s * temperature[h] + relative[h, i - j + len_k]' mask_mod='doc[b, i] == doc[b, j]' first_b=2",
    "score_mod='s + query_bias[b, i] / (1.0 + abs(q_pos - j))' mask_mod='j < used[b]' first_kv=1 q=packed k=packed",
    "score_mod='s + place[i] * place[j]' mask_mod='(q_pos - j) % 3 != 0' places=1 dropout=0.2",
    "score_mod='s + bucket[h, min(abs(i - j), 31)] * h_kv' first_kv=2 first_b=1 gap=3",
};
// Parts whose masks' visible blocks a GPU lists: one place, another for each sequence, no place but heads.
constexpr const char* kProgramPartLists[] = {
    "dtype=f16 hq=2 hkv=1 d=64 dv=64 wl=200 wr=30 first_q=100 first_k=41 after_k=9 mask_mod='(q_pos - j) % 128 < 70'",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 q=packed k=packed places=1 first_q=100 first_k=32 after_q=2 after_k=11 "
    "mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 places=1 causal=1 top_left=1 first_q=40 first_k=7 mask_mod='j < used[b]'",
    "dtype=f16 hq=4 hkv=2 d=64 dv=64 first_kv=1 first_b=2 mask_mod='doc[b, i] == doc[b, j] && (i + h) % 5 != 0'",
};

// Deterministic additions to dQ in an order that lists give: dense and packed, a mask for each head, heads that several
// blocks share, dropout, from the last keys on, on their own and in a part; and, of pools without room, by position.
constexpr const char* kProgramOrders[] = {
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 mask_mod='i // 100 % 3 == j // 130 % 3' lists=7",
    "dtype=f16 hq=2 hkv=1 d=128 dv=128 q=packed k=packed tail=70 mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=f16 hq=2 hkv=1 d=128 dv=128 q=packed k=packed lead=3 lists=2 mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=bf16 hq=4 hkv=1 d=64 dv=64 causal=1 cores=1 mask_mod='(i // 64 + h) % 3 != j // 128 % 3'",
    "dtype=bf16 hq=8 hkv=2 d=96 dv=96 wl=300 wr=60 k=packed mask_mod='(i + h) // 70 % 4 != j // 100 % 4'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 dropout=0.2 mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=f32 hq=4 hkv=2 d=64 dv=64 causal=1 mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=f32 hq=2 hkv=1 d=64 dv=64 lists=7 d_captured=1 score_mod='s * temperature[h]' "
    "mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=f16 hq=2 hkv=2 d=64 dv=64 used=1 block_mask=qk block_q=64 block_k=64 mask_mod='(i - j) % 300 < 200'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 block_mask=hqk block_q=64 block_k=128 mask_mod='(q_pos - j) % 300 < 200'",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 places=1 first_q=40 first_k=7 top_left=1 causal=1 "
    "mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=bf16 hq=2 hkv=1 d=256 dv=256 mask_mod='i // 100 % 3 == j // 130 % 3'",
};
// Head sizes above 128, whose blocks work in pairs, with and without lists.
constexpr const char* kProgramPairs[] = {
    "dtype=bf16 hq=4 hkv=2 d=256 dv=256 mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=f16 hq=2 hkv=1 d=256 dv=256 q=packed k=packed lead=3 tail=9 lists=2 mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=bf16 hq=2 hkv=1 d=256 dv=256 q=packed k=packed lead=3 tail=9 mask_mod='i // 400 == j // 400'",
    "dtype=bf16 hq=2 hkv=1 d=192 dv=128 causal=1 score_mod='s * temperature[h] + relative[h, i - j + len_k]'",
    "dtype=f16 hq=2 hkv=2 d=192 dv=192 used=1 score_mod='s * temperature[h]' mask_mod='(i + h) // 70 % 4 != j // 99 % "
    "4'",
    "dtype=bf16 hq=2 hkv=2 d=256 dv=256 deterministic=1 score_mod='s + place[i] * place[j]'",
    "dtype=bf16 hq=2 hkv=2 d=192 dv=192 dropout=0.2 mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=bf16 hq=2 hkv=1 d=256 dv=256 block_mask=hqk block_q=64 block_k=128 mask_mod='(q_pos - j) % 300 < 200'",
    "dtype=bf16 hq=2 hkv=1 d=200 dv=256 data=outlier score_mod='s + 0.5 * temperature[h]'",
};
// Forward over pages, beside a tree mask, and without regard to the rest of the batch.
constexpr const char* kProgramPages[] = {
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 k=paged page=16 mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=f16 hq=2 hkv=1 d=128 dv=128 q=packed k=paged page=64 csr=1 causal=1 mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 q=packed k=paged page=48 lists=3 wl=300 wr=0 mask_mod='(q_pos - j) % 300 < 200'",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 k=paged page=7 mask_mod='(q_pos + h) // 64 % 3 != j // 128 % 3'",
    "dtype=f32 hq=2 hkv=1 d=32 dv=32 k=paged page=16 csr=1 mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 tree=1 causal=1 mask_mod='i // 64 % 3 != j // 128 % 3'",
    "dtype=f16 hq=2 hkv=1 d=128 dv=128 q=packed k=paged page=16 tree=1 causal=1 mask_mod='(q_pos - j) % 300 < 200'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 invariant=1 q=packed k=paged page=16 causal=1 "
    "mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=f32 hq=2 hkv=1 d=64 dv=64 invariant=1 tree=1 causal=1 mask_mod='i // 64 % 3 != j // 128 % 3'",
};
// A score and a mask in one program, over several tiles: values of the head, the query, the key and i - j, which
// kernels compute once for the pairs that share them; packed sequences, pages, lists without room, rows without a key,
// masks by the score, a divisor that is a power of two, and queries past a tile's last.
constexpr const char* kProgramBoth[] = {
    "dtype=bf16 backward=1 hq=4 hkv=2 d=128 dv=128 causal=1 "
    "score_mod='50 * tanh((s + relative[h, i - j + len_k]) / 50)' mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=bf16 backward=1 hq=4 hkv=2 d=64 dv=64 q=packed k=packed lead=3 tail=70 "
    "score_mod='s * temperature[h] + slope[h] * (j - i)' mask_mod='(q_pos - j) % 16 != 0 && abs(q_pos - j) < 150'",
    "dtype=f16 backward=1 hq=4 hkv=1 d=128 dv=128 lists=3 score_mod='s + query_bias[b, i] + key_bias[b, j]' "
    "mask_mod='i // 64 % 2 == 0 && doc[b, i] == doc[b, j]'",
    "dtype=bf16 backward=1 hq=2 hkv=2 d=64 dv=64 sink=1 d_sink=1 "
    "score_mod='s + slope[h] * abs(i - j) + bucket[h, min(abs(i - j), 31)]' mask_mod='i % 70 > 9 && j < used[b]'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 k=paged page=16 score_mod='s + log(decay[h]) * (q_pos - j) + place[j]' "
    "mask_mod='(i - j) // 32 % 3 != 1'",
    "dtype=f16 hq=2 hkv=1 d=64 dv=64 q=packed k=paged page=48 causal=1 score_mod='s * temperature[h] + place[i]' "
    "mask_mod='s < 1.0 && (i - j) % 5 != 0'",
    "dtype=f32 backward=1 d_captured=1 hq=4 hkv=2 d=64 dv=64 score_mod='s + relative[h, i - j + len_k] * place[j]' "
    "mask_mod='j <= q_pos && (j - i) % 8 != 3'",
    "dtype=f16 hq=8 hkv=2 d=64 dv=64 q=packed k=packed tail=70 "  // a tanh of small and of large operands
    "score_mod='temperature[h] * tanh(s / 2 + relative[h, i - j + len_k])'",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 scale=2 causal=1 score_mod='t * tanh(s / t)'",
    "dtype=bf16 backward=1 hq=2 hkv=1 d=64 dv=64 score_mod='tanh(s) * 3' mask_mod='s < 0.5'",
};

// Elements that belong to i - j, over several tiles: inside their tensors for all pairs of a tile, or before the first
// or after the last element for pairs that are hidden; steps in either direction, of both in one program, narrow
// types, a mask by the score, packed sequences, pages, parts, and lengths that are no multiples of a tile.
constexpr const char* kProgramDistances[] = {
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 causal=1 score_mod='s + relative[h, q_pos - j]'",
    "dtype=f16 hq=2 hkv=1 d=128 dv=128 causal=1 score_mod='s + relative[h, j - q_pos + 2 * len_k - 1]'",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 wl=70 wr=30 score_mod='s + relative[h, q_pos - j + 30]'",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 wl=70 wr=30 q=packed k=packed lead=3 tail=9 "
    "score_mod='s + relative[h, 70 - (q_pos - j)]'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 causal=1 score_mod='50 * tanh((s + relative[h, q_pos - j]) / 50)' "
    "mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=f16 hq=4 hkv=2 d=256 dv=256 causal=1 captured=f16 "
    "score_mod='s - relative[h, q_pos - j] + 0.01 * (j - i)'",
    "dtype=bf16 hq=4 hkv=2 d=96 dv=96 k=paged page=16 captured=bf16 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 places=1 first_q=40 first_k=7 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=2 hkv=2 d=192 dv=128 captured=f16 "
    "score_mod='s + relative[h, i - j + len_k] * relative[h, j - i + len_k]'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 score_mod='s' mask_mod='s < relative[h, i - j + len_k] + 2.0' data=growing",
};

// Slopes that depend on the score, and no gradients of tensors: Hopper keeps each with its weight. Lists, packed
// sequences, groups, windows, dropout, orders of additions; slopes of every size and sign, infinite ones, masks by the
// score, far rows, scores that are NaN or hidden.
constexpr const char* kProgramSlopes[] = {
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 causal=1 score_mod='50 * tanh((s + relative[h, i - j + len_k]) / 50)' "
    "mask_mod='doc[b, i] == doc[b, j]' q=packed k=packed lead=3 tail=70",
    "dtype=f16 hq=4 hkv=1 d=128 dv=128 deterministic=1 score_mod='2 * tanh((s + relative[h, i - j + len_k]) / 2)' "
    "mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=f16 hq=2 hkv=2 d=64 dv=64 dropout=0.2 wl=100 wr=30 score_mod='s * sigmoid(s * 1.702) + key_bias[b, j]'",
    "dtype=bf16 hq=4 hkv=2 d=96 dv=80 dropout=0.2 deterministic=1 score_mod='sin(s * temperature[h]) * 3'",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 q=packed k=packed used=1 lists=3 score_mod='abs(s - query_bias[b, i])' "
    "mask_mod='i // 70 % 4 != j // 100 % 4'",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 score_mod='tanh(s * 1e-12) * 1e12 - abs(q_pos - j) * 0.1'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 score_mod='where(s > 0.0, s * s * s * 3e4, s * 1e-6)' scale=1e-3",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 wl=20 wr=9 score_mod='where(s > 0.0, 1e-6 * s, 4.0 * s - 20.0)'",
    "dtype=f16 hq=2 hkv=1 d=64 dv=64 sink=1 d_sink=1 d_lse=1 score_mod='s * abs(s) * 0.3' mask_mod='s < 0.9'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 data=shared score_mod='s + 0.5 * cos(s)' low=1",
    "dtype=f16 hq=2 hkv=2 d=128 dv=128 data=outlier score_mod='where(abs(i - j) < 300, s - sin(s), -inf)'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 data=nan_key causal=1 score_mod='5 * tanh(s / 5)' "
    "mask_mod='(i - j) % 300 < 200'",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 first_q=40 first_k=7 places=1 score_mod='5 * tanh(s / 5) - place[j]'",
    "dtype=bf16 hq=8 hkv=1 d=64 dv=64 cores=64 score_mod='3 * tanh(s / 3 + temperature[h])'",
};

// Scores that are affine in the one before. Factors of a head of either sign, 0 and not finite, which a kernel includes
// in its scale, in rows whose max is that of earlier tiles; factors and terms of a query, a key and i - j; options and
// masks beside them, parts of a whole, hidden keys that are NaN.
constexpr const char* kProgramAffine[] = {
    "dtype=bf16 backward=1 hq=4 hkv=2 d=128 dv=128 score_mod='s * (1.0 - h)'",
    "dtype=f16 hq=4 hkv=2 d=64 dv=64 causal=1 low=1 scale=-0.2 score_mod='s * temperature[h] / (2.0 - h_kv * 4.0)'",
    "dtype=bf16 hq=4 hkv=2 d=256 dv=256 q=packed k=packed tail=70 score_mod='-(s / t)'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 data=outlier score_mod='s * (h - 1.5)'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 data=growing low=1 score_mod='s * temperature[h]'",
    "dtype=f16 hq=2 hkv=1 d=64 dv=64 data=falling causal=1 score_mod='-s * temperature[h]'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 data=nan_key causal=1 score_mod='s * (0.5 - h)'",
    "dtype=bf16 backward=1 hq=4 hkv=2 d=128 dv=128 sink=1 d_sink=1 causal=1 score_mod='s * (1.0 - h)' "
    "mask_mod='(i - j) // 32 % 3 != 1'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 mask=hqk score_mod='s * (1.0 - h)'",
    "dtype=f16 backward=1 hq=4 hkv=1 d=128 dv=128 wl=90 wr=20 score_mod='s + slope[h] * (j - i)'",
    "dtype=bf16 backward=1 hq=4 hkv=2 d=128 dv=128 score_mod='s * place[i] - slope[h] * abs(i - j)'",
    "dtype=f16 backward=1 hq=4 hkv=2 d=64 dv=64 q=packed k=packed lead=3 tail=9 "
    "score_mod='s * place[j] + (j - q_pos) * slope[h]'",
    "dtype=bf16 backward=1 hq=4 hkv=2 d=64 dv=64 score_mod='(s + relative[h, i - j + len_k]) * (h - 1.5)'",
    "dtype=bf16 backward=1 hq=2 hkv=2 d=256 dv=256 causal=1 score_mod='2.0 * (s - i * 0.01) - s + key_bias[b, j]'",
    "dtype=bf16 backward=1 hq=2 hkv=2 d=128 dv=128 alibi=h score_mod='s - slope[h] * abs(i - j)'",
    "dtype=bf16 backward=1 hq=2 hkv=2 d=64 dv=64 softcap=5 bias=hqk score_mod='2.0 * s - 0.01 * i'",
    "dtype=bf16 backward=1 hq=4 hkv=2 d=64 dv=64 places=1 first_q=40 first_k=32 score_mod='s + slope[h] * (j - i)'",
    "dtype=bf16 backward=1 hq=4 hkv=2 d=128 dv=128 dropout=0.2 data=nan_key causal=1 "
    "score_mod='s * (1.5 - h) + slope[h] * (j - i)'",
};

// The gradient of one element for each head, which Hopper's kernel sums: groups whose heads follow one another in a
// block, sequences and lists, exact sums, dropout, an element that is read under a condition, one for a sequence.
// First factors of the score, whose gradients are made of dQ: of every head size, 0, small and large, of either sign,
// beside terms, in split groups and parts of a whole.
constexpr const char* kProgramHeadSums[] = {
    "dtype=bf16 hq=4 hkv=1 d=64 dv=64 causal=1 score_mod='s * temperature[h]'",
    "dtype=f16 hq=4 hkv=2 d=64 dv=64 deterministic=1 score_mod='s * temperature[h]' mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=bf16 hq=4 hkv=1 d=128 dv=128 score_mod='s * temperature[h]'",
    "dtype=f16 hq=4 hkv=2 d=128 dv=128 deterministic=1 causal=1 score_mod='s * temperature[h]'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 q=packed k=packed tail=70 lead=3 dropout=0.2 score_mod='s / temperature[h]'",
    "dtype=bf16 hq=4 hkv=2 d=80 dv=96 wl=90 wr=20 score_mod='-exp(temperature[h]) * s' mask_mod='(i - j) % 5 != 0'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 score_mod='s * (temperature[h] * (1.0 - h))'",
    "dtype=f16 hq=4 hkv=2 d=128 dv=128 causal=1 score_mod='s * (temperature[h] * (h - 1.0) * 0.01)'",
    "dtype=f16 hq=4 hkv=2 d=64 dv=64 scale=1e-3 score_mod='s * (temperature[h] * (1.0 - h) * 1000.0)'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 used=1 scale=-0.2 score_mod='s * temperature[h] + 0.01 * (j - i)'",
    "dtype=bf16 hq=8 hkv=1 d=128 dv=128 cores=64 score_mod='s * temperature[h]' sink=1 d_sink=1 d_lse=1",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 first_q=40 first_k=7 places=1 score_mod='s * temperature[h]'",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 q=packed k=packed tail=70 dropout=0.2 "
    "score_mod='where(i > j, s * temperature[h], s)'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 wl=90 wr=20 score_mod='s + tanh(temperature[h]) * sqrt(float(i + j))'",
};

// Gradients of elements that all pairs with the same i - j share, which Hopper's kernel sums along diagonals: groups
// whose heads follow one another, windows, masks and lists that skip tiles, packed sequences, split groups, parts of a
// whole, elements of many diagonals and of a whole head, beside a factor's gradient, and beside a factor of 0; hidden
// keys and values that are NaN; with options and head sizes that another kernel serves.
constexpr const char* kProgramDiagonalSums[] = {
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=f16 hq=4 hkv=1 d=64 dv=64 causal=1 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=f16 hq=4 hkv=1 d=128 dv=128 causal=1 top_left=1 captured=bf16 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=4 hkv=2 d=96 dv=80 wl=90 wr=20 score_mod='s * t + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 score_mod='s + relative[h, i - j + len_k]' mask_mod='doc[b, i] == doc[b, j]'",
    "dtype=bf16 hq=4 hkv=1 d=64 dv=64 score_mod='s + relative[h, i - j + len_k]' "
    "mask_mod='(i // 64 + h) % 3 != j // 64 % 3'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 q=packed k=packed lead=3 tail=70 lists=3 "
    "score_mod='s + relative[h, i - j + len_k]' mask_mod='(q_pos - j) % 7 != 0'",
    "dtype=f16 hq=4 hkv=2 d=64 dv=64 q=packed k=packed tail=9 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=8 hkv=1 d=128 dv=128 cores=64 used=1 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 first_q=40 first_k=7 places=1 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 score_mod='s + bucket[h, min(abs(i - j), 31)]'",
    "dtype=f16 hq=4 hkv=2 d=128 dv=128 score_mod='s + slope[h] * (j - i)'",
    "dtype=bf16 hq=4 hkv=1 d=128 dv=128 score_mod='s * temperature[h] + relative[h, i - j + len_k]'",
    "dtype=f16 hq=4 hkv=2 d=64 dv=64 score_mod='s * (temperature[h] * (1.0 - h)) + 0.5 * relative[h, i - j + len_k]'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 score_mod='(s + relative[h, i - j + len_k]) * (h - 1.5)'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 data=nan_value causal=1 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 data=nan_key wl=50 wr=0 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 deterministic=1 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=2 hkv=1 d=64 dv=64 dropout=0.2 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=bf16 hq=2 hkv=1 d=192 dv=128 score_mod='s + relative[h, i - j + len_k]'",
};

// Terms whose growth from tile to tile is known: of either sign, small and larger than any score, after scores that are
// outliers or grow themselves, where rows see parts of tiles, and beside a softcap, which the growth does not include.
constexpr const char* kGrowingTerms[] = {
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 alibi=h",
    "dtype=f16 hq=4 hkv=2 d=64 dv=64 alibi=h low=1 scale=-0.2",
    "dtype=f16 hq=4 hkv=1 d=128 dv=128 low=1 score_mod='s + slope[h] * (j - i)'",
    "dtype=bf16 hq=4 hkv=2 d=128 dv=128 causal=1 sink=1 score_mod='s + slope[h] * (j - i)'",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 data=outlier score_mod='s * 3.0 + 0.3 * (j - i)'",
    "dtype=f16 hq=2 hkv=2 d=128 dv=128 data=outlier score_mod='s - 0.05 * (q_pos - j)'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 data=growing score_mod='(0.1 * (j - i) - s) * (h - 0.5)'",
    "dtype=bf16 hq=2 hkv=2 d=256 dv=256 data=falling alibi=h",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 score_mod='s + 1e6 * j'",
    "dtype=f16 hq=2 hkv=2 d=64 dv=64 score_mod='s - 1e4 * (j - i)'",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 wl=300 wr=70 score_mod='s + slope[h] * (j - i) * place[i]'",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 q=packed k=packed tail=70 lead=3 causal=1 alibi=h",
    "dtype=f16 hq=2 hkv=1 d=96 dv=96 q=packed k=packed used=1 score_mod='s + float(j) / (2.0 + h)'",
    "dtype=bf16 hq=2 hkv=2 d=64 dv=64 softcap=5 alibi=h causal=1",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 data=nan_key causal=1 alibi=h",
    "dtype=bf16 hq=4 hkv=2 d=64 dv=64 k=paged page=16 places=1 first_q=40 first_k=32 alibi=h",
};

// Programs that may raise scores from tile to tile, which keep a stale max until a tile does not fit under it: scores
// that grow, fall or have outliers, terms that jump, rows that see parts of tiles.
constexpr const char* kOutgrownPrograms[] = {
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 data=growing low=1 score_mod='s + relative[h, i - j + len_k]'",
    "dtype=f16 hq=2 hkv=1 d=128 dv=128 data=outlier causal=1 score_mod='s + relative[h, q_pos - j]'",
    "dtype=bf16 hq=2 hkv=2 d=128 dv=128 data=falling sink=1 score_mod='s + 20.0 * place[j]'",
    "dtype=f16 hq=2 hkv=2 d=256 dv=256 wl=300 wr=70 score_mod='s + (j // 200) * 30.0'",
    "dtype=bf16 hq=2 hkv=2 d=96 dv=96 q=packed k=packed tail=70 lead=3 score_mod='s + 1e5 * sin(float(j))'",
    "dtype=bf16 hq=2 hkv=1 d=128 dv=128 dropout=0.2 data=nan_key causal=1 score_mod='s + 9.0 * key_bias[b, j]'",
};

// Prefixes that several sequences share: programs of the score and the head alone.
constexpr const char* kProgramPrefixes[] = {
    "dtype=f32 b=5 sq=2 sk=300 prefix=200 d=64 dv=64 k=paged page=16 causal=1 score_mod='s * temperature[h]'",
    "dtype=bf16 b=6 sq=1 sk=1300 prefix=1100 d=64 dv=64 k=paged page=16 causal=1 cores=7 "
    "score_mod='s * temperature[h] * (1.0 + h_kv)'",
    "dtype=f16 b=3 sq=260 sk=400 prefix=390 d=128 dv=128 k=paged page=16 causal=1 mask_mod='s > -0.5'",
    "dtype=bf16 b=5 few=4 sq=60 sk=600 prefix=300 d=64 dv=64 q=packed k=packed causal=1 sink=1 "
    "score_mod='5 * tanh(s / 5) + temperature[h]' mask_mod='h % 2 == 0 || s < 1.0'",
};

void add_programs(Table& table) {
  const auto add = [&](const Definition& definition, const std::string& frame) {
    Case c = *parse_case(frame, nullptr);
    c.score_mod = definition.score, c.mask_mod = definition.mask;
    table.add(c);
  };
  size_t turn = 0, masks = 0;
  for (const Definition& definition : definitions()) {
    for (const char* frame : kProgramFrames) add(definition, frame);
    if (*definition.mask) {
      add(definition, kProgramMaskFrame);
      add(definition, std::string(kProgramMaskFrame) + kProgramMaskLists[masks++ % std::size(kProgramMaskLists)]);
    }
    const char* dtypes[] = {"dtype=bf16", "dtype=f16", "dtype=f32"};
    const std::string sizes = std::string(dtypes[turn % std::size(dtypes)]) + " b=3 sq=50 sk=70 hq=4 hkv=2 d=64 dv=40 ";
    add(definition, sizes + kProgramLayouts[turn % std::size(kProgramLayouts)]);
    add(definition, kProgramCaches[turn % std::size(kProgramCaches)]);
    ++turn;
  }
  for (const char* line : kProgramParts) {
    table.add(
        (std::string(line) +
         " backward=1 d_captured=1 b=2 sq=50 sk=70 hq=4 hkv=2 d=32 dv=32 first_q=40 first_k=32 after_q=3 after_k=9")
            .c_str());
  }
  for (const char* line : kHidingPrograms) {
    table.add((std::string(kProgramMaskFrame) + " " + line).c_str());
  }
  for (const char* line : kProgramPartLists) {
    table.add((std::string(line) + " backward=1 b=2 sq=150 sk=330").c_str());
  }
  for (const char* line : kProgramOrders) {
    table.add((std::string(line) + " backward=1 deterministic=1 b=2 sq=300 sk=500").c_str());
  }
  for (const char* line : kProgramPairs) table.add((std::string(line) + " backward=1 b=2 sq=200 sk=330").c_str());
  for (const char* line : kProgramPages) table.add((std::string(line) + " b=3 sq=200 sk=500").c_str());
  for (const char* line : kProgramBoth) table.add((std::string(line) + " b=2 sq=200 sk=330").c_str());
  for (const char* line : kProgramDistances) table.add((std::string(line) + " b=2 sq=200 sk=333").c_str());
  for (const char* line : kProgramSlopes) table.add((std::string(line) + " backward=1 b=2 sq=200 sk=330").c_str());
  for (const char* line : kProgramAffine) table.add((std::string(line) + " b=2 sq=200 sk=330").c_str());
  for (const char* line : kProgramHeadSums) {
    table.add((std::string(line) + " backward=1 d_captured=1 b=2 sq=200 sk=330").c_str());
  }
  for (const char* line : kProgramDiagonalSums) {
    table.add((std::string(line) + " backward=1 d_captured=1 b=2 sq=200 sk=330").c_str());
  }
  for (const char* line : kGrowingTerms) table.add((std::string(line) + " b=2 sq=130 sk=900").c_str());
  for (const char* line : kOutgrownPrograms) table.add((std::string(line) + " b=2 sq=130 sk=900").c_str());
  for (const char* line : kProgramPrefixes) table.add((std::string(line) + " hq=4 hkv=2").c_str());
  // So few blocks that bwd_sm90 divides the query heads of a KV head among them.
  table.add("dtype=bf16 backward=1 sq=40 sk=56 hq=8 hkv=2 d=64 dv=64 score_mod='s * (1.0 + h_kv)'");
  // A program sees the -inf of a bias, and its result counts.
  for (const char* score : {"abs(s)", "5 * tanh(s / 5)", "exp(min(s, 3.0)) - 1"}) {
    table.add((std::string("b=2 sq=50 sk=70 hq=4 hkv=2 d=64 dv=64 bias=hqk data=inf_bias score_mod='") + score + "'")
                  .c_str());
  }
  // Nothing to read: tensors without elements, sequences without queries or keys.
  for (const char* sizes : {"b=0 sq=5 sk=7", "b=2 sq=0 sk=5", "b=2 sq=5 sk=0"}) {
    table.add((std::string(sizes) +
               " backward=1 d_captured=1 hq=4 hkv=2 score_mod='s * temperature[h] + dense[b, h, i, j]' "
               "mask_mod='keep[b, j]'")
                  .c_str());
  }
}

}  // namespace

std::vector<Case> case_table() {
  Table table;
  add_lengths(table);
  add_head_dims(table);
  add_options(table);
  add_large_scores(table);
  add_entries(table);
  for (const char* line : kDecode) table.add(line);
  for (const char* line : kMixed) table.add(line);
  for (const char* line : kNumerics) table.add(line);
  add_nonfinite(table);
  for (const char* ends : kFactorEnds) table.add((std::string("sq=70 sk=200 hq=2 hkv=1 d=32 dv=32 ") + ends).c_str());
  for (const std::string& line : pairwise_lines()) table.add(*parse_case(line, nullptr));
  table.add("b=0 sq=5 sk=7");
  table.add("b=0 sq=5 sk=7 q=packed k=packed backward=1");
  table.add("b=0 sq=5 sk=7 q=packed k=packed lead=300 tail=300 backward=1");
  table.add("b=2 sq=5 sk=0 sink=1 d_sink=1 backward=1");
  table.add("b=2 sq=0 sk=5 backward=1 bias=hk d_bias=1");
  for (const char* line : kDeterministic) table.add(("backward=1 deterministic=1 " + std::string(line)).c_str());
  for (const Case& c : hopper_cases()) table.add(c);
  for (const char* line : kPrefixes) table.add(line);
  for (const char* dtypes : k8BitDtypes) {
    for (const char* line : k8Bit) table.add(*parse_case(std::string(dtypes) + " " + line, nullptr));
  }
  for (const char* line : kFp8Hopper) table.add(line);
  for (const char* line : kFp8Lengths) table.add(line);
  for (const char* dtypes : kCacheDtypes) {
    for (const char* line : kDecodeCodes) table.add(*parse_case(std::string(dtypes) + " " + line, nullptr));
    for (const char* line : kPrefillCodes) table.add(*parse_case(std::string(dtypes) + " " + line, nullptr));
  }
  add_programs(table);
  return table.take();
}

}  // namespace tessera::testing
