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
// Time of the sequences of one work tile's rows, in microseconds.
double decode_sm90_tokens_us(const tessera_plan& plan);
// Whether a packed batch, most of whose sequences have a token or so, has chunks of few enough rows and many enough keys
// for a launch of decode_sm90 of their own. Launched in sequence, the two launches cost the sum of their times. With
// fwd_sm90 for a chunk of 16 queries beside 16 tokens of 4096 keys each, the call took 120 us instead of 93 + 16; for 8
// such chunks 183 instead of 94 + 81 (an H100 at 02f3d19).
bool decodes_chunks(const tessera_plan& plan);
int64_t decode_sm90_workspace_bytes(const DecodeSm90Plan& own);

// Of data whose rows of q, k and v start at multiples of 16 bytes. beside: after fwd_sm90's launch for the other sequences, which waits for
// what is ahead of both.
tessera_status list_decode_sm90(const tessera_plan& plan, const DecodeSm90Plan& own, bool beside,
                                const tessera_buffers& buffers, void* workspace, LaunchList& launches);

}  // namespace tessera::cuda
