// Predicts the time of a schedule from a device's measured rates, see tessera_ranks_problem.
#pragma once

#include <vector>

#include "distributed/schedule.hpp"

namespace tessera::distributed {

struct Prediction {
  double predicted_us = 0;  // of the slowest rank
  double compute_us = 0;    // of the rank that computes the most, without any exchange
  double ideal_us = 0;      // the mean over ranks of the time without any exchange
  double sent_bytes = 0;    // the most that a rank sends
  double largest_area = 0;  // in units of whole heads
  int32_t steps = 0;
};

// Sets the times of one rank's steps.
void add_times(const tessera_ranks_problem& problem, const std::vector<tessera_chunk>& chunks, const Mesh& mesh,
               int32_t rank, Schedule& schedule);

// Simulates every rank's list: a step begins where the previous one ends, and an exchange begins when both ranks have
// reached it.
Prediction predict(const tessera_ranks_problem& problem, const std::vector<tessera_chunk>& chunks, const Mesh& mesh);

}  // namespace tessera::distributed
