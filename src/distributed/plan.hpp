// A plan for ranks, as its printers see it.
#pragma once

#include <vector>

#include "distributed/schedule.hpp"
#include "tessera/distributed.h"

namespace tessera::distributed {

struct RankSchedule {
  std::vector<tessera_chunk> chunks;
  Heads heads_q, heads_kv;
  Schedule schedule;  // with the model's times
};

// Whether this library made it, and nothing changed it or its lengths since.
bool is_plan(const tessera_ranks_plan* plan);
RankSchedule schedule_of(const tessera_ranks_plan& plan, int32_t rank);

}  // namespace tessera::distributed
