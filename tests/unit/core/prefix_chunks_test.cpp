// The problem of shared prefixes in chunks: where each chunk's row of a head lies.
#include "core/prefix_chunks.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kTokens = 5, kHeads = 2, kGroup = 3, kChunks = 4, kRows = kTokens * kGroup;

// The prefixes' part of a call: packed queries, one sequence for each group of sequences.
Problem part_of(std::int64_t groups) {
  Problem part;
  part.q = layout(float16, {kTokens, kHeads * kGroup, 16}), part.o = layout(float16, {kTokens, kHeads * kGroup, 24});
  part.k = layout(float16, {groups * 1000, kHeads, 16}), part.v = layout(float16, {groups * 1000, kHeads, 24});
  part.lse = layout(float32, {kHeads * kGroup, kTokens});
  part.cu_seqlens_q = part.cu_seqlens_k = layout(int32, {groups + 1});
  return part;
}

// The element of row `row` of a chunk, [.., rows, heads, columns]: packed, or a sequence for each chunk.
std::int64_t element(const tessera_layout& of, std::int64_t chunk, std::int64_t row, std::int64_t head) {
  EXPECT_TRUE(of.rank == 3 || (of.shape[0] == kChunks && of.shape[1] == kRows)) << of.rank;
  return of.rank == 3 ? (chunk * kRows + row) * of.strides[0] + head * of.strides[1]
                      : chunk * of.strides[0] + row * of.strides[1] + head * of.strides[2];
}
std::int64_t lse_element(const tessera_layout& of, std::int64_t chunk, std::int64_t row, std::int64_t head) {
  return of.rank == 2 ? head * of.strides[0] + (chunk * kRows + row) * of.strides[1]
                      : chunk * of.strides[0] + head * of.strides[1] + row * of.strides[2];
}

// ChunkMemory: q and o [C T group, Hkv, D or Dv], the LSE [Hkv, C T group], with one group and with several.
TEST(PrefixChunks, RowsLieWhereTheMergeReadsThem) {
  for (const std::int64_t groups : {1, 3}) {
    const tessera_problem p = core::chunked(part_of(groups), kChunks, 1);
    EXPECT_EQ(p.q.rank, groups == 1 ? 4 : 3);
    EXPECT_EQ(p.lse.rank, groups == 1 ? 3 : 2);
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk)
      for (std::int64_t row = 0; row < kRows; ++row)
        for (std::int64_t head = 0; head < kHeads; ++head) {
          const std::int64_t at = (chunk * kRows + row) * kHeads + head;
          EXPECT_EQ(element(p.q, chunk, row, head), at * 16);
          EXPECT_EQ(element(p.o, chunk, row, head), at * 24);
          EXPECT_EQ(lse_element(p.lse, chunk, row, head), head * kChunks * kRows + chunk * kRows + row);
        }
    EXPECT_EQ(p.q.strides[p.q.rank - 1], 1);
    EXPECT_EQ(p.o.strides[p.o.rank - 1], 1);
    const std::int64_t sequences = groups == 1 ? kChunks : 2 * kChunks * groups;
    EXPECT_EQ(core::chunk_sequences(kChunks, groups), sequences);
    EXPECT_EQ(p.seqused_k.shape[0], sequences);
    EXPECT_EQ(p.cu_seqlens_k.shape[0], sequences + 1);
    EXPECT_EQ(p.cu_seqlens_q.rank, groups == 1 ? 0 : 1);
  }
}

// A chunk has whole units of keys, and no chunk more than the largest says.
TEST(PrefixChunks, AreBoundedByTheLongest) {
  Problem part = part_of(1);
  for (const std::int64_t keys : {1, 127, 128, 129, 512, 513, 1000}) {
    part.k.shape[0] = part.v.shape[0] = part.max_seqlen_k = keys;
    const std::int64_t most = core::chunked(part, kChunks, 1).max_seqlen_k;
    EXPECT_TRUE(most == keys || most % 128 == 0) << keys;
    EXPECT_GE(kChunks * most, keys);
    EXPECT_LT(most, keys / kChunks + 1 + 128);
  }
}

}  // namespace
}  // namespace tessera::test
