// Every kernel's config and params, for the host.
#pragma once

#include "tessera/append/config.hpp"
#include "tessera/block_lists/config.hpp"
#include "tessera/bwd_sm80/config.hpp"
#include "tessera/bwd_sm90/config.hpp"
#include "tessera/bwd_sm90_d256/config.hpp"
#include "tessera/bwd_sm90_d512/config.hpp"
#include "tessera/combine/config.hpp"
#include "tessera/comparison/fwd_fa1/config.hpp"
#include "tessera/comparison/standard/config.hpp"
#include "tessera/decode_sm90/config.hpp"
#include "tessera/fwd_sm80/config.hpp"
#include "tessera/fwd_sm90/config.hpp"
#include "tessera/fwd_sm90_d512/config.hpp"
#include "tessera/live_tiles/config.hpp"
#include "tessera/program_sums/config.hpp"
#include "tessera/shared_prefix/config.hpp"
