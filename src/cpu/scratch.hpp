// The layout of a thread's scratch: the plan, which computes its size, and the kernels, which divide it, use the same
// arithmetic. Everything is static, because the units that include it are compiled for different instruction sets.
#pragma once

#include <cstdint>

namespace tessera::cpu {

constexpr int64_t kCacheLine_bytes = 64;
// One thread's scratch stays below 1 MiB, which decides the tiles (schedule.cpp). With AMX it is 1.5 MiB, of the 2 MiB
// of a core's L2 cache.
constexpr int64_t kMaxScratch_bytes = int64_t{1} << 20, kMaxScratchAmx_bytes = int64_t{3} << 19;

// Returns consecutive float arrays, each aligned to a cache line. With base NULL it only counts.
class Carver {
 public:
  constexpr explicit Carver(char* base) : base_(base) {}
  template <class T = float>
  constexpr T* take(int64_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + used_bytes_) : nullptr;
    used_bytes_ +=
        (count * static_cast<int64_t>(sizeof(T)) + kCacheLine_bytes - 1) / kCacheLine_bytes * kCacheLine_bytes;
    return array;
  }
  constexpr int64_t used_bytes() const { return used_bytes_; }

 private:
  char* base_;
  int64_t used_bytes_ = 0;
};

struct ForwardShape {
  int64_t block_m, block_n, tiles, head_dim, head_dim_v, lanes;
  bool copies_kv;  // keys and values are converted or gathered
  // For the options of scores: more tiles of scores, and a program's registers.
  int64_t option_tiles, program_floats;
  int64_t tile_bytes;  // sizeof(Tile)
};

struct ForwardScratch {
  char* tiles;     // [tiles] Tile
  float* sQ;       // [tiles][head_dim][block_m], or pairs [tiles][head_dim / 2][block_m]
  float* sO;       // [tiles][head_dim_v][block_m]
  float* sS;       // [block_n][block_m]
  float *sK, *sV;  // [block_n][head_dim], [block_n][head_dim_v]
  float* options;  // [option_tiles][block_n][block_m]
  float* program;  // [program_floats]
  float* shown;    // for a score program: [block_n][block_m] words of its mask
  int64_t bytes;
};

static constexpr int64_t padded_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static constexpr ForwardScratch carve_forward(char* base, const ForwardShape& s) {
  Carver carver(base);
  ForwardScratch out{};
  out.tiles = carver.take<char>(s.tiles * padded_to(s.tile_bytes, kCacheLine_bytes));
  out.sQ = carver.take(s.tiles * s.head_dim * s.block_m);
  out.sO = carver.take(s.tiles * s.head_dim_v * s.block_m);
  out.sS = carver.take(s.block_n * s.block_m);
  out.sK = carver.take(s.copies_kv ? s.block_n * padded_to(s.head_dim, s.lanes) : 0);
  out.sV = carver.take(s.copies_kv ? s.block_n * padded_to(s.head_dim_v, s.lanes) : 0);
  out.options = carver.take(s.option_tiles * s.block_n * s.block_m);
  out.program = carver.take(s.program_floats);
  out.shown = carver.take(s.program_floats > 0 ? s.block_n * s.block_m : 0);
  out.bytes = carver.used_bytes();
  return out;
}

// With AMX: tiles of 32 queries; a tile register holds 1 KiB. A job is the keys of one tile that the kernel processes
// at a time: at most this many, and at least half of them.
constexpr int64_t kAmxBlockM = 32, kAmxJobKeys = 128, kTileRegister_bytes = 1024;
// The most keys of a super-block.
constexpr int64_t kAmxMaxBlockKeys = 1024;
// The number of bfloat16 terms that sum to the bias over the scale, for adding the bias as a step of a product.
constexpr int64_t kAmxBiasTerms = 3;

// K and V of a super-block, as the forward pass's products read them.
static constexpr int64_t amx_k_tiles_bytes(int64_t block_n, int64_t head_dim) {
  return block_n / 16 * (padded_to(head_dim, 32) / 32) * kTileRegister_bytes;
}
static constexpr int64_t amx_v_tiles_bytes(int64_t block_n, int64_t head_dim_v) {
  return padded_to(head_dim_v, 32) / 32 * (block_n / 32) * 2 * kTileRegister_bytes;
}

// The keys of a super-block that hold NaN or infinities, one word for every 32 keys.
struct NonfiniteKeys {
  uint32_t rows[kAmxMaxBlockKeys / 32];
  bool any;
};

// A super-block that is packed ahead, for all items that read it.
struct AmxPackedKeys {
  char* k_tiles;             // [block_n / 16][head_dim / 32] tile registers
  char* v_tiles;             // [head_dim_v / 32][block_n / 32][2] tile registers
  NonfiniteKeys* nonfinite;  // for the values
  int64_t bytes;
};

static constexpr AmxPackedKeys carve_amx_packed_keys(char* base, int64_t block_n, int64_t head_dim,
                                                     int64_t head_dim_v) {
  Carver carver(base);
  AmxPackedKeys out{};
  out.k_tiles = carver.take<char>(amx_k_tiles_bytes(block_n, head_dim));
  out.v_tiles = carver.take<char>(amx_v_tiles_bytes(block_n, head_dim_v));
  out.nonfinite = carver.take<NonfiniteKeys>(1);
  out.bytes = carver.used_bytes();
  return out;
}

struct AmxForwardShape {
  int64_t block_n, tiles, head_dim, head_dim_v;
  int64_t option_tiles;  // for the options of scores: more tiles of scores
  int64_t tile_bytes;    // sizeof(Tile)
};

struct AmxForwardScratch {
  char* tiles;           // [tiles] Tile
  char* jobs;            // [tiles][2 block_n / kAmxJobKeys] Job
  uint32_t* sQ;          // [tiles][head_dim / 2][32] pairs
  float* sO;             // [tiles][head_dim_v][32]
  char* k_tiles;         // [block_n / 16][head_dim / 32] tile registers
  char* v_tiles;         // [head_dim_v / 32][block_n / 32][2] tile registers
  float* ring;           // [2][32][32] scores
  uint32_t* sP;          // [2][kAmxJobKeys / 2][32] pairs
  float* sS;             // [kAmxJobKeys][32]
  float* options;        // [option_tiles][kAmxJobKeys][32]
  char* bias_diagonals;  // [kAmxBiasTerms][2] tile registers
  uint32_t* bias_words;  // [16 pairs of keys][32]
  int64_t bytes;
};

static constexpr AmxForwardScratch carve_amx_forward(char* base, const AmxForwardShape& s) {
  constexpr int64_t kJob_bytes = 12;
  const int64_t d = padded_to(s.head_dim, 32), dv = padded_to(s.head_dim_v, 16);
  Carver carver(base);
  AmxForwardScratch out{};
  out.tiles = carver.take<char>(s.tiles * padded_to(s.tile_bytes, kCacheLine_bytes));
  out.jobs = carver.take<char>(s.tiles * (2 * s.block_n / kAmxJobKeys) * kJob_bytes);
  out.sQ = carver.take<uint32_t>(s.tiles * d / 2 * kAmxBlockM);
  out.sO = carver.take(s.tiles * dv * kAmxBlockM);
  out.k_tiles = carver.take<char>(amx_k_tiles_bytes(s.block_n, s.head_dim));
  out.v_tiles = carver.take<char>(amx_v_tiles_bytes(s.block_n, s.head_dim_v));
  out.ring = carver.take(2 * 32 * kAmxBlockM);
  out.sP = carver.take<uint32_t>(kAmxJobKeys * kAmxBlockM);
  out.sS = carver.take(kAmxJobKeys * kAmxBlockM);
  out.options = carver.take(s.option_tiles * kAmxJobKeys * kAmxBlockM);
  out.bias_diagonals = carver.take<char>(s.option_tiles > 0 ? kAmxBiasTerms * 2 * kTileRegister_bytes : 0);
  out.bias_words = carver.take<uint32_t>(s.option_tiles > 0 ? 16 * kAmxBlockM : 0);
  out.bytes = carver.used_bytes();
  return out;
}

struct DecodeShape {
  int64_t heads, max_rows, block_n, head_dim, head_dim_v, lanes;
  int64_t program_floats;  // registers of a score program
  int64_t row_bytes;       // sizeof(DecodeRow)
};

struct DecodeScratch {
  char* rows;      // [heads][max_rows] DecodeRow
  float *q, *o;    // [heads][max_rows][head_dim], [heads][max_rows][head_dim_v], padded to four vectors
  float* scores;   // [heads][max_rows][block_n]
  float* scales;   // [heads][block_n], of 8-bit keys or values
  float* program;  // [program_floats]
  int64_t bytes;
};

static constexpr DecodeScratch carve_decode(char* base, const DecodeShape& s) {
  Carver carver(base);
  DecodeScratch out{};
  out.rows = carver.take<char>(s.heads * s.max_rows * s.row_bytes);
  out.q = carver.take(s.heads * s.max_rows * padded_to(s.head_dim, 4 * s.lanes));
  out.o = carver.take(s.heads * s.max_rows * padded_to(s.head_dim_v, 4 * s.lanes));
  out.scores = carver.take(s.heads * s.max_rows * s.block_n);
  out.scales = carver.take(s.heads * s.block_n);
  out.program = carver.take(s.program_floats);
  out.bytes = carver.used_bytes();
  return out;
}

// With AMX: up to 16 query rows of a KV head, and keys in blocks.
constexpr int64_t kAmxDecodeKeys = 32;

struct AmxDecodeScratch {
  char* rows;     // [heads][max_rows] DecodeRow
  uint32_t* q;    // [heads][head_dim / 2][16] pairs
  float* o;       // [heads][2: even and odd columns][rows][head_dim_v / 2], padded to a vector
  float* s;       // [2][block_n][16] scores of two heads
  float* rows_s;  // [16][block_n] one head's transposed
  uint32_t* p;    // [2][rows][block_n] bfloat16 weights, in the low and in the high half of a word
  char* copy;     // [2][head_dim / 32] tile registers: rows of K or V that are not read in place
  float* scales;  // [2: keys and values][heads][block_n], of 8 bits
  int64_t bytes;
};

static constexpr AmxDecodeScratch carve_amx_decode(char* base, const DecodeShape& s) {
  const int64_t d = padded_to(s.head_dim, 64), dv = padded_to(s.head_dim_v, 64);  // codes are converted 64 at a time
  Carver carver(base);
  AmxDecodeScratch out{};
  out.rows = carver.take<char>(s.heads * s.max_rows * s.row_bytes);
  out.q = carver.take<uint32_t>(s.heads * d / 2 * 16);
  out.o = carver.take(s.heads * 16 * dv);
  out.s = carver.take(2 * s.block_n * 16);
  out.rows_s = carver.take(16 * s.block_n);
  out.p = carver.take<uint32_t>(2 * 16 * s.block_n);
  out.copy = carver.take<char>(2 * ((d > dv ? d : dv) / 32) * kTileRegister_bytes);
  out.scales = carver.take(2 * s.heads * s.block_n);
  out.bytes = carver.used_bytes();
  return out;
}

// Keys that a tile of queries is multiplied with at a time in the backward pass: a multiple of 32 (dropout's groups)
// and of the rows of either micro-kernel.
constexpr int64_t kKeyBlock = 96;

struct BackwardShape {
  int64_t block_m, block_n, head_dim, head_dim_v, lanes;
  bool dot;
  // For the options of scores: tiles of scores, and a program's registers.
  int64_t option_tiles, program_floats;
  int64_t tile_bytes;  // sizeof(Tile)
};

struct BackwardScratch {
  char* tile;
  float *shift, *lse, *delta;  // [block_m]
  float *sQ, *sdO;             // [head_dim][block_m], [head_dim_v][block_m]
  float *q_rows,
      *do_rows;     // [block_m][head_dim], [block_m][head_dim_v], padded to lanes; pairs of rows for the dot product
  float *sP, *sdS;  // [kKeyBlock][block_m]
  float *sP16, *sdS16;        // the same as bf16
  float *sK, *sV, *sK_steps;  // [block_n][head_dim], [block_n][head_dim_v], padded
  float *sdK, *sdV;           // [block_n][dk_ld], [block_n][dv_ld] accumulators
  float* options;             // [option_tiles][kKeyBlock][block_m]
  float *before, *program;    // for a score program: [kKeyBlock][block_m] scores before it; [program_floats]
  int64_t dk_ld, dv_ld;
  int64_t bytes;
};

static constexpr BackwardScratch carve_backward(char* base, const BackwardShape& s) {
  Carver carver(base);
  BackwardScratch out{};
  out.dk_ld = padded_to(s.head_dim, s.lanes);
  out.dv_ld = padded_to(s.head_dim_v, s.lanes);
  out.tile = carver.take<char>(s.tile_bytes);
  out.shift = carver.take(s.block_m);
  out.lse = carver.take(s.block_m);
  out.delta = carver.take(s.block_m);
  out.sQ = carver.take(s.head_dim * s.block_m);
  out.sdO = carver.take(s.head_dim_v * s.block_m);
  out.q_rows = carver.take(s.block_m * out.dk_ld);
  out.do_rows = carver.take(s.block_m * out.dv_ld);
  out.sP = carver.take((kKeyBlock + 1) * s.block_m);
  out.sdS = carver.take((kKeyBlock + 1) * s.block_m);
  out.sP16 = carver.take(s.dot ? (kKeyBlock + 2) * s.block_m / 2 : 0);
  out.sdS16 = carver.take(s.dot ? (kKeyBlock + 2) * s.block_m / 2 : 0);
  out.sK = carver.take(s.block_n * out.dk_ld);
  out.sV = carver.take(s.block_n * out.dv_ld);
  out.sK_steps = carver.take(s.dot ? padded_to(s.block_n, 2) / 2 * out.dk_ld : 0);
  out.sdK = carver.take(s.block_n * out.dk_ld);
  out.sdV = carver.take(s.block_n * out.dv_ld);
  out.options = carver.take(s.option_tiles * kKeyBlock * s.block_m);
  out.before = carver.take(s.program_floats > 0 ? kKeyBlock * s.block_m : 0);
  out.program = carver.take(s.program_floats);
  out.bytes = carver.used_bytes();
  return out;
}

// With AMX: four tiles of queries visit a super-block of keys together, kAmxJobKeys keys at a time.
constexpr int64_t kAmxBackwardTiles = 4;

struct AmxBackwardShape {
  int64_t block_n, head_dim, head_dim_v;
  int64_t option_tiles;  // for the options of scores: stages of them
  int64_t tile_bytes;    // sizeof(Tile)
};

struct AmxBackwardScratch {
  char* tiles;                             // [4] Tile
  float *shift, *lse, *delta;              // [4][32]
  uint32_t *sQ, *sdO;                      // [4][head_dim / 2][32], [4][head_dim_v / 2][32] pairs of columns
  char *q_rows, *do_rows;                  // [head_dim / 32][4][16][32], [head_dim_v / 32][4][16][32] pairs of rows
  float* sdQ;                              // [4][head_dim][32]
  float* dq_rows;                          // [32][head_dim]
  char *k_tiles, *k_transposed, *v_tiles;  // tile registers: rows of K, columns of K, rows of V
  float *sdK, *sdV;                        // [head_dim / 32][block_n][32], [head_dim_v / 32][block_n][32]
  char *sP, *sdS;                          // [kAmxJobKeys / 32][4][2] tile registers: 16 keys x 32 queries
  uint32_t* dS_pairs;                      // [4][kAmxJobKeys / 2][32] pairs of keys
  float* ring;                             // [2][2][32][32]: S and dP
  float* options;                          // [option_tiles][32][32], and [32][kKeyBlock]
  int64_t bytes;
};

static constexpr AmxBackwardScratch carve_amx_backward(char* base, const AmxBackwardShape& s) {
  constexpr int64_t kTiles = kAmxBackwardTiles, kStage = 32 * kAmxBlockM;
  const int64_t d = padded_to(s.head_dim, 32), dv = padded_to(s.head_dim_v, 32);
  Carver carver(base);
  AmxBackwardScratch out{};
  out.tiles = carver.take<char>(kTiles * padded_to(s.tile_bytes, kCacheLine_bytes));
  out.shift = carver.take(kTiles * kAmxBlockM);
  out.lse = carver.take(kTiles * kAmxBlockM);
  out.delta = carver.take(kTiles * kAmxBlockM);
  out.sQ = carver.take<uint32_t>(kTiles * d / 2 * kAmxBlockM);
  out.sdO = carver.take<uint32_t>(kTiles * dv / 2 * kAmxBlockM);
  out.q_rows = carver.take<char>(kTiles * d * kAmxBlockM * 2);
  out.do_rows = carver.take<char>(kTiles * dv * kAmxBlockM * 2);
  out.sdQ = carver.take(kTiles * d * kAmxBlockM);
  out.dq_rows = carver.take(kAmxBlockM * d);
  out.k_tiles = carver.take<char>(s.block_n / 16 * (d / 32) * kTileRegister_bytes);
  out.k_transposed = carver.take<char>(s.block_n / 32 * (d / 16) * kTileRegister_bytes);
  out.v_tiles = carver.take<char>(s.block_n / 16 * (dv / 32) * kTileRegister_bytes);
  out.sdK = carver.take(s.block_n * d);
  out.sdV = carver.take(s.block_n * dv);
  out.sP = carver.take<char>(kAmxJobKeys / 16 * kTiles * kTileRegister_bytes);
  out.sdS = carver.take<char>(kAmxJobKeys / 16 * kTiles * kTileRegister_bytes);
  out.dS_pairs = carver.take<uint32_t>(kTiles * kAmxJobKeys / 2 * kAmxBlockM);
  out.ring = carver.take(4 * kStage);
  out.options = carver.take(s.option_tiles > 0 ? s.option_tiles * kStage + kAmxBlockM * kKeyBlock : 0);
  out.bytes = carver.used_bytes();
  return out;
}

}  // namespace tessera::cpu
