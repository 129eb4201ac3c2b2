// The bits that bwd_sm90's dropout warps generate, kernels/tessera/attention/dropout.cuh, on the host
// (tests/emulated_warp): each bit read by a lane of a score warp is that of core/philox.hpp for its entry.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "core/philox.hpp"
#include "tessera/attention/dropout.cuh"

namespace tessera {
namespace {

constexpr int kBlockM = 128, kBlockN = 128;

TEST(CudaBwdSm90Dropout, EveryLaneReadsItsOwn) {
  std::mt19937_64 random(std::random_device{}());
  for (int round = 0; round < 8; ++round) {
    const core::Dropout dropout{random(), random(), static_cast<uint32_t>(random() % 65536)};
    const int row0 = static_cast<int>(random() % 100) * kBlockM, key0 = static_cast<int>(random() % 100) * kBlockN;
    const int head = static_cast<int>(random() % 1000);
    ProblemParams p{};
    p.dropout_threshold = dropout.threshold, p.dropout_offset = static_cast<uint32>(dropout.offset);
    core::PhiloxKey key = core::dropout_key(dropout.seed, dropout.offset);
    for (auto& of_round : p.dropout_keys) of_round[0] = key[0], of_round[1] = key[1], key = core::next_key(key);

    std::vector<uint32> words(kBlockM * kBlockN / 32);
    const int64 state[2] = {static_cast<int64>(dropout.seed), static_cast<int64>(dropout.offset)};
    ProblemParams of_state = p;
    std::memset(of_state.dropout_keys, 0, sizeof of_state.dropout_keys);
    of_state.dropout_offset = 0, of_state.dropout_state = state, of_state.dropout_state_stride = 1;
    for (size_t n = 0; n < words.size(); ++n) {
      words[n] = DropoutBits::generate<false>(p, head, row0, key0, static_cast<uint32>(n));
      ASSERT_EQ(DropoutBits::generate<true>(of_state, head, row0, key0, static_cast<uint32>(n)), words[n]);
    }

    // As ScoreWarpgroup::mark_dropped reads them.
    for (int warp = 0; warp < 8; ++warp)
      for (int lane = 0; lane < 32; ++lane)
        for (int m = 0; m < kBlockM / 8; ++m)
          for (int half = 0; half < 2; ++half) {
            const int at = DropoutBits::word_offset(warp / 2, lane / 8, lane % 4) + m / 2 * DropoutBits::kWordStep;
            const uint32 word = words[at / 4] >> DropoutBits::bit(warp % 2 * 2, lane / 4 % 2);
            const uint32 signs = DropoutBits::signs(word, m % 2, half);
            const int query = row0 + m * 8 + lane % 4 * 2, column = key0 + warp * 16 + half * 8 + lane / 4;
            ASSERT_EQ(signs >> 15 & 1, dropout.keeps(head, query, column) ? 0u : 1u) << warp << ' ' << lane << ' ' << m;
            ASSERT_EQ(signs >> 31, dropout.keeps(head, query + 1, column) ? 0u : 1u) << warp << ' ' << lane << ' ' << m;
            ASSERT_EQ(signs & 0x7fff7fffu, 0u);
          }
  }
}

}  // namespace
}  // namespace tessera
