// Forward by AMX: which keys of a call are packed once, ahead of the items that read them, and how much memory that
// takes.
#pragma once

#include "core/geometry.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {

// What a plan's packed keys and values take of the workspace; 0: its items pack for themselves.
int64_t packed_keys_bytes(const tessera_plan& plan);

// One super-block of one KV head.
int64_t packed_block_bytes(const tessera_plan& plan);

// Super-blocks first ... first + count - 1 of a sequence's keys.
struct PackedBlocks {
  int64_t first, count;
};
// Those that are packed ahead of a sequence's items, which go `way`: where the plan has memory for them and the items
// read a key often enough; those that its queries see by position.
PackedBlocks packed_blocks(const tessera_plan& plan, Way way, const core::SequenceView& sequence);

}  // namespace tessera::cpu
