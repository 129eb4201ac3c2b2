// The interface of decode_sm90 that mixed_sm90 uses for sequences of few rows.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/tessera.h"

namespace tessera::cuda {

// Why decode_sm90 does not support sequences of at most `queries` queries; "" if it does.
std::string refuse_decode_sm90(const tessera_plan& plan, int64_t queries);
// Appends a step for the sequences of `least` to `most` queries. beside: the launch follows
// fwd_sm90's for the other sequences, which itself waits for the work before both.
tessera_plan_step& add_decode_sm90(tessera_plan& plan, int64_t least, int64_t most, bool beside = false);
// Time of the sequences whose rows fit one work tile, in microseconds.
double decode_sm90_tokens_us(const tessera_plan& plan);
// Whether the chunks of a packed batch, most of whose sequences have about one token, have few enough rows and many
// enough keys for a decode_sm90 launch of their own. Launched in sequence, the two launches cost the sum of their
// times. With fwd_sm90 for a chunk of 16 queries beside 16 tokens of 4096 keys each, the call took 120 us instead of 93
// + 16; for 8 such chunks 183 instead of 94 + 81 (an H100 at 02f3d19).
bool decodes_chunks(const tessera_plan& plan);

}  // namespace tessera::cuda
