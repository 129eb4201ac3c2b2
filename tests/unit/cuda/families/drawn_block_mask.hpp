// A random problem with a block mask, for tests of device code on the host.
#pragma once

#include <random>
#include <vector>

#include "tessera/block_lists/config.hpp"

namespace tessera {

// Its mask lives as long as it does.
struct DrawnBlockMask {
  BlockListsParams p{};
  std::vector<char> mask;
  int rows, cols;  // of the mask

  DrawnBlockMask(std::mt19937& random, int most_queries, int most_keys, int most_window) {
    const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    const int heads_kv = draw(1, 2), group = draw(1, 2);
    p.batch = draw(1, 2);
    p.heads_kv = Divisor(heads_kv), p.group = Divisor(group), p.heads_q = Divisor(heads_kv * group);
    p.causal = draw(0, 1), p.fixed_diagonal = draw(0, 1);
    p.window_left = draw(0, 2) ? -1 : draw(0, most_window), p.window_right = draw(0, 2) ? -1 : draw(0, most_window);
    p.seqlen_q = p.rows_q = p.max_seqlen_q = draw(1, most_queries);
    p.seqlen_k = p.keys_limit = p.max_seqlen_k = draw(1, most_keys);
    p.mask_block_q = 64 * draw(1, 3), p.mask_block_k = 64 * draw(1, 3);
    rows = (p.seqlen_q + p.mask_block_q - 1) / p.mask_block_q;
    cols = (p.seqlen_k + p.mask_block_k - 1) / p.mask_block_k;
    p.batches = draw(0, 1) ? p.batch : 1, p.heads = draw(0, 1) ? static_cast<int>(p.heads_q) : 1;
    mask.resize(static_cast<size_t>(p.batches) * p.heads * rows * cols);
    for (char& entry : mask) entry = draw(0, 2) == 0;
    p.block_mask.data = mask.data();
    p.block_mask.col = 1, p.block_mask.row = cols;
    p.block_mask.head = p.heads > 1 ? rows * cols : 0, p.block_mask.batch = p.batches > 1 ? p.heads * rows * cols : 0;
  }
  DrawnBlockMask(const DrawnBlockMask&) = delete;
};

}  // namespace tessera
