#include "distributed/model.hpp"

#include <algorithm>

namespace tessera::distributed {
namespace {

constexpr double kPerGiga_us = 1e-3;  // microseconds per operation at 1 Giga-operation per second is 1e-3

double microseconds(double bytes, double gbps) { return bytes / gbps * kPerGiga_us; }

// The time of the matrix products alone: two forward, five backward.
double products_us(const tessera_ranks_problem& p, double area, double heads_q) {
  const bool backward = p.direction == TESSERA_BACKWARD;
  const double flops = 2.0 * static_cast<double>(p.head_dim + p.head_dim_v) * area * heads_q *
                       static_cast<double>(p.batch) * (backward ? 2.5 : 1.0);
  return flops / (backward ? p.tflops_backward : p.tflops_forward) * 1e-6;
}

// Device-memory traffic beside the products: rows packed for an exchange of heads and unpacked, partial outputs merged
// (float32, read and written, and the new one read), partial gradients added.
double memory_bytes(const tessera_ranks_problem& p, const Heads& heads_q, int32_t rank, const Schedule& s,
                    const tessera_rank_step& step) {
  double bytes = 0;
  for (int64_t t = step.first_transfer; t < step.first_transfer + step.num_transfers; ++t) {
    const tessera_rank_transfer& transfer = s.transfers[static_cast<size_t>(t)];
    const bool packed = transfer.peer / p.head_ranks == rank / p.head_ranks;
    if (transfer.partial && transfer.receive) bytes += 3.0 * static_cast<double>(transfer.bytes);
    if (packed) bytes += 2.0 * static_cast<double>(transfer.bytes);
  }
  if (p.direction == TESSERA_BACKWARD) return bytes;
  const bool merges = step.first_pair > 0;
  for (int64_t i = step.first_pair; merges && i < step.first_pair + step.num_pairs; ++i) {
    const int64_t rows = s.pairs[static_cast<size_t>(i)].q_length * p.batch;
    bytes += 12.0 * static_cast<double>(rows * heads_q.count * p.head_dim_v);
  }
  return bytes;
}

// The greater of the times of sending and receiving, each over its own link.
double exchange_us(const tessera_ranks_problem& p, int32_t rank, const Schedule& s, const tessera_rank_step& step) {
  double us[2] = {};
  for (int64_t t = step.first_transfer; t < step.first_transfer + step.num_transfers; ++t) {
    const tessera_rank_transfer& transfer = s.transfers[static_cast<size_t>(t)];
    const bool same_host = transfer.peer / p.ranks_per_host == rank / p.ranks_per_host;
    us[transfer.receive] += microseconds(static_cast<double>(transfer.bytes), same_host ? p.link_gbps : p.network_gbps);
  }
  return step.num_transfers == 0 ? 0 : std::max(us[0], us[1]) + p.step_us;
}

}  // namespace

void add_times(const tessera_ranks_problem& p, const Heads& heads_q, int32_t rank, Schedule& s) {
  for (tessera_rank_step& step : s.steps) {
    step.compute_us = products_us(p, static_cast<double>(step.area), heads_q.count) +
                      microseconds(memory_bytes(p, heads_q, rank, s, step), p.memory_gbps);
    step.exchange_us = exchange_us(p, rank, s, step);
  }
}

Prediction predict(const tessera_ranks_problem& p, const Mesh& mesh) {
  struct Step {
    double compute_us, exchange_us;
    size_t first_peer, num_peers;
  };
  Prediction result;
  std::vector<std::vector<Step>> steps(static_cast<size_t>(p.ranks));
  std::vector<std::vector<int32_t>> peers(static_cast<size_t>(p.ranks));
  double all_area = 0;
  for (int32_t rank = 0; rank < p.ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    const Heads heads = mesh.heads_q(rank);
    Schedule schedule = mesh.schedule(rank);
    add_times(p, heads, rank, schedule);
    double sent = 0, area = 0;
    for (const tessera_rank_step& step : schedule.steps) {
      const size_t first = peers[r].size();
      for (int64_t t = 0; t < step.num_transfers; ++t) {
        const int32_t peer = schedule.transfers[static_cast<size_t>(step.first_transfer + t)].peer;
        if (peers[r].size() == first || peers[r].back() != peer) peers[r].push_back(peer);
      }
      steps[r].push_back({step.compute_us, step.exchange_us, first, peers[r].size() - first});
      sent += static_cast<double>(step.sent_bytes);
      area += static_cast<double>(step.area);
    }
    area *= static_cast<double>(heads.count) / static_cast<double>(p.heads_q);
    all_area += area;
    result.sent_bytes = std::max(result.sent_bytes, sent);
    result.largest_area = std::max(result.largest_area, area);
    result.steps = static_cast<int32_t>(schedule.steps.size());
  }
  const auto heads_q = static_cast<double>(p.heads_q);
  result.compute_us = products_us(p, result.largest_area, heads_q);
  result.ideal_us = products_us(p, all_area / p.ranks, heads_q);

  std::vector<double> now(static_cast<size_t>(p.ranks), 0), next(now);
  for (size_t n = 0; n < static_cast<size_t>(result.steps); ++n) {
    for (size_t r = 0; r < now.size(); ++r) {
      const Step& step = steps[r][n];
      double together = now[r];
      for (size_t i = 0; i < step.num_peers; ++i) {
        together = std::max(together, now[static_cast<size_t>(peers[r][step.first_peer + i])]);
      }
      const double under = p.overlap_loss * std::min(step.exchange_us, step.compute_us);
      next[r] = std::max(now[r] + step.compute_us + under, step.num_peers ? together + step.exchange_us : 0);
    }
    now.swap(next);
  }
  result.predicted_us = *std::max_element(now.begin(), now.end());
  return result;
}

}  // namespace tessera::distributed
