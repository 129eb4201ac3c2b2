// The lists of blocks that a program's mask shows (kernels/tessera/block_lists/program_lists.cuh), made by emulated
// blocks of threads, against the mask of every pair: which blocks are listed, hidden from a half of the rows, or full.
// And the order in which blocks of keys add to dQ (dq_order.cuh).
// Sequences are dense, use some of their keys, or are packed: queries, keys, or both.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "core/score/cuda_programs.hpp"
#include "core/score/cuda_text.hpp"
#include "core/score/cuda_text_table.hpp"
#include "core/score/definitions.hpp"
#include "core/score/facts.hpp"
#include "core/score/storage.hpp"
#include "cuda/score_program.hpp"
#include "tessera/block_lists/dq_order.cuh"

namespace tessera::testing {
namespace {

using core::score::Op;

// Tiles of a sequence or, packed, padded tile indices of the batch.
int tiles_of(const std::vector<int>& offsets, int longest, int rows) {
  if (offsets.empty()) return (longest + rows - 1) / rows;
  return offsets.back() / rows + static_cast<int>(std::ssize(offsets)) - 1;
}

struct Lists {
  const CudaTextEntry& text;
  const World& world;
  bool transposed;
  ProgramListsParams p{};
  int count = 0;                              // of the lists
  std::vector<int> cu_seqlens[2], seqused_k;  // of queries and of keys, if they are packed
  std::vector<int> words;
  std::vector<char> bounds, block_mask;

  Lists(const CudaTextEntry& of, const CudaProgram& program, const World& sizes, bool is_transposed,
        std::mt19937& random)
      : text(of), world(sizes), transposed(is_transposed) {
    const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    p.batch = static_cast<int>(world.batch);
    p.heads_q = Divisor(static_cast<int>(world.heads)), p.heads_kv = Divisor(static_cast<int>(world.heads_kv));
    p.group = Divisor(static_cast<int>(world.heads / world.heads_kv));
    p.seqlen_q = p.rows_q = p.max_seqlen_q = static_cast<int>(world.len_q);
    p.seqlen_k = p.keys_limit = p.max_seqlen_k = static_cast<int>(world.len_k);
    // Any lengths up to those, and rows before the first sequence.
    const bool varlen = draw(0, 2) != 0;
    for (const bool of_keys : {false, true}) {
      if (!varlen || draw(0, 2) == 0) continue;
      std::vector<int>& offsets = cu_seqlens[of_keys];
      offsets.push_back(draw(0, 100));
      for (int b = 0; b < p.batch; ++b) offsets.push_back(offsets.back() + draw(0, of_keys ? p.seqlen_k : p.seqlen_q));
      if (of_keys) {
        p.keys.begins = offsets.data(), p.keys.begins_stride = 1, p.keys_limit = offsets.back();
      } else {
        p.cu_seqlens_q = offsets.data(), p.cu_seqlens_q_stride = 1, p.rows_q = offsets.back();
      }
    }
    if (varlen && draw(0, 1)) {
      for (int b = 0; b < p.batch; ++b) seqused_k.push_back(draw(0, p.seqlen_k));
      p.seqused_k = seqused_k.data(), p.seqused_k_stride = 1;
    }
    p.causal = draw(0, 2) == 0;
    p.window_left = draw(0, 3) ? -1 : draw(0, 300), p.window_right = draw(0, 3) ? -1 : draw(0, 300);
    const core::score::InputSet inputs = facts_of(*program.checked).mask_inputs;
    const int batches = varlen || inputs & input_bit(Op::kB) ? p.batch : 1;
    p.heads = inputs & (input_bit(Op::kH) | input_bit(Op::kHkv)) ? static_cast<int>(world.heads) : 1;
    if (!varlen && draw(0, 3) == 0) {
      p.mask_block_q = p.mask_block_k = 64;
      const int rows = (p.seqlen_q + 63) / 64, cols = (p.seqlen_k + 63) / 64;
      block_mask.resize(static_cast<size_t>(rows) * static_cast<size_t>(cols));
      for (char& shown : block_mask) shown = draw(0, 2) != 0;
      p.block_mask = {block_mask.data(), 0, 0, cols, 1};
    }
    const int length = transposed ? p.seqlen_k : p.seqlen_q, other = transposed ? p.seqlen_q : p.seqlen_k;
    const std::vector<int>&rows = cu_seqlens[transposed], &cols = cu_seqlens[!transposed];
    p.lists.tiles = tiles_of(rows, length, kListRows), p.lists.most = (other + kListCols - 1) / kListCols;
    p.lists.head = p.heads > 1 ? p.lists.tiles : 0;
    p.lists.batch = batches > 1 && rows.empty() ? p.heads * p.lists.tiles : 0;
    count = (rows.empty() ? batches : 1) * p.heads * p.lists.tiles;
    p.column_masks = (cols.empty() ? batches : 1) * p.heads;
    p.column_blocks = tiles_of(cols, other, kListCols);
    p.column_groups = tiles_of(cols, other, kListCols * kBoundsGroup);
    const int values = transposed ? text.mask_row_values : text.mask_column_values;
    const int bytes = 8 * values * p.column_masks * (p.column_blocks + p.column_groups);
    bounds.resize(static_cast<size_t>(std::max(bytes, 1)), '\xff');
    p.bounds = bounds.data();
    words.assign(static_cast<size_t>(program_pool_at(count) + count * 2 * p.lists.most), 0x55555555);
    p.lists.words = words.data();
    set_room(count * p.lists.most);
  }
  // The entries that the pool holds.
  void set_room(int entries) { p.end_word = static_cast<int>(program_pool_at(count)) + entries; }

  void make(const ScoreProgramParams& program) { (transposed ? text.transposed_lists : text.lists)(p, count, program); }

  // Each mask's tiles in the order of their lists' lengths, the longest first; those that were not made before them.
  void expect_tiles_ordered() const {
    const auto length = [&](int list) {
      return static_cast<unsigned>(words[static_cast<size_t>(program_head_at(list))]);
    };
    for (int first = 0; first < count; first += p.lists.tiles) {
      std::vector<bool> seen(static_cast<size_t>(p.lists.tiles));
      for (int n = 0; n < p.lists.tiles; ++n) {
        const int tile = *ordered_tile(p.lists, first, n);
        ASSERT_TRUE(0 <= tile && tile < p.lists.tiles && !seen[static_cast<size_t>(tile)]) << "place " << n;
        seen[static_cast<size_t>(tile)] = true;
        if (n == 0) continue;
        const int before = *ordered_tile(p.lists, first, n - 1);
        EXPECT_GE(length(first + before), length(first + tile)) << "place " << n;
        EXPECT_TRUE(length(first + before) > length(first + tile) || before > tile) << "place " << n;
      }
    }
  }

  // The places of the entries of transposed lists in the order of additions.
  void expect_ordered(bool last_keys_first) {
    DqOrderParams o{};
    static_cast<ProblemParams&>(o) = p;
    o.lists = p.lists, o.order.beside = p.end_word - program_pool_at(count);
    o.heads = p.heads, o.masks = p.column_masks, o.blocks = p.column_blocks;
    o.last_keys_first = last_keys_first;
    const auto blocks = static_cast<unsigned>((o.masks * o.blocks + kBlockListsWarps - 1) / kBlockListsWarps);
    EXPECT_EQ(emulated::run_blocks({.x = blocks}, 32 * kBlockListsWarps, 0,
                                   [&] {
                                     dq_order<DqOrderConfig{kListRows, kListCols, true, true}>(o);
                                   }),
              0);
    std::map<std::tuple<int, int, int>, int> added;  // sequence, head, tile of queries
    const int batches = p.lists.batch > 0 || !cu_seqlens[1].empty() || !cu_seqlens[0].empty() ? p.batch : 1;
    for (int batch = 0; batch < batches; ++batch) {
      const int tiles = (load_sequence<true>(p, batch).sk + kListRows - 1) / kListRows;
      for (int head = 0; head < p.heads; ++head) {
        for (int n = 0; n < tiles; ++n) {
          const ListHead list =
              list_head<true>(p.lists, first_list(batch, head) + (last_keys_first ? tiles - 1 - n : n));
          for (int entry = 0; entry < list.count; ++entry) {
            ASSERT_EQ(list.entries[entry + o.order.beside],
                      (added[{batch, head, list_block<true>(list.entries[entry])}]++))
                << "sequence " << batch << ", head " << head << ", keys " << n << ", entry " << entry;
          }
        }
      }
    }
  }

  struct Half {
    bool shows = false, hides = false;
  };
  // What the mask does to the pairs of a half that are visible by position and by the block mask.
  Half half(const ScoreProgramParams& program, int batch, int head, int row0, int col0) const {
    Half result;
    const Sequence s = load_sequence<true>(p, batch);
    for (int row = row0; row < std::min(row0 + kListRows / 2, transposed ? s.sk : s.sq); ++row) {
      for (int col = col0; col < std::min(col0 + kListCols, transposed ? s.sq : s.sk); ++col) {
        const int query = transposed ? col : row, key = transposed ? row : col;
        if (!visible_keys(p, s, query).holds(key, 1)) continue;
        if (!block_mask.empty() && !block_mask[static_cast<size_t>(query / 64 * p.block_mask.row + key / 64)]) continue;
        const ProgramPlace at{batch, head, head / p.group, query, key, query + s.sk - s.sq, s.sq, s.sk};
        (text.visible(program, at, 0.0f) ? result.shows : result.hides) = true;
      }
    }
    return result;
  }

  // The place of the first list of a sequence and head among all lists, as kernels find it.
  int first_list(int batch, int head) const {
    const std::vector<int>& rows = cu_seqlens[transposed];
    return p.lists.at(batch, head, rows.empty() ? 0 : rows[static_cast<size_t>(batch)] / kListRows + batch);
  }
  // The number of lists that were made, each of which must be right; those of no sequence are empty. If one found no
  // room, none is made.
  int expect_right(const ScoreProgramParams& program) const {
    if (words[kProgramLacksRoom] != 0) {
      for (int list = 0; list < count; ++list) EXPECT_EQ(list_head<true>(p.lists, list).count, kListNotMade);
      return 0;
    }
    std::vector<bool> owned(static_cast<size_t>(count));
    const int batches = p.lists.batch > 0 || !cu_seqlens[transposed].empty() ? p.batch : 1;
    int made = 0;
    for (int batch = 0; batch < batches; ++batch) {
      const Sequence s = load_sequence<true>(p, batch);
      const int tiles = ((transposed ? s.sk : s.sq) + kListRows - 1) / kListRows;
      for (int head = 0; head < p.heads; ++head) {
        for (int tile = 0; tile < tiles; ++tile) {
          const int list = first_list(batch, head) + tile;
          EXPECT_FALSE(owned[static_cast<size_t>(list)]);
          owned[static_cast<size_t>(list)] = true;
          made += expect_list(program, list, batch, head, tile);
          if (::testing::Test::HasFailure()) return made;
        }
      }
    }
    for (int list = 0; list < count; ++list) {
      if (owned[static_cast<size_t>(list)]) continue;
      ++made;
      EXPECT_EQ(list_head<true>(p.lists, list).count, 0) << "list " << list << " of no rows";
    }
    return made;
  }
  // Whether the list of a tile was made, which then must be right.
  bool expect_list(const ScoreProgramParams& program, int list, int batch, int of_head, int tile) const {
    const ListHead head = list_head<true>(p.lists, list);
    if (head.count == kListNotMade) return false;
    const int row0 = tile * kListRows;
    int next = 0;
    for (int n = 0; n < p.lists.most; ++n) {
      const int block = transposed ? p.lists.most - 1 - n : n;
      const bool listed = next < head.count && list_block<true>(head.entries[next]) == block;
      const int entry = listed ? head.entries[next++] : kListHidden;
      for (int h = 0; h < kListHalves; ++h) {
        const Half seen = half(program, batch, of_head, row0 + h * kListRows / 2, block * kListCols);
        if (list_hides(entry, h)) {
          EXPECT_FALSE(seen.shows) << "list " << list << ", block " << block << ", half " << h;
        } else if (list_is_full(entry, h)) {
          EXPECT_TRUE(seen.shows && !seen.hides) << "list " << list << ", block " << block << ", half " << h;
        } else if (!text.mask_needs_s) {
          EXPECT_TRUE(seen.shows && seen.hides) << "list " << list << ", block " << block << ", half " << h;
        }
        if (::testing::Test::HasFailure()) return true;
      }
    }
    EXPECT_EQ(next, head.count) << "list " << list;
    return true;
  }
};

const std::vector<CudaProgram>& programs() {
  static const std::vector<CudaProgram> all = cuda_programs(kDrawnForHost);
  return all;
}
std::vector<size_t> with_masks() {
  std::vector<size_t> places;
  for (size_t n = 0; n < programs().size(); ++n) {
    if (programs()[n].checked->program.mask >= 0) places.push_back(n);
  }
  return places;
}

class ProgramLists : public ::testing::TestWithParam<size_t> {};

TEST_P(ProgramLists, ListWhatTheMaskShows) {
  const CudaProgram& program = programs()[GetParam()];
  const CudaTextEntry& text = kCudaTexts[GetParam()];
  SCOPED_TRACE(program.what);
  const core::score::MaskValues values = mask_values(program.checked->program);
  ASSERT_EQ(values.row, text.mask_row_values);
  ASSERT_EQ(values.column, text.mask_column_values);
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (const bool transposed : {false, true}) {
    // Many tiles, or several groups of blocks for few rows.
    const bool wide = draw(0, 2) == 0;
    const int rows = wide ? draw(1, 40) : draw(65, 200), cols = wide ? draw(1100, 1500) : draw(65, 260);
    World world(GetParam() + 1, transposed ? cols : rows, transposed ? rows : cols);
    Storage storage(program, world);
    ScoreProgramParams params = cuda::program_params(storage.bound, nullptr);
    Lists lists(text, program, world, transposed, random);
    params.whole.group = lists.p.group;
    lists.make(params);
    ASSERT_EQ(lists.expect_right(params), lists.count);
    lists.expect_tiles_ordered();
    if (transposed) lists.expect_ordered(draw(0, 1) != 0);
    if (HasFailure()) return;

    // Captured tensors change, and the pool holds a part of what is needed.
    for (auto& [name, bytes] : storage.bytes)
      std::rotate(bytes.begin(), bytes.begin() + bytes.size() / 16 * 8, bytes.end());
    const int taken = lists.words[0];
    lists.set_room(taken / 2);
    lists.make(params);
    const int made = lists.expect_right(params);
    lists.expect_tiles_ordered();
    if (taken > 1 && program.checked->program.tensors.empty()) {
      EXPECT_LT(made, lists.count);
      EXPECT_NE(lists.words[kProgramLacksRoom], 0);
    }
    if (transposed) lists.expect_ordered(draw(0, 1) != 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Score, ProgramLists, ::testing::ValuesIn(with_masks()));

}  // namespace
}  // namespace tessera::testing
