// A plan for ranks, as the printers use it.
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

// True if this library made the plan, and neither it nor its lengths were changed since.
bool is_plan(const tessera_ranks_plan* plan);
RankSchedule schedule_of(const tessera_ranks_plan& plan, int32_t rank);

}  // namespace tessera::distributed
