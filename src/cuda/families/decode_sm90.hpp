// What mixed_sm90 asks of decode_sm90, which serves its sequences of few rows.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// All that decode_sm90 has decided for the sequences of at most `most_queries` queries.
struct DecodeSm90Plan {
  DecodeSm90Config config;
  Grid grid;
  int team, min_tiles, most_parts, most_queries, part_rows;
};

// "" where it takes the sequences of at most `queries` queries.
std::string refuse_decode_sm90(const tessera_plan& plan, int64_t queries);
DecodeSm90Plan plan_decode_sm90(const tessera_plan& plan, int64_t queries);
int64_t decode_sm90_workspace_bytes(const DecodeSm90Plan& own);

// Of data whose rows of q, k and v start at multiples of 16 bytes. beside: after fwd_sm90's launch for the other sequences, which waits for
// what is ahead of both.
tessera_status list_decode_sm90(const tessera_plan& plan, const DecodeSm90Plan& own, bool beside,
                                const tessera_buffers& buffers, void* workspace, LaunchList& launches);

}  // namespace tessera::cuda
