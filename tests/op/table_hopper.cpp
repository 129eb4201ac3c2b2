// The part of the table for fwd_sm90 and bwd_sm90.
#include <iterator>
#include <span>

#include "case.hpp"
#include "tessera/tessera.h"

namespace tessera::testing {
namespace {

// Tiles of 128 and 192 queries by 64 to 128 keys that TMA fills: lengths around their edges, every head size that has a
// row or is padded to one, blocks of keys that every query sees fully, and numbers that need a new maximum. Few
// multiprocessors: on many, so many keys would be split, which that kernel does not support.
constexpr const char* kHopper[] = {
    "b=2 sq=63 sk=65 hq=2 hkv=2 d=64 dv=64",
    "b=2 sq=64 sk=64 hq=2 hkv=1 d=128 dv=128 causal=1",
    "b=1 sq=65 sk=127 hq=2 hkv=2 d=96 dv=96",
    "b=2 sq=127 sk=128 hq=2 hkv=1 d=64 dv=64 causal=1",
    "b=1 sq=128 sk=129 hq=2 hkv=2 d=256 dv=256",
    "b=1 sq=129 sk=191 hq=2 hkv=1 d=192 dv=192 causal=1",
    "b=1 sq=191 sk=192 hq=2 hkv=2 d=192 dv=128",
    "b=2 sq=192 sk=193 hq=2 hkv=1 d=128 dv=128",
    "b=1 sq=193 sk=255 hq=2 hkv=2 d=256 dv=256 causal=1",
    "b=2 sq=255 sk=256 hq=2 hkv=1 d=96 dv=96 causal=1",
    "b=1 sq=256 sk=257 hq=4 hkv=2 d=192 dv=128 causal=1",
    "b=2 sq=257 sk=512 hq=4 hkv=1 d=128 dv=128 causal=1 cores=3",
    "b=2 sq=512 sk=512 hq=4 hkv=2 d=64 dv=64 cores=3",
    "b=1 sq=512 sk=512 hq=2 hkv=1 d=256 dv=256 causal=1 cores=3",
    "b=1 sq=1100 sk=300 hq=2 hkv=1 d=64 dv=64",
    "b=1 sq=2100 sk=200 hq=2 hkv=2 d=128 dv=128",
    "b=1 sq=2100 sk=170 hq=1 hkv=1 d=96 dv=96 wl=100 wr=50",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=16 dv=64",
    "b=1 sq=200 sk=300 hq=2 hkv=2 d=72 dv=72 causal=1",
    "b=1 sq=200 sk=300 hq=2 hkv=1 d=112 dv=136",
    "b=1 sq=200 sk=300 hq=2 hkv=2 d=64 dv=200 causal=1",
    "b=1 sq=200 sk=300 hq=2 hkv=1 d=160 dv=160 order=bhsd",
    "b=1 sq=200 sk=300 hq=2 hkv=1 d=176 dv=8 order=sbhd gap=8",  // strides that TMA supports, a misaligned address
    "b=3 sq=200 sk=300 hq=4 hkv=2 d=128 dv=128 order=sbhd",
    "b=2 sq=300 sk=300 hq=2 hkv=1 d=64 dv=64 causal=1 wl=90",
    "b=1 sq=400 sk=520 hq=2 hkv=2 d=128 dv=128 wl=128 wr=0 cores=3",
    "b=1 sq=400 sk=250 hq=2 hkv=1 d=128 dv=128 wl=60 wr=70 top_left=1",
    "b=1 sq=300 sk=150 hq=2 hkv=1 d=64 dv=64 causal=1",
    "b=1 sq=300 sk=150 hq=2 hkv=1 d=64 dv=64 causal=1 top_left=1 sink=1",
    "b=1 sq=150 sk=400 hq=2 hkv=2 d=256 dv=256 wr=40 sink=1",
    "b=5 sq=300 sk=300 hq=4 hkv=2 d=128 dv=128 q=packed k=packed causal=1",
    "b=6 sq=200 sk=400 hq=2 hkv=1 d=64 dv=64 q=packed k=packed used=1",
    "b=3 sq=260 sk=260 hq=2 hkv=2 d=192 dv=128 q=packed",
    "b=3 sq=260 sk=260 hq=4 hkv=1 d=96 dv=96 k=packed wl=70 wr=30",
    "b=3 sq=200 sk=390 hq=4 hkv=2 d=128 dv=128 used=1 causal=1 sink=1",
    "b=4 sq=300 sk=300 hq=2 hkv=1 d=256 dv=256 q=packed k=packed causal=1 sink=1 lse=0",
    "b=3 sq=300 sk=300 hq=3 hkv=1 d=64 dv=64 causal=1 cores=5",
    // Pages: boxes of 16 rows to a whole block of keys (page sizes that divide it, that it divides, and neither), ends
    // within a box, at a box's border and before the first key; the table holds -1 past them and the pages NaN.
    "b=5 sq=200 sk=300 hq=4 hkv=2 d=128 dv=128 k=paged page=16 causal=1 cores=3",
    "b=5 sq=200 sk=300 hq=4 hkv=2 d=128 dv=128 k=paged page=16 cores=3",
    "b=6 sq=130 sk=520 hq=2 hkv=1 d=64 dv=64 k=paged page=64 cores=3",
    "b=6 sq=130 sk=520 hq=2 hkv=1 d=64 dv=64 k=paged page=64 csr=1 order=bhsd cores=3",
    "b=5 sq=200 sk=300 hq=4 hkv=2 d=128 dv=128 q=packed k=paged page=16 csr=1 causal=1 cores=3",
    "b=6 sq=300 sk=384 hq=4 hkv=1 d=64 dv=64 k=paged page=128 causal=1 cores=3",
    // Trees of drafted tokens: fewer bits than queries and more, past the first key, with options.
    "b=3 sq=200 sk=300 hq=4 hkv=2 d=128 dv=128 tree=7 causal=1 cores=3",
    "b=5 sq=300 sk=500 hq=2 hkv=1 d=64 dv=64 tree=3 cores=3",
    "b=4 sq=200 sk=150 hq=2 hkv=1 d=256 dv=256 tree=8 cores=3",
    "b=5 sq=130 sk=300 hq=4 hkv=1 d=128 dv=128 q=packed k=paged page=16 tree=2 causal=1 cores=3",
    "b=4 sq=150 sk=400 hq=2 hkv=1 d=192 dv=128 q=packed k=packed tree=5 causal_seqs=1 cores=3",
    "b=4 sq=200 sk=300 hq=2 hkv=1 d=128 dv=128 tree=4 softcap=8 mask=bqk wl=90 cores=3",
    // Causal flags a sequence: full ones beside causal ones, tiles of all sizes, windows.
    "b=6 sq=300 sk=384 hq=2 hkv=1 d=64 dv=64 causal_seqs=1 cores=3",
    "b=5 sq=300 sk=500 hq=4 hkv=2 d=128 dv=128 causal_seqs=1 cores=3",
    "b=5 sq=300 sk=200 hq=2 hkv=1 d=256 dv=256 causal_seqs=1 wl=60 cores=3",
    "b=6 sq=260 sk=300 hq=4 hkv=1 d=128 dv=128 q=packed k=packed causal_seqs=1 cores=3",
    "b=6 sq=260 sk=300 hq=4 hkv=1 d=192 dv=128 q=packed k=paged page=48 csr=1 causal_seqs=1 top_left=1 cores=3",
    "b=4 sq=200 sk=300 hq=2 hkv=1 d=128 dv=128 causal_seqs=1 softcap=8 mask=bqk cores=3",
    "b=5 sq=150 sk=600 hq=2 hkv=2 d=256 dv=256 k=paged page=256 causal=1 cores=3",
    "b=5 sq=150 sk=400 hq=2 hkv=1 d=256 dv=256 k=paged page=32 cores=3",
    "b=5 sq=260 sk=300 hq=4 hkv=1 d=192 dv=128 q=packed k=paged page=48 wl=90 cores=3",
    "b=4 sq=200 sk=300 hq=2 hkv=1 d=192 dv=192 k=paged page=96 causal=1 sink=1 cores=3",
    "b=4 sq=700 sk=500 hq=2 hkv=1 d=128 dv=128 k=paged page=80 cores=5 invariant=1",
    "b=4 sq=700 sk=500 hq=2 hkv=1 d=128 dv=128 k=paged page=128 causal=1 cores=5 invariant=1",
    "b=3 sq=200 sk=390 hq=4 hkv=4 d=128 dv=128 k=paged page=512 wl=100 wr=30 cores=3",
    "b=4 sq=300 sk=150 hq=2 hkv=1 d=96 dv=96 k=paged page=64 causal=1 top_left=1 sink=1 cores=3",
    "b=4 sq=200 sk=300 hq=4 hkv=2 d=72 dv=40 k=paged page=16 q=packed causal=1 order=bhsd cores=3",
    "data=growing b=4 sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 k=paged page=64 causal=1 cores=3",
    "data=nan_key b=4 sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 k=paged page=16 causal=1 cores=3",
    "b=3 sq=300 sk=300 hq=2 hkv=1 d=128 dv=128 cores=3 invariant=1",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64 scale=3",
    // Four consumers, more work tiles than multiprocessors: fewer rows than consumers, edges, packed rows, pages.
    "b=6 sq=70 sk=130 hq=2 hkv=2 d=64 dv=64 cores=1",
    "b=6 sq=70 sk=130 hq=2 hkv=1 d=64 dv=64 causal=1 cores=1",
    "b=3 sq=600 sk=500 hq=2 hkv=1 d=64 dv=64 used=1 wl=100 wr=30 sink=1 cores=3",
    "b=5 sq=600 sk=700 hq=2 hkv=1 d=64 dv=64 q=packed k=packed causal=1 cores=3",
    "b=5 sq=600 sk=700 hq=2 hkv=1 d=48 dv=56 q=packed k=packed used=1 cores=3",
    "b=4 sq=700 sk=500 hq=2 hkv=1 d=64 dv=64 k=paged page=64 wl=200 causal=1 cores=3",
    "b=2 sq=600 sk=700 hq=2 hkv=1 d=96 dv=96 cores=3",
    "b=2 sq=1100 sk=1100 hq=1 hkv=1 d=80 dv=96 causal=1 sink=1 cores=3",
    "b=4 sq=300 sk=300 hq=2 hkv=1 d=96 dv=96 k=paged page=48 cores=3",
    "b=4 sq=300 sk=300 hq=2 hkv=1 d=96 dv=96 k=paged page=32 causal=1 cores=3",
    // Windows: consumers that see other blocks of keys than their neighbours, at both ends, a work tile's last and the
    // next one's first together; a few keys or one for each row, rows before all keys, a window wider than the keys.
    "b=1 sq=900 sk=900 hq=4 hkv=2 d=128 dv=128 causal=1 wl=10 cores=3",
    "b=2 sq=700 sk=950 hq=2 hkv=1 d=128 dv=128 wl=20 wr=20 cores=3",
    "b=1 sq=900 sk=900 hq=2 hkv=2 d=64 dv=64 wl=0 wr=0 cores=3",
    "b=2 sq=1000 sk=1033 hq=2 hkv=1 d=64 dv=64 causal=1 wl=64 cores=3",
    "b=1 sq=900 sk=400 hq=2 hkv=1 d=128 dv=128 causal=1 wl=30 sink=1 cores=3",
    "b=1 sq=700 sk=700 hq=2 hkv=1 d=256 dv=256 causal=1 wl=64 cores=3",
    "b=1 sq=700 sk=740 hq=2 hkv=2 d=192 dv=192 wl=63 wr=1 cores=3",
    "b=1 sq=700 sk=700 hq=2 hkv=1 d=192 dv=128 causal=1 wl=127 cores=3",
    "b=1 sq=800 sk=800 hq=2 hkv=1 d=96 dv=96 causal=1 wl=190 cores=3",
    "b=1 sq=500 sk=500 hq=2 hkv=1 d=128 dv=128 wl=900 cores=3",
    "b=5 sq=600 sk=600 hq=2 hkv=1 d=128 dv=128 q=packed k=packed causal=1 wl=70 cores=3",
    "b=3 sq=600 sk=700 hq=2 hkv=1 d=128 dv=128 used=1 causal=1 wl=40 cores=3",
    "b=4 sq=400 sk=500 hq=2 hkv=1 d=128 dv=128 k=paged page=16 causal=1 wl=40 cores=3",
    "data=outlier b=1 sq=900 sk=900 hq=2 hkv=1 d=128 dv=128 causal=1 wl=300 cores=3",
    // Clusters of two blocks: an even number of tiles a head, and a row for many queries, which invariant=1 uses for
    // few. A last tile that leaves consumers without rows, one chunk of 64 columns and three, more blocks than work
    // tiles.
    "b=3 sq=520 sk=700 hq=2 hkv=1 d=256 dv=256 used=1 cores=5 invariant=1",
    "b=1 sq=2180 sk=390 hq=1 hkv=1 d=256 dv=256 cores=7",
    "b=1 sq=2180 sk=390 hq=1 hkv=1 d=128 dv=128 cores=7",
    "b=1 sq=700 sk=500 hq=2 hkv=1 d=192 dv=128 cores=7",
    "b=1 sq=500 sk=500 hq=3 hkv=1 d=136 dv=184 order=bhsd cores=131 invariant=1",
    "b=3 sq=600 sk=700 hq=2 hkv=1 d=128 dv=128 used=1 cores=7 invariant=1",
    "b=1 sq=8300 sk=200 hq=1 hkv=1 d=128 dv=128 cores=5",
    "b=2 sq=700 sk=500 hq=3 hkv=1 d=40 dv=104 sink=1 cores=5 invariant=1",
    "b=1 sq=500 sk=500 hq=3 hkv=1 d=136 dv=200 order=bhsd cores=131 invariant=1",
    // Head sizes above 256: a cluster of two blocks shares the columns. Tiles of 128 by 64 (48 with options), and
    // consumers that see other blocks of keys than their neighbours.
    "b=2 sq=63 sk=65 hq=2 hkv=2 d=512 dv=512",
    "b=1 sq=129 sk=191 hq=4 hkv=2 d=512 dv=512 causal=1 cores=3",
    "b=2 sq=300 sk=520 hq=2 hkv=1 d=512 dv=512 order=bhsd cores=3",
    "b=1 sq=300 sk=150 hq=2 hkv=2 d=512 dv=512 causal=1 top_left=1 sink=1 cores=3",
    "b=1 sq=300 sk=150 hq=2 hkv=2 d=384 dv=384 causal=1 cores=3",
    "b=1 sq=400 sk=400 hq=2 hkv=1 d=320 dv=264 wl=60 wr=70 cores=3",
    "b=1 sq=260 sk=300 hq=2 hkv=1 d=512 dv=64 causal=1 cores=3",
    "b=1 sq=260 sk=300 hq=2 hkv=1 d=72 dv=512 wl=20 cores=3",
    "b=5 sq=300 sk=300 hq=4 hkv=2 d=512 dv=512 q=packed k=packed causal=1 cores=3",
    "b=5 sq=200 sk=400 hq=2 hkv=1 d=384 dv=384 q=packed k=packed used=1 cores=3",
    "b=3 sq=200 sk=390 hq=2 hkv=1 d=512 dv=512 used=1 wl=100 wr=30 sink=1 cores=3",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=512 dv=512 alibi=h causal=1 cores=3",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=512 dv=512 softcap=20 cores=3",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=512 dv=512 bias=bhqk mask=hqk causal=1 cores=3",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=512 dv=512 dropout=0.25 causal=1 cores=3",
    "b=3 sq=300 sk=300 hq=2 hkv=1 d=512 dv=512 causal=1 cores=3 invariant=1",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=512 dv=512 cores=3",
    "data=outlier sq=300 sk=600 hq=2 hkv=1 d=512 dv=512 causal=1 cores=3",
    "data=huge sq=300 sk=400 hq=2 hkv=1 d=512 dv=512",
    "data=nan_key b=4 sq=300 sk=400 hq=2 hkv=1 d=512 dv=512 q=packed k=packed used=1 causal=1",
    "data=inf_value sq=300 sk=400 hq=2 hkv=1 d=512 dv=512 used=1 b=3",
    "data=outlier sq=300 sk=600 hq=2 hkv=1 d=64 dv=64 cores=3",
    "data=outlier sq=300 sk=600 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "data=outlier sq=300 sk=600 hq=2 hkv=1 d=256 dv=256 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=64 dv=64 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=256 dv=256 cores=3",
    "data=growing sq=1100 sk=900 hq=1 hkv=1 d=64 dv=64 cores=3",
    "data=growing sq=2100 sk=900 hq=1 hkv=1 d=128 dv=128 cores=3",
    "data=growing order=bhsd sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3",
    "data=growing b=4 sq=300 sk=600 hq=2 hkv=1 d=128 dv=128 q=packed k=packed cores=3",
    "data=huge sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    "data=huge sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 causal=1",
    "data=nan_query sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    "data=nan_query b=4 sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 q=packed k=packed causal=1",
    "data=nan_key sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    "data=nan_key b=4 sq=300 sk=400 hq=2 hkv=1 d=256 dv=256 q=packed k=packed used=1 causal=1",
    "data=inf_key sq=300 sk=400 hq=2 hkv=1 d=64 dv=64",
    "data=inf_key sq=300 sk=400 hq=2 hkv=1 d=192 dv=192 causal=1",
    "data=inf_value sq=300 sk=400 hq=2 hkv=1 d=128 dv=128 used=1 b=3",
    "data=inf_value b=4 sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 q=packed k=packed causal=1",
    // Scores that share a large number and sinks far above and below, in every merge.
    "b=3 sq=1 sk=900 hq=8 hkv=2 d=128 dv=128 data=shared low=1 sink=2 invariant=1 cores=4",
    "b=3 sq=2 sk=900 hq=8 hkv=2 d=64 dv=64 k=paged page=16 data=shared low=1 sink=2 cores=64",
    "b=5 few=1 sq=300 sk=700 hq=8 hkv=2 d=64 dv=64 q=packed k=packed data=shared low=1 sink=2 causal=1",
    "b=1 sq=3 sk=5000 hq=2 hkv=1 d=64 dv=64 bias=bhqk data=huge_bias low=1 sink=2 cores=64",
};

// Scores that need a new maximum, with tiles from the first to the last: scores that pass all earlier ones by many
// powers of two (falling ones never do), and the one key in whose tile, after tiles without it, scores become infinite
// or NaN. Every head size that has a row; full, causal, windows, packed rows; full and partial tiles.
constexpr const char* kHopperNumerics[] = {
    "data=falling sq=300 sk=900 hq=2 hkv=1 d=64 dv=64 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "data=growing sq=2100 sk=2100 hq=1 hkv=1 d=64 dv=64 causal=1 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=2 d=96 dv=96 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3",
    "data=falling sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "data=growing sq=300 sk=900 hq=1 hkv=1 d=192 dv=128 cores=3",
    "data=growing sq=300 sk=900 hq=1 hkv=1 d=192 dv=192 causal=1 cores=3",
    "data=falling sq=300 sk=900 hq=2 hkv=1 d=256 dv=256 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=256 dv=256 causal=1 sink=1 cores=3",
    "data=growing b=4 sq=300 sk=600 hq=2 hkv=1 d=128 dv=128 q=packed k=packed cores=3",
    "data=growing b=3 sq=700 sk=900 hq=2 hkv=1 d=64 dv=64 q=packed k=packed causal=1 used=1 scale=2 cores=3",
    "data=growing sq=600 sk=900 hq=1 hkv=1 d=128 dv=128 wl=500 wr=0 cores=3",
    "data=growing sq=900 sk=900 hq=2 hkv=1 d=128 dv=128 causal=1 wl=200 cores=3",
    "data=falling sq=900 sk=900 hq=2 hkv=1 d=64 dv=64 causal=1 wl=300 cores=3",
    "data=huge sq=700 sk=700 hq=2 hkv=1 d=128 dv=128 causal=1 wl=200 cores=3",
    "data=inf_once sq=700 sk=700 hq=2 hkv=1 d=128 dv=128 causal=1 wl=200 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 scale=2 cores=3",
    "data=growing sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3 invariant=1",
    "data=falling sq=500 sk=900 hq=2 hkv=1 d=256 dv=256 cores=5 invariant=1",
    "data=nan_once sq=300 sk=900 hq=2 hkv=1 d=64 dv=64 cores=3",
    "data=nan_once sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "data=nan_once b=3 sq=300 sk=600 hq=2 hkv=1 d=256 dv=256 q=packed k=packed cores=3",
    "data=inf_once sq=300 sk=900 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "data=inf_once sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3",
    "data=inf_once sq=300 sk=900 hq=1 hkv=1 d=192 dv=128 cores=3",
    "data=inf_once sq=700 sk=900 hq=1 hkv=1 d=128 dv=128 cores=3 invariant=1",
    "data=inf_once b=3 sq=300 sk=600 hq=2 hkv=1 d=256 dv=256 q=packed k=packed causal=1 cores=3",
};

// Scores that are changed one by one: each option at every head size that has a row, in full blocks, at edges and past
// a sequence's end; entries of rows of 8, of 2 and of single keys; several options together; and scores that need a new
// maximum.
constexpr const char* kHopperOptions[] = {
    "softcap=9 b=2 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64 cores=3",
    "softcap=1 b=1 sq=200 sk=300 hq=2 hkv=2 d=96 dv=96 causal=1 cores=3",  // beyond the tanh's polynomial
    "softcap=30 b=2 sq=257 sk=300 hq=4 hkv=2 d=128 dv=128 causal=1 cores=3",
    "softcap=0.5 scale=0.5 b=1 sq=200 sk=400 hq=2 hkv=1 d=192 dv=128 wl=100 wr=30 cores=3",
    "softcap=20 b=4 sq=200 sk=300 hq=2 hkv=1 d=192 dv=192 q=packed k=packed causal=1 sink=1 cores=3",
    "softcap=5 b=4 sq=200 sk=300 hq=2 hkv=1 d=256 dv=256 k=paged page=16 causal=1 cores=3",
    "softcap=50 b=1 sq=1100 sk=1100 hq=2 hkv=1 d=64 dv=64 causal=1 wl=200 cores=3",
    "softcap=10000 b=1 sq=200 sk=300 hq=2 hkv=1 d=128 dv=128 cores=3",
    "alibi=h b=2 sq=300 sk=300 hq=4 hkv=2 d=64 dv=64 causal=1 cores=3",
    "alibi=bh b=2 sq=200 sk=300 hq=2 hkv=1 d=96 dv=96 cores=3",
    "alibi=h b=2 sq=300 sk=200 hq=4 hkv=1 d=128 dv=128 cores=3",
    "alibi=h b=3 sq=260 sk=260 hq=2 hkv=2 d=192 dv=128 q=packed k=packed causal=1 cores=3",
    "alibi=bh b=3 sq=200 sk=390 hq=2 hkv=1 d=192 dv=192 used=1 causal=1 sink=1 cores=3",
    "alibi=h b=1 sq=500 sk=600 hq=2 hkv=1 d=256 dv=256 wl=100 wr=30 cores=3",
    "dropout=0.2 b=2 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64 cores=3",
    "dropout=0.5 b=1 sq=200 sk=300 hq=2 hkv=2 d=96 dv=96 causal=1 sink=1 cores=3",
    "dropout=0.1 b=2 sq=257 sk=300 hq=4 hkv=2 d=128 dv=128 causal=1 cores=3",
    "dropout=0.3 b=3 sq=260 sk=260 hq=2 hkv=1 d=192 dv=128 q=packed k=packed cores=3",
    "dropout=0.2 b=4 sq=200 sk=300 hq=2 hkv=1 d=192 dv=192 k=paged page=48 causal=1 cores=3",
    "dropout=0.9 b=1 sq=500 sk=600 hq=2 hkv=1 d=256 dv=256 wl=100 wr=30 cores=3",
    "bias=hqk b=2 sq=200 sk=320 hq=2 hkv=1 d=64 dv=64 cores=3",
    "bias=bhqk b=2 sq=200 sk=298 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "bias=qk b=2 sq=200 sk=299 hq=2 hkv=1 d=96 dv=96 cores=3",
    "bias=hqk bias_f32=1 b=2 sq=300 sk=320 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "bias=bhqk bias_f32=1 b=2 sq=200 sk=392 hq=2 hkv=1 d=128 dv=128 cores=3",
    "bias=hqk b=2 sq=257 sk=384 hq=4 hkv=2 d=128 dv=128 causal=1 cores=3",
    "bias=hk b=3 sq=260 sk=260 hq=2 hkv=1 d=192 dv=128 q=packed k=packed causal=1 cores=3",
    "bias=bk bias_f32=1 b=3 sq=200 sk=390 hq=2 hkv=1 d=192 dv=192 used=1 sink=1 cores=3",
    "bias=qk b=1 sq=500 sk=640 hq=2 hkv=1 d=256 dv=256 wl=100 wr=30 cores=3",
    "bias=qk bias_f32=1 b=4 sq=200 sk=304 hq=2 hkv=1 d=256 dv=256 k=paged page=16 causal=1 cores=3",
    "mask=qk b=2 sq=200 sk=320 hq=2 hkv=1 d=64 dv=64 cores=3",
    "mask=bhqk b=2 sq=200 sk=298 hq=2 hkv=1 d=96 dv=96 causal=1 cores=3",
    "mask=hqk b=2 sq=257 sk=387 hq=4 hkv=2 d=128 dv=128 cores=3",
    "mask=bk b=3 sq=260 sk=260 hq=2 hkv=1 d=192 dv=128 q=packed k=packed cores=3",
    "mask=k b=3 sq=200 sk=390 hq=2 hkv=1 d=192 dv=192 used=1 causal=1 sink=1 cores=3",
    "mask=qk b=1 sq=500 sk=640 hq=2 hkv=1 d=256 dv=256 wl=100 wr=30 cores=3",
    "scale=-0.3 b=2 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "scale=0 b=2 sq=200 sk=300 hq=2 hkv=1 d=128 dv=128 cores=3",
    "mask=qk bias=hqk alibi=h softcap=9 dropout=0.2 sink=1 b=2 sq=200 sk=320 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "mask=hqk bias=qk bias_f32=1 alibi=h softcap=9 dropout=0.2 b=2 sq=300 sk=298 hq=2 hkv=1 d=128 dv=128 cores=3",
    "bias=hqk softcap=9 dropout=0.1 b=2 sq=200 sk=320 hq=2 hkv=1 d=256 dv=256 scale=-0.1 cores=3",
    "alibi=h dropout=0.3 b=3 sq=600 sk=700 hq=2 hkv=1 d=128 dv=128 cores=3 invariant=1",
    "softcap=30 b=1 sq=2100 sk=300 hq=2 hkv=1 d=64 dv=64 cores=3",  // whole tiles; the others at 64 have half ones
    "mask=qk dropout=0.2 b=1 sq=2100 sk=320 hq=2 hkv=1 d=64 dv=64 cores=3",
    "bias=qk bias_f32=1 b=1 sq=2100 sk=320 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "alibi=h b=1 sq=2100 sk=2100 hq=1 hkv=1 d=64 dv=64 causal=1 cores=3",
    "data=growing softcap=200 sq=300 sk=900 hq=2 hkv=1 d=64 dv=64 cores=3",
    "data=growing softcap=100 sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "data=growing dropout=0.2 sq=300 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3",
    "data=growing dropout=0.2 sq=2100 sk=900 hq=1 hkv=1 d=64 dv=64 causal=1 cores=3",
    "data=growing dropout=0.2 sq=300 sk=900 hq=2 hkv=1 d=256 dv=256 cores=3",
    "data=outlier alibi=h sq=300 sk=600 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "data=outlier bias=hqk sq=300 sk=640 hq=2 hkv=1 d=64 dv=64 cores=3",
    "data=falling mask=qk sq=300 sk=640 hq=2 hkv=1 d=256 dv=256 cores=3",
    "data=huge alibi=h sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    "data=huge mask=qk sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 causal=1",
    "data=nan_key softcap=9 sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    "data=nan_key bias=hqk sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 causal=1",
    "data=nan_query alibi=h sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 causal=1",
    "data=inf_key mask=qk sq=300 sk=400 hq=2 hkv=1 d=256 dv=256",
    "data=inf_value dropout=0.2 sq=300 sk=400 hq=2 hkv=1 d=128 dv=128 used=1 b=3",
};

// Block masks, which fwd_sm90 reads as lists: blocks of the mask of one half of a tile's rows, of all, of two tiles';
// of a tile's keys, and of two or three; rows that see nothing, diagonals and windows that cut blocks of the list, one
// mask for all and one for each head; more tiles than multiprocessors, which claim them.
constexpr const char* kHopperBlocks[] = {
    "block_mask=qk block_q=64 block_k=64 b=2 sq=520 sk=700 hq=2 hkv=1 d=64 dv=64 cores=3",
    "block_mask=bhqk block_q=128 block_k=128 b=2 sq=700 sk=520 hq=4 hkv=2 d=64 dv=64 causal=1 cores=3",
    "block_mask=hqk block_q=64 block_k=128 b=2 sq=520 sk=900 hq=2 hkv=2 d=128 dv=128 cores=3",
    "block_mask=bqk block_q=128 block_k=64 b=2 sq=600 sk=600 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "block_mask=bhqk block_q=128 block_k=128 b=2 sq=900 sk=900 hq=2 hkv=1 d=128 dv=128 causal=1 sink=1 cores=3",
    "block_mask=hqk block_q=256 block_k=192 b=1 sq=900 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3",
    "block_mask=qk block_q=64 block_k=64 b=1 sq=300 sk=260 hq=2 hkv=1 d=96 dv=96 causal=1",
    "block_mask=hqk block_q=64 block_k=128 b=1 sq=500 sk=600 hq=2 hkv=2 d=192 dv=128 wl=100 wr=30 cores=3",
    "block_mask=qk block_q=128 block_k=64 b=2 sq=500 sk=600 hq=2 hkv=1 d=192 dv=192 causal=1 wl=200 cores=3",
    "block_mask=bhqk block_q=64 block_k=64 b=2 sq=500 sk=600 hq=2 hkv=1 d=256 dv=256 sink=1 cores=3",
    "block_mask=qk block_q=128 block_k=128 b=1 sq=1100 sk=300 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "block_mask=hqk block_q=64 block_k=64 b=1 sq=130 sk=500 hq=2 hkv=1 d=72 dv=40",
    "block_mask=bhqk block_q=64 block_k=64 b=3 sq=300 sk=400 hq=4 hkv=1 d=128 dv=128 order=bhsd invariant=1 cores=3",
    "block_mask=hqk block_q=64 block_k=64 softcap=9 b=1 sq=500 sk=500 hq=2 hkv=1 d=64 dv=64 cores=3",
    "block_mask=hqk block_q=64 block_k=128 alibi=h dropout=0.2 b=1 sq=500 sk=500 hq=2 hkv=1 d=128 dv=128 causal=1 "
    "cores=3",
    "block_mask=hqk block_q=128 block_k=64 dropout=0.3 b=1 sq=500 sk=500 hq=2 hkv=1 d=256 dv=256 cores=3",
    "block_mask=qk block_q=64 block_k=64 bias=hqk mask=qk b=1 sq=500 sk=500 hq=2 hkv=1 d=64 dv=64 cores=3",
    "block_mask=qk block_q=64 block_k=64 bias=qk bias_f32=1 b=1 sq=500 sk=498 hq=2 hkv=1 d=128 dv=128 causal=1 cores=3",
    "data=growing block_mask=hqk block_q=64 block_k=64 sq=500 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3",
    "data=falling block_mask=hqk block_q=128 block_k=128 sq=500 sk=900 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3",
    "data=nan_key block_mask=qk block_q=64 block_k=128 sq=500 sk=900 hq=2 hkv=1 d=128 dv=128 cores=3",
    "data=huge block_mask=hqk block_q=64 block_k=64 sq=500 sk=600 hq=2 hkv=1 d=64 dv=64 cores=3",
    // Longer runs of hidden blocks than a consumer may skip, and lists that hide everything from a consumer.
    "block_mask=hqk block_q=64 block_k=64 b=1 sq=400 sk=3000 hq=2 hkv=1 d=128 dv=128 cores=2",
    "block_mask=qk block_q=64 block_k=128 b=1 sq=500 sk=3000 hq=2 hkv=2 d=128 dv=128 causal=1 alibi=h cores=2",
    "block_mask=hqk block_q=64 block_k=64 b=1 sq=300 sk=3000 hq=2 hkv=1 d=256 dv=256 cores=1",
    "block_mask=bqk block_q=192 block_k=64 b=2 sq=700 sk=900 hq=2 hkv=1 d=96 dv=96 causal=1 cores=3",
    // Long lists among short ones, which go first.
    "block_mask=hqk block_q=128 block_k=128 b=1 sq=2560 sk=2500 hq=2 hkv=1 d=64 dv=64 cores=3",
    "block_mask=hqk block_q=128 block_k=128 b=1 sq=2560 sk=2500 hq=2 hkv=1 d=64 dv=64 cores=3 seed=2",
    "block_mask=qk block_q=64 block_k=64 b=2 sq=3500 sk=2500 hq=2 hkv=1 d=64 dv=64 causal=1 cores=3 seed=3",
};

// bwd_sm90: tiles of 64 or 128 queries by 128 keys, with each option: full and partial blocks, ends within a half of a
// block's keys; bias and mask by pairs of keys and one by one; entries of one head, of all, of all sequences; a NaN.
constexpr const char* kHopperBackward[] = {
    // Head sizes above 256: a cluster of four blocks, 64 of 128 keys or half of the columns in each.
    "b=2 sq=63 sk=65 hq=2 hkv=2 d=512 dv=512",
    "b=1 sq=129 sk=191 hq=4 hkv=2 d=512 dv=512 causal=1",
    "b=2 sq=300 sk=520 hq=4 hkv=1 d=512 dv=512 order=bhsd",
    "b=1 sq=300 sk=150 hq=2 hkv=2 d=512 dv=512 causal=1 top_left=1 sink=1 d_sink=1",
    "b=1 sq=300 sk=150 hq=2 hkv=2 d=384 dv=384 causal=1 d_lse=1",
    "b=1 sq=400 sk=400 hq=2 hkv=1 d=320 dv=264 wl=60 wr=70",
    "b=1 sq=260 sk=300 hq=2 hkv=1 d=512 dv=64 wl=20 causal=1",
    "b=1 sq=200 sk=200 hq=2 hkv=1 d=72 dv=512",
    "data=huge sq=200 sk=300 hq=2 hkv=1 d=512 dv=512",
    "data=nan_d_o sq=200 sk=300 hq=2 hkv=1 d=512 dv=512 causal=1",
    "data=nan_value sq=200 sk=300 hq=2 hkv=1 d=512 dv=512 causal=1",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64",
    "b=1 sq=300 sk=520 hq=2 hkv=2 d=128 dv=128 causal=1",
    "b=1 sq=520 sk=300 hq=2 hkv=1 d=96 dv=96 causal=1 top_left=1 deterministic=1",
    "b=3 sq=260 sk=260 hq=4 hkv=2 d=128 dv=128 q=packed k=packed causal=1 sink=1 d_sink=1 d_lse=1",
    "b=3 sq=200 sk=390 hq=2 hkv=1 d=128 dv=64 used=1 causal=1",
    "b=1 sq=400 sk=520 hq=2 hkv=2 d=128 dv=128 wl=128 wr=0",
    "b=2 sq=200 sk=300 hq=2 hkv=1 d=256 dv=256",
    "b=1 sq=300 sk=520 hq=2 hkv=2 d=256 dv=256 causal=1",
    "b=1 sq=520 sk=300 hq=2 hkv=1 d=192 dv=192 causal=1",
    "b=2 sq=130 sk=257 hq=4 hkv=1 d=192 dv=128 causal=1",
    "b=1 sq=300 sk=520 hq=2 hkv=2 d=192 dv=128 order=bhsd",
    "b=1 sq=300 sk=300 hq=2 hkv=1 d=136 dv=64 causal=1",
    "b=1 sq=300 sk=300 hq=2 hkv=1 d=192 dv=256",
    "b=1 sq=300 sk=300 hq=2 hkv=2 d=256 dv=136 wl=100 wr=30",
    "b=2 sq=257 sk=391 hq=4 hkv=2 d=96 dv=96",
    "b=3 sq=260 sk=260 hq=2 hkv=1 d=96 dv=88 q=packed k=packed causal=1 sink=1 d_sink=1 d_lse=1",
    "b=2 sq=900 sk=860 hq=4 hkv=1 d=96 dv=96 deterministic=1",
    "b=1 sq=400 sk=520 hq=2 hkv=2 d=96 dv=96 wl=128 wr=0",
    "b=1 sq=400 sk=520 hq=2 hkv=2 d=256 dv=256 wl=128 wr=0 sink=1 d_sink=1 d_lse=1",
    "softcap=9 b=2 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64",
    "softcap=1 b=1 sq=300 sk=300 hq=2 hkv=2 d=96 dv=96 causal=1",
    "softcap=30 b=2 sq=257 sk=300 hq=4 hkv=2 d=128 dv=128 causal=1 deterministic=1",
    "softcap=0.5 scale=0.5 b=3 sq=260 sk=260 hq=2 hkv=1 d=128 dv=128 q=packed k=packed",
    "dropout=0.2 b=2 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64",
    "dropout=0.5 b=1 sq=300 sk=300 hq=2 hkv=2 d=96 dv=96 causal=1 sink=1 d_sink=1",
    "dropout=0.1 b=2 sq=257 sk=300 hq=4 hkv=2 d=128 dv=128 causal=1",
    "dropout=0.9 b=3 sq=260 sk=260 hq=2 hkv=1 d=128 dv=128 q=packed k=packed deterministic=1",
    // 128 queries a step, then 64, with bits generated a step ahead or within the step.
    "dropout=0.2 b=2 sq=333 sk=777 hq=4 hkv=1 d=64 dv=64",
    "dropout=0.3 b=1 sq=500 sk=600 hq=2 hkv=1 d=64 dv=64 wl=100 wr=30 alibi=h",
    "dropout=0.2 deterministic=1 b=2 sq=900 sk=860 hq=4 hkv=1 d=64 dv=64",
    "dropout=0.2 deterministic=1 b=2 sq=700 sk=700 hq=4 hkv=2 d=128 dv=128 causal=1",
    "dropout=0.4 block_mask=bhqk block_q=128 block_k=128 b=2 sq=700 sk=520 hq=4 hkv=2 d=64 dv=64 causal=1",
    "dropout=0.3 softcap=5 b=1 sq=500 sk=600 hq=2 hkv=1 d=128 dv=128 wl=100 wr=30",
    "mask=qk b=2 sq=200 sk=320 hq=2 hkv=1 d=64 dv=64",
    "mask=bhqk b=2 sq=200 sk=299 hq=2 hkv=1 d=96 dv=96 causal=1",
    "mask=hqk b=2 sq=257 sk=388 hq=4 hkv=2 d=128 dv=128",
    "mask=k b=3 sq=200 sk=390 hq=2 hkv=1 d=128 dv=128 used=1 causal=1",
    "mask=bk softcap=9 dropout=0.2 b=3 sq=260 sk=260 hq=2 hkv=1 d=64 dv=64 q=packed k=packed",
    "bias=hqk d_bias=1 b=1 sq=200 sk=320 hq=2 hkv=1 d=64 dv=64",
    "bias=bhqk d_bias=1 b=2 sq=200 sk=298 hq=2 hkv=1 d=64 dv=64 causal=1 deterministic=1",
    "bias=qk d_bias=1 b=2 sq=200 sk=299 hq=2 hkv=1 d=96 dv=96",
    "bias=hqk bias_f32=1 d_bias=1 b=2 sq=300 sk=320 hq=2 hkv=1 d=64 dv=64 causal=1",
    "bias=bhqk bias_f32=1 d_bias=1 b=2 sq=200 sk=392 hq=4 hkv=2 d=128 dv=128",
    "bias=hqk b=2 sq=257 sk=384 hq=4 hkv=2 d=128 dv=128 causal=1",
    "bias=hk b=3 sq=260 sk=260 hq=2 hkv=1 d=128 dv=128 q=packed k=packed causal=1",
    "bias=bhqk d_bias=1 b=3 sq=200 sk=390 hq=2 hkv=1 d=128 dv=128 used=1 sink=1 deterministic=1",
    "bias=hqk d_bias=1 b=2 sq=70 sk=70 hq=2 hkv=1 d=128 dv=128 scale=-0.1 wl=20 wr=10",
    "mask=qk bias=hqk d_bias=1 alibi=h dropout=0.2 sink=1 b=2 sq=200 sk=320 hq=2 hkv=1 d=64 dv=64 causal=1",
    "mask=hqk bias=qk bias_f32=1 d_bias=1 alibi=h dropout=0.2 b=2 sq=300 sk=298 hq=2 hkv=1 d=128 dv=128",
    "mask=qk scale=-0.2 b=1 sq=200 sk=256 hq=2 hkv=2 d=128 dv=128",
    // Above head sizes of 128, by pairs of blocks: each option, packed sequences with the next one's NaN after them,
    // and all deterministic.
    "b=4 sq=300 sk=300 hq=4 hkv=2 d=256 dv=256 q=packed k=packed causal=1 sink=1 d_sink=1 d_lse=1",
    "b=3 sq=260 sk=260 hq=2 hkv=1 d=192 dv=192 q=packed k=packed wl=100 wr=30",
    "b=3 sq=260 sk=390 hq=2 hkv=1 d=192 dv=128 q=packed k=packed causal=1 deterministic=1",
    "b=3 sq=200 sk=390 hq=2 hkv=1 d=256 dv=136 used=1 causal=1",
    "b=5 sq=150 sk=700 hq=2 hkv=2 d=256 dv=256 k=packed deterministic=1",
    "data=nan_key b=4 sq=300 sk=400 hq=2 hkv=1 d=192 dv=192 q=packed k=packed used=1",
    "data=nan_d_o b=4 sq=300 sk=400 hq=2 hkv=1 d=256 dv=256 q=packed k=packed causal=1",
    "data=nan_query b=3 sq=200 sk=300 hq=2 hkv=1 d=256 dv=256 q=packed k=packed",
    "softcap=9 b=2 sq=200 sk=300 hq=2 hkv=1 d=256 dv=256",
    "softcap=30 b=2 sq=257 sk=300 hq=4 hkv=2 d=192 dv=128 causal=1",
    "softcap=5 b=3 sq=260 sk=260 hq=2 hkv=1 d=192 dv=192 q=packed k=packed deterministic=1",
    "alibi=bh b=2 sq=257 sk=300 hq=4 hkv=2 d=256 dv=256 causal=1 scale=-0.1",
    "dropout=0.2 b=2 sq=333 sk=500 hq=4 hkv=1 d=256 dv=256",
    "dropout=0.5 b=1 sq=300 sk=300 hq=2 hkv=2 d=192 dv=192 causal=1 sink=1 d_sink=1",
    "dropout=0.9 b=3 sq=260 sk=260 hq=2 hkv=1 d=256 dv=256 q=packed k=packed deterministic=1",
    "dropout=0.3 softcap=5 mask=qk b=1 sq=500 sk=600 hq=2 hkv=1 d=256 dv=256 wl=100 wr=30",
    "mask=bhqk b=2 sq=200 sk=320 hq=2 hkv=1 d=256 dv=256",
    "mask=k b=3 sq=200 sk=390 hq=2 hkv=1 d=192 dv=192 used=1 causal=1",
    "bias=hqk b=2 sq=257 sk=384 hq=4 hkv=2 d=256 dv=256 causal=1",
    "bias=hqk d_bias=1 b=2 sq=200 sk=299 hq=2 hkv=1 d=192 dv=192",
    "bias=bhqk bias_f32=1 d_bias=1 b=2 sq=200 sk=392 hq=4 hkv=2 d=256 dv=256 deterministic=1",
    "mask=hqk bias=qk bias_f32=1 d_bias=1 alibi=h dropout=0.2 b=2 sq=300 sk=298 hq=2 hkv=1 d=256 dv=256 causal=1",
    "mask=qk bias=hqk d_bias=1 dropout=0.2 b=3 sq=200 sk=260 hq=2 hkv=1 d=192 dv=128 q=packed k=packed",
    "block_mask=hqk block_q=64 block_k=64 softcap=9 b=1 sq=300 sk=300 hq=2 hkv=1 d=256 dv=256",
    "block_mask=hqk block_q=64 block_k=128 dropout=0.2 alibi=h b=1 sq=300 sk=300 hq=2 hkv=1 d=192 dv=192 causal=1",
    "block_mask=qk block_q=64 block_k=64 mask=qk bias=hqk d_bias=1 b=1 sq=200 sk=320 hq=2 hkv=1 d=256 dv=256",
    "data=outlier dropout=0.2 sq=300 sk=400 hq=2 hkv=1 d=256 dv=256",
    "data=nan_value bias=hqk d_bias=1 sq=300 sk=400 hq=2 hkv=1 d=256 dv=256 causal=1",
    // Transposed lists: a warpgroup's keys hidden, both; heads of a group with lists of their own, keys that no query
    // sees.
    "block_mask=qk block_q=64 block_k=64 b=2 sq=520 sk=700 hq=2 hkv=1 d=64 dv=64",
    "block_mask=bhqk block_q=128 block_k=128 b=2 sq=700 sk=520 hq=4 hkv=2 d=64 dv=64 causal=1",
    "block_mask=hqk block_q=64 block_k=128 b=1 sq=300 sk=600 hq=2 hkv=2 d=128 dv=128 sink=1 d_sink=1 d_lse=1",
    "block_mask=bqk block_q=128 block_k=64 b=2 sq=400 sk=400 hq=4 hkv=1 d=128 dv=128 causal=1",
    "block_mask=hqk block_q=192 block_k=64 b=1 sq=400 sk=500 hq=2 hkv=1 d=96 dv=96 wl=100 wr=30",
    "block_mask=hqk block_q=64 block_k=64 softcap=9 b=1 sq=300 sk=300 hq=2 hkv=1 d=64 dv=64",
    "block_mask=hqk block_q=64 block_k=128 dropout=0.2 alibi=h b=1 sq=300 sk=300 hq=2 hkv=1 d=128 dv=128 causal=1",
    "block_mask=qk block_q=64 block_k=64 mask=qk bias=hqk b=1 sq=200 sk=320 hq=2 hkv=1 d=128 dv=128",
    "data=nan_value block_mask=qk block_q=64 block_k=64 sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    // By pairs of blocks.
    "block_mask=hqk block_q=64 block_k=64 b=2 sq=900 sk=860 hq=4 hkv=2 d=256 dv=256",
    "block_mask=bhqk block_q=128 block_k=128 b=2 sq=700 sk=520 hq=4 hkv=2 d=256 dv=256 causal=1 sink=1 d_sink=1 "
    "d_lse=1",
    "block_mask=qk block_q=64 block_k=128 b=1 sq=520 sk=700 hq=2 hkv=1 d=192 dv=192 wl=100 wr=30",
    "block_mask=bqk block_q=128 block_k=64 b=2 sq=400 sk=2300 hq=2 hkv=2 d=192 dv=128 causal=1",
    "block_mask=hqk block_q=192 block_k=64 b=1 sq=400 sk=500 hq=4 hkv=1 d=136 dv=200",
    "data=nan_value block_mask=qk block_q=64 block_k=64 sq=300 sk=400 hq=2 hkv=1 d=256 dv=256",
    // Deterministic.
    "deterministic=1 block_mask=hqk block_q=64 block_k=64 b=2 sq=900 sk=860 hq=4 hkv=2 d=128 dv=128",
    "deterministic=1 block_mask=bqk block_q=128 block_k=64 b=2 sq=700 sk=900 hq=2 hkv=1 d=64 dv=64 causal=1",
    "deterministic=1 block_mask=qk block_q=64 block_k=128 dropout=0.2 mask=qk b=1 sq=500 sk=500 hq=2 hkv=2 d=128 "
    "dv=128 wl=200 wr=100",
    "deterministic=1 block_mask=hqk block_q=64 block_k=64 bias=bhqk d_bias=1 b=1 sq=300 sk=320 hq=2 hkv=2 d=96 dv=96",
    // dBias: 0 where the block mask hides it.
    "block_mask=hqk block_q=64 block_k=64 bias=bhqk d_bias=1 b=2 sq=300 sk=320 hq=4 hkv=2 d=128 dv=128 causal=1",
    "block_mask=qk block_q=64 block_k=128 bias=qk bias_f32=1 d_bias=1 mask=qk b=2 sq=200 sk=298 hq=2 hkv=1 d=64 dv=64",
    // More tiles of keys than threads that order them, and long lists among short ones.
    "block_mask=hqk block_q=64 block_k=128 b=2 sq=700 sk=4500 hq=4 hkv=2 d=64 dv=64 causal=1",
    "block_mask=bqk block_q=64 block_k=64 b=2 sq=900 sk=900 hq=2 hkv=2 d=128 dv=128 wl=150 wr=0",
    // More tiles of keys than multiprocessors, which process one after another; some that no query sees.
    "block_mask=hqk block_q=64 block_k=64 b=2 sq=200 sk=1800 hq=2 hkv=1 d=128 dv=128 cores=3",
    "block_mask=bqk block_q=128 block_k=128 b=2 sq=300 sk=1500 hq=2 hkv=2 d=64 dv=64 causal=1 cores=2",
    "block_mask=qk block_q=64 block_k=128 b=1 sq=150 sk=2000 hq=4 hkv=2 d=96 dv=96 wl=300 wr=100 sink=1 d_sink=1 "
    "cores=1",
    "data=outlier dropout=0.2 sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    "data=growing softcap=100 sq=200 sk=300 hq=2 hkv=1 d=128 dv=128 causal=1",
    "data=outlier sq=300 sk=400 hq=2 hkv=1 d=256 dv=256 causal=1",
    "data=nan_key mask=qk sq=300 sk=400 hq=2 hkv=1 d=128 dv=128",
    "data=nan_value bias=hqk d_bias=1 sq=300 sk=400 hq=2 hkv=1 d=64 dv=64 causal=1",
    "data=nan_d_o softcap=9 sq=300 sk=400 hq=2 hkv=1 d=128 dv=128 causal=1",
    "data=nan_query sq=500 sk=600 hq=2 hkv=1 d=256 dv=256 wl=100 wr=30",
    "data=nan_value sq=500 sk=600 hq=2 hkv=1 d=256 dv=256 causal=1",
    "data=nan_value sq=500 sk=600 hq=2 hkv=1 d=192 dv=128 causal=1",
    "data=nan_d_o sq=500 sk=600 hq=2 hkv=1 d=96 dv=96 causal=1",
    "data=inf_bias bias=hqk d_bias=1 sq=200 sk=300 hq=2 hkv=1 d=128 dv=128",
    // Rotated, the last query tile half as far from the one before, heads of a group; then from the first keys on.
    "deterministic=1 b=2 sq=700 sk=700 hq=4 hkv=2 d=128 dv=128",
    "deterministic=1 b=2 sq=900 sk=860 hq=4 hkv=1 d=64 dv=64",
    "deterministic=1 b=1 sq=500 sk=500 hq=2 hkv=2 d=64 dv=64 dropout=0.2 mask=qk",
    "deterministic=1 b=1 sq=500 sk=300 hq=2 hkv=2 d=96 dv=128 bias=bhqk d_bias=1",
    "deterministic=1 b=2 sq=150 sk=700 hq=2 hkv=1 d=128 dv=128 used=1",
    "deterministic=1 b=1 sq=600 sk=700 hq=2 hkv=1 d=64 dv=64 wl=200 wr=100",
    "deterministic=1 data=nan_d_o sq=500 sk=500 hq=2 hkv=1 d=128 dv=128",
    // The same by pairs of blocks.
    "deterministic=1 b=2 sq=700 sk=700 hq=4 hkv=2 d=256 dv=256",
    "deterministic=1 b=1 sq=500 sk=620 hq=2 hkv=1 d=256 dv=256 causal=1 sink=1 d_sink=1",
    "deterministic=1 b=1 sq=600 sk=700 hq=2 hkv=2 d=192 dv=192 wl=200 wr=100",
    "deterministic=1 b=2 sq=300 sk=500 hq=2 hkv=1 d=192 dv=128 causal=1 top_left=1",
    "deterministic=1 b=1 sq=150 sk=1500 hq=2 hkv=1 d=256 dv=256",
    "deterministic=1 data=nan_d_o sq=500 sk=500 hq=2 hkv=1 d=256 dv=256 causal=1",
    // Head sizes between those of the tiles: columns that a tensor lacks, beside others.
    "b=3 sq=260 sk=260 hq=4 hkv=2 d=96 dv=96 q=packed k=packed causal=1 sink=1 d_sink=1 d_lse=1",
    "b=3 sq=260 sk=260 hq=2 hkv=1 d=80 dv=88 q=packed k=packed deterministic=1",
    "b=1 sq=400 sk=520 hq=2 hkv=2 d=72 dv=96 wl=128 wr=0",
    "dropout=0.2 mask=qk bias=hqk bias_f32=1 d_bias=1 b=2 sq=200 sk=300 hq=4 hkv=2 d=96 dv=96",
    "data=nan_value sq=200 sk=300 hq=2 hkv=1 d=96 dv=96 causal=1",
    "data=outlier sq=300 sk=400 hq=2 hkv=1 d=96 dv=96",
    "b=1 sq=400 sk=520 hq=2 hkv=2 d=192 dv=128 wl=128 wr=0 sink=1 d_sink=1 d_lse=1",
    "b=2 sq=130 sk=257 hq=4 hkv=2 d=160 dv=72",
    "b=1 sq=200 sk=300 hq=2 hkv=1 d=136 dv=184 causal=1 order=bhsd",
    // A group of query heads in one block, where the multiprocessors are few; elsewhere in several, as above.
    "b=2 sq=200 sk=300 hq=4 hkv=1 d=64 dv=64 cores=1",
    "b=1 sq=300 sk=520 hq=8 hkv=2 d=128 dv=128 causal=1 cores=1 deterministic=1",
    "b=1 sq=300 sk=300 hq=6 hkv=1 d=192 dv=128 dropout=0.2 cores=1",
    "b=2 sq=150 sk=200 hq=12 hkv=2 d=128 dv=64 causal=1 d_lse=1 order=bhsd cores=40",
    "deterministic=1 b=1 sq=500 sk=500 hq=8 hkv=1 d=64 dv=64 bias=qk",
    "block_mask=hqk block_q=64 block_k=64 b=1 sq=300 sk=400 hq=8 hkv=2 d=96 dv=96",
    // 192 beside 128: scores of half of a step's queries at once.
    "b=3 sq=260 sk=260 hq=2 hkv=1 d=192 dv=128 q=packed k=packed causal=1 sink=1 d_sink=1 d_lse=1",
    "b=3 sq=200 sk=390 hq=2 hkv=1 d=192 dv=96 used=1 wl=100 wr=30",
    "dropout=0.2 b=2 sq=130 sk=257 hq=4 hkv=1 d=192 dv=128 causal=1",
    "alibi=h dropout=0.3 b=1 sq=300 sk=300 hq=2 hkv=1 d=192 dv=128",
    "mask=hqk b=1 sq=200 sk=320 hq=2 hkv=1 d=192 dv=128",
    "mask=qk bias=hqk bias_f32=1 d_bias=1 dropout=0.2 b=1 sq=200 sk=298 hq=2 hkv=1 d=160 dv=128 causal=1",
    "block_mask=hqk block_q=64 block_k=64 b=1 sq=300 sk=400 hq=4 hkv=2 d=192 dv=128 causal=1",
    "data=nan_value b=3 sq=200 sk=300 hq=2 hkv=1 d=192 dv=128 q=packed k=packed used=1 causal=1",
    "data=outlier b=1 sq=300 sk=400 hq=2 hkv=1 d=192 dv=128",
    "data=nan_d_o sq=200 sk=300 hq=2 hkv=1 d=192 dv=128 causal=1",
    "data=nan_key sq=200 sk=300 hq=2 hkv=1 d=192 dv=192 causal=1",
    // Scores that share a large number, the largest and lowest biases, sinks far above and below.
    "b=1 sq=100 sk=200 hq=2 hkv=1 d=400 dv=400 data=shared low=1",
    "b=1 sq=130 sk=200 hq=2 hkv=2 d=256 dv=256 data=shared low=1 causal=1 wl=60 d_lse=1 sink=2 d_sink=1",
    "b=1 sq=130 sk=200 hq=2 hkv=2 d=192 dv=192 bias=bhqk data=huge_bias low=1 d_bias=1",
    "b=2 sq=130 sk=200 hq=4 hkv=2 d=128 dv=128 bias=hqk data=huge_bias low=1 d_bias=1 sink=2 d_sink=1",
    "b=2 sq=130 sk=200 hq=4 hkv=2 d=128 dv=128 data=shared low=1 dropout=0.2 state=1",
    "b=3 sq=200 sk=200 hq=2 hkv=1 d=64 dv=64 q=packed k=packed data=shared low=1 causal=1 sink=2 d_sink=1",
    "b=2 sq=130 sk=200 hq=4 hkv=2 d=64 dv=64 softcap=5000 data=shared low=1",
};

// bwd_sm90 with a block that has a head and keeps its dQ, of bfloat16 only: several tiles of each, ends within them,
// rows that see nothing, NaN, far rows.
constexpr const char* kHopperWholeHeads[] = {
    "b=2 sq=512 sk=512 hq=2 hkv=2 d=64 dv=64 causal=1 cores=1",
    "b=1 sq=257 sk=400 hq=2 hkv=2 d=64 dv=64 d_lse=1 sink=1 cores=1",
    "b=2 sq=300 sk=130 hq=1 hkv=1 d=40 dv=64 causal=1 order=bhsd cores=1",
    "b=2 sq=130 sk=500 hq=1 hkv=1 d=64 dv=48 causal=1 top_left=1 deterministic=1 cores=1",
    "b=2 sq=400 sk=512 hq=1 hkv=1 d=64 dv=64 wl=60 wr=10 cores=1",
    "data=nan_d_o b=2 sq=300 sk=300 hq=2 hkv=2 d=64 dv=64 causal=1 cores=1",
    "data=nan_value b=2 sq=300 sk=300 hq=2 hkv=2 d=64 dv=64 causal=1 cores=1",
    "b=2 sq=200 sk=300 hq=2 hkv=2 d=64 dv=64 data=shared low=1 causal=1 cores=1",
};

constexpr int64_t kDtypes[] = {TESSERA_BFLOAT16, TESSERA_FLOAT16};

}  // namespace

std::vector<Case> hopper_cases() {
  std::vector<Case> cases;
  // Alternately: the code differs only in the product.
  const auto add_alternating = [&cases](std::span<const char* const> lines) {
    for (size_t n = 0; n < lines.size(); ++n) {
      cases.push_back(*parse_case(lines[n], nullptr));
      cases.back().dtype = kDtypes[n % std::size(kDtypes)];
    }
  };
  add_alternating(kHopper);
  add_alternating(kHopperBlocks);
  // float16's range is smaller, and so is the bound of its P.
  for (const char* line : kHopperNumerics) {
    for (const int64_t dtype : kDtypes) {
      cases.push_back(*parse_case(line, nullptr));
      cases.back().dtype = dtype;
    }
  }
  add_alternating(kHopperOptions);
  const size_t forward = cases.size();
  add_alternating(kHopperBackward);
  for (const char* line : kHopperWholeHeads) {
    cases.push_back(*parse_case(line, nullptr));
    cases.back().dtype = TESSERA_BFLOAT16;
  }
  for (size_t n = forward; n < cases.size(); ++n) cases[n].backward = 1;
  return cases;
}

}  // namespace tessera::testing
