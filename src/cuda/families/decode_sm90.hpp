// What mixed_sm90 asks of decode_sm90, which serves its sequences of few rows.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// All that decode_sm90 has decided for the sequences of `least_queries` to `most_queries` queries.
struct DecodeSm90Plan {
  DecodeSm90Config config;
  Grid grid;
  int team, min_tiles, short_tiles, most_parts, least_queries, most_queries, part_rows;
};

// "" where it takes the sequences of at most `queries` queries.
std::string refuse_decode_sm90(const tessera_plan& plan, int64_t queries);
// Of the sequences of `least` to `most` queries.
DecodeSm90Plan plan_decode_sm90(const tessera_plan& plan, int64_t least, int64_t most);
// What the plan says of the launch.
void describe_decode_sm90(const DecodeSm90Plan& own, tessera_plan& plan);
// Whether a packed batch has few sequences, most with a token or so, and a chunk of few queries whose keys are worth reading by all of the GPU.
bool few_long_chunks(const tessera_plan& plan);
// Whether decode_sm90 takes such a batch's chunks, however many sequences there are, in a launch of their own.
bool decodes_chunks(const tessera_plan& plan);
int64_t decode_sm90_workspace_bytes(const DecodeSm90Plan& own);

// Of data whose rows of q, k and v start at multiples of 16 bytes. beside: after fwd_sm90's launch for the other sequences, which waits for
// what is ahead of both.
tessera_status list_decode_sm90(const tessera_plan& plan, const DecodeSm90Plan& own, bool beside,
                                const tessera_buffers& buffers, void* workspace, LaunchList& launches);

}  // namespace tessera::cuda
