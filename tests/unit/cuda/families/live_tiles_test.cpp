// The non-empty work tiles of a packed batch, kernels/tessera/live_tiles, and fwd_sm90's decoding of them, on the host
// (tests/emulated_gpu): every tile of the sequences that it serves occurs once, and no other tile does.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/fwd_sm90/shared.cuh"
#include "tessera/live_tiles/kernel.cuh"
#include "unit_launch.hpp"

namespace tessera {
namespace {

constexpr FwdSm90Config config_of(bool causal) {
  FwdSm90Config c{};
  c.dtype = Dtype::kBFloat16, c.head_dim = c.head_dim_v = 128;
  c.block_n = 128, c.consumers = 2, c.varying_tile_cost = causal, c.cluster = 1, c.varlen = c.live_tiles = true;
  return c;
}

template <FwdSm90Config kConfig>
void decode_all() {
  constexpr int kRows = kConfig.consumers * kConsumerRows;
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int trial = 0; trial < 40; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", trial " + std::to_string(trial));
    FwdSm90Params p{};
    p.batch = draw(1, draw(0, 1) ? 100 : 5);
    const int heads = draw(1, 5);
    p.heads_q = p.heads_kv = Divisor(heads), p.group = Divisor(1);
    p.decoded_queries = draw(0, 3) ? draw(1, 16) : 0;
    p.causal = kConfig.varying_tile_cost;
    std::vector<int> cu{draw(0, 3)}, lengths;
    for (int b = 0; b < p.batch; ++b) {
      lengths.push_back(draw(0, 3) ? draw(0, 16) : draw(0, 900));
      cu.push_back(cu.back() + lengths.back());
    }
    p.cu_seqlens_q = cu.data(), p.cu_seqlens_q_stride = 1;
    p.rows_q = cu.back() + draw(0, 3), p.max_seqlen_q = 900;
    p.seqlen_k = p.max_seqlen_k = p.keys_limit = 1000;

    LiveTilesParams made{};
    static_cast<ProblemParams&>(made) = p;
    made.order.heads = heads, made.order.swizzle_heads = Divisor(draw(1, heads));
    made.order.paired_heads = kConfig.varying_tile_cost && draw(0, 1) ? heads : 0;
    made.order.ascending = draw(0, 1);
    std::vector<std::array<int, 16>> memory(static_cast<size_t>(live_tiles_bytes(p.batch)) / 64 + 1);
    for (auto& line : memory) line.fill(-1);
    made.tiles = reinterpret_cast<LiveTiles*>(memory.data());
    ASSERT_EQ(emulated::run_blocks({}, kLiveTilesThreads, 0, [&] { live_tiles<LiveTilesConfig{kRows}>(made); }), 0);

    p.live = made.tiles;
    EXPECT_EQ(p.live->counter, 0);
    std::map<std::tuple<int, int, int>, int> found;  // (batch, head, first row) -> how often
    const int count = work_tiles(WorkTile<kConfig>::order_of(p));
    for (int index = 0; index < count; ++index) {
      WorkTile<kConfig> tile;
      tile.decode(p, index);
      ASSERT_GT(tile.count, 0);
      ASSERT_LT(tile.head, heads);
      ++found[{tile.batch, tile.head, tile.row0}];
    }
    int expected = 0;
    for (int b = 0; b < p.batch; ++b) {
      const int rows = lengths[static_cast<size_t>(b)];
      if (rows <= p.decoded_queries) continue;
      for (int head = 0; head < heads; ++head)
        for (int row0 = 0; row0 < rows; row0 += kRows, ++expected) {
          ASSERT_EQ((found[{b, head, row0}]), 1) << b << " " << head << " " << row0;
        }
    }
    EXPECT_EQ(count, expected);
  }
}

TEST(DeviceLiveTiles, AreEachDecodedOnce) {
  decode_all<config_of(false)>();
  decode_all<config_of(true)>();
}

}  // namespace
}  // namespace tessera
