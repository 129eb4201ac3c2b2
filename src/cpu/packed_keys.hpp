// Forward with AMX: which keys of a call are packed once, ahead of the items that read them, and the memory that this
// needs.
#pragma once

#include "core/geometry.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {

// Bytes of workspace for a plan's packed keys and values; 0: each item packs its own.
int64_t packed_keys_bytes(const tessera_plan& plan);

// Bytes of one super-block of one KV head.
int64_t packed_block_bytes(const tessera_plan& plan);

// Super-blocks first ... first + count - 1 of a sequence's keys.
struct PackedBlocks {
  int64_t first, count;
};
// The super-blocks that are packed ahead of a sequence's items of kind `way`: those that its queries see by position,
// if the plan has memory for them and the items read a key often enough.
PackedBlocks packed_blocks(const tessera_plan& plan, Way way, const core::SequenceView& sequence);

}  // namespace tessera::cpu
