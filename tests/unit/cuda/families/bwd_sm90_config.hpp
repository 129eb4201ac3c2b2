// A config of bwd_sm90 for tests of its device code on the host.
#pragma once

#include "tessera/bwd_sm90/config.hpp"

namespace tessera {

constexpr BwdSm90Config bwd_sm90_config(bool varlen, bool deterministic, bool block_mask) {
  return {.dtype = Dtype::kBFloat16,
          .head_dim = 128,
          .block_m = 64,
          .block_n = 128,
          .stages = 2,
          .ds_stages = 2,
          .window = true,
          .varlen = varlen,
          .deterministic = deterministic,
          .alternate = false,
          .staged_dq = true,
          .d_bias = false,
          .d_captured = false,
          .d_factor = false,
          .d_diagonal = false,
          .score = {},
          .block_mask = block_mask,
          .split_group = false,
          .sums = false,
          .whole_head = false};
}

}  // namespace tessera
